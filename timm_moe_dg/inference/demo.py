"""A web page on which people try a model: drop an image, click its place, read the answer that predict gives."""

import logging
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from ..analysis.geography_plots import coastlines
from ..analysis.routing.chosen_images import small_pixels
from ..analysis.routing.map_plots import Photograph, plot_expert_maps
from ..analysis.routing.maps import routing_maps
from ..analysis.run_view import open_run
from ..cli.arguments import default_device
from ..cli.text import markdown, one_line
from ..cli.values import LOCAL
from ..data.readers.images import read_pixels
from ..errors import ArgumentError, ImageReadError, MoeDgError, needs
from ..networks.averages import Ensemble, evaluation_view, load_predictor
from ..networks.bands import bands_of
from ..networks.calibration import find_calibration
from .certainty import SET
from .image_rows import ImageRow
from .predictor import DISTANCE, EXPERTS, OUTSIDE_COVERAGE, SHARED_EXPERT, STATUS, UNLIKE, PartOptions, Predictor

COVERAGE = 0.9  # of the prediction sets of a calibrated model
_MAX_FILE_SIZE = "20mb"
_CLASSES, _EXAMPLES = 5, 6
_LABELS = {"lon": "Longitude (degrees)", "lat": "Latitude (degrees)", "location": "Location id"}
_SCALE = 3  # pixels of the map for a degree
_NOTES = {
    UNLIKE: "This image is **unlike** the training images. Do not rely on the answer.",
    OUTSIDE_COVERAGE: "The place is **outside of the coverage**: the shared expert answers alone.",
    SHARED_EXPERT: "No place is given: the shared expert answers alone.",
}
_logger = logging.getLogger(__name__)


class Demo:
    """A model with the functions of its page.

    Args:
        model: As `predict --model` takes it.
        device: Name of a torch device; None for the default.
    """

    def __init__(self, model: str, device: str | None = None) -> None:
        network = load_predictor(model)
        calibration = find_calibration(model, network)
        is_one = not isinstance(network, Ensemble)
        has_experts = is_one and any(hasattr(module, "record_routing") for module in network.modules())
        has_points = getattr(getattr(network, "metadata_encoder", None), "coverage", None) is not None
        options = PartOptions(
            model=model,
            device=device or default_device(),
            workers=0,
            top_k=min(_CLASSES, network.num_classes),
            columns=[name for name, has in {EXPERTS: has_experts, DISTANCE: has_points}.items() if has],
            coverage=None if calibration is None else COVERAGE,
        )
        self.predictor = Predictor(options, network, calibration)
        self.model, self.network = model, self.predictor.network
        self.names: Sequence[str] = self.predictor.names.all if self.predictor.reads_metadata else ()
        self._folder = tempfile.TemporaryDirectory()  # of examples and pictures
        self.points = self.network.metadata_encoder.coverage.points.cpu().numpy() / 1e6 if has_points else []

    def answer(self, path: str | None, *values: str) -> tuple[dict[str, float], str, Any]:
        """Returns the probabilities of classes, remarks in Markdown, and a picture, for a file and its metadata.

        Metadata are numbers in the order of `names`, and empty texts for unknown ones.

        Raises:
            MoeDgError: The file is no image, or a value is out of its range. The message is one line.
        """
        if path is None:
            raise MoeDgError("Choose an image first.")
        metadata = self._metadata(values)
        try:
            pixels = read_pixels(path, bands_of(self.network))
        except ImageReadError as error:  # whose message has the server's path
            raise ImageReadError(f"image={Path(path).name!r}: cannot be read; choose an image file") from error
        (part,) = self.predictor.parts([(0, [ImageRow(path, metadata)])])
        row = {name: column[0] for name, column in part.table.items()}
        suffixes = ["", *(f"_{rank}" for rank in range(2, self.predictor.options.top_k + 1))]
        probabilities = {str(row[f"class{suffix}"]): float(row[f"probability{suffix}"]) for suffix in suffixes}
        return probabilities, self._remarks(row), self._picture(pixels, metadata)

    def _metadata(self, values: Sequence[str]) -> tuple[float, ...] | None:
        numbers = list(self.predictor.names.unknown)
        for position, (name, text) in enumerate(zip(self.names, values, strict=False)):
            try:
                numbers[position] = (int if self.predictor.names.ids else float)(text) if text else numbers[position]
            except ValueError as error:
                raise ArgumentError.of(name, text, "is no number; correct it, or leave it empty") from error
        return tuple(numbers) if any(values) else None

    def _remarks(self, row: dict[str, Any]) -> str:
        notes = [_NOTES.get(row[STATUS], "")]
        if SET in row:
            classes = ", ".join(map(markdown, row[SET])) or "no class"
            notes.append(f"Set for {COVERAGE:.0%} coverage on images like the validation images: **{classes}**.")
        if not math.isnan(row.get(DISTANCE, math.nan)):
            radius = self.network.metadata_encoder.coverage.radius
            limit = f" The model routes within {radius:,.0f} km." if radius is not None else ""
            notes.append(f"The nearest training location is {row[DISTANCE]:,.0f} km away.{limit}")
        if EXPERTS in row:
            experts = ("shared" if index < 0 else str(index) for index in row[EXPERTS])
            notes.append(f"Expert of most patches, by mixture layer: {', '.join(experts)}.")
        return "\n\n".join(filter(None, notes))

    def _picture(self, pixels: Any, metadata: tuple[float, ...] | None) -> np.ndarray:
        """Draws the experts of the last mixture block over the image, or the image alone if there are none."""
        small = small_pixels(pixels)
        inputs = [evaluation_view(self.network)(pixels)]
        if metadata is not None:
            inputs.append(torch.tensor(metadata[0] if self.predictor.names.ids else metadata))
        try:
            maps = routing_maps(self.network, *(value.unsqueeze(0).to(self.predictor.device) for value in inputs))
        except ArgumentError:  # no transformer with experts in its blocks
            return small
        block = max(maps)
        path = Path(self._folder.name, "experts.png")
        photograph = Photograph(f"block {block}", small, maps[block].first[0])
        plot_expert_maps([("", [photograph])], maps[block].num_experts, path)
        return np.asarray(Image.open(path).convert("RGB"))

    def world(self, lon: str = "", lat: str = "") -> Image.Image:
        """Draws the world with the training locations, of which models hold a thinned list, and a place."""
        image = Image.new("RGB", (360 * _SCALE, 180 * _SCALE), "white")
        draw = ImageDraw.Draw(image)
        for line in coastlines():
            draw.line([_pixel(*point) for point in line.tolist()], "#606060", 2)
        for point in self.points:
            draw.circle(_pixel(*point), 3, fill="#0072b2")
        with suppress(ValueError, OverflowError):  # of texts that are no numbers, which `answer` names
            center = _pixel(float(lon), float(lat))
            draw.circle(center, 12, outline="white", width=8)
            draw.circle(center, 10, outline="#d00000", width=4)
        return image

    def examples(self) -> list[tuple[str, list[str]]]:
        """Writes images of the run's first held-out domain: files with their metadata. Only runs have any."""
        try:
            view = open_run(Path(self.model.removeprefix(LOCAL)).parent)
            domain = view.domains[view.args["test_domains"][0]]
            images = []
            for position in np.linspace(0, len(domain) - 1, _EXAMPLES).round().astype(int).tolist():
                path, metadata = f"{self._folder.name}/{position}.png", view.metadata(domain, position)
                Image.fromarray(np.asarray(domain.pixels(position))).save(path)
                values = [] if metadata is None else metadata.flatten().tolist()
                images.append((path, [str(round(value, 6)) for value in values]))
        except (MoeDgError, IndexError, KeyError, OSError, TypeError) as error:
            _logger.info(one_line(f"without examples: {error}"))
            return []
        return images


def _pixel(lon: float, lat: float) -> tuple[float, float]:
    return (lon + 180) * _SCALE, (90 - lat) * _SCALE


def place_of(pixel: Sequence[float]) -> tuple[str, str]:
    """Returns longitude and latitude in degrees of a pixel of `Demo.world`."""
    return f"{pixel[0] / _SCALE - 180:.2f}", f"{90 - pixel[1] / _SCALE:.2f}"


def serve(model: str, device: str | None = None, host: str | None = None, port: int | None = None) -> None:
    """Serves the page of a model until the process is interrupted. `build_page` has the first two arguments.

    Without a host, the page is for this machine alone, or for everyone in a Space of the Hub.

    Raises:
        ArgumentError: The port is in use, or the host is no address of this machine.
    """
    page = build_page(model, device)
    private = {"share": False, "ssr_mode": False, "footer_links": [], "quiet": True, "max_file_size": _MAX_FILE_SIZE}
    try:
        _, address, _ = page.launch(server_name=host, server_port=port, prevent_thread_lock=True, **private)
    except OSError as error:
        raise ArgumentError.of("port", port, f"{host} cannot be listened on ({error}); give another") from error
    print(f"{address} (Ctrl-C ends it)", flush=True)  # noqa: T201
    page.block_thread()


def build_page(model: str, device: str | None = None) -> Any:
    """Builds the page of a model, a `gradio.Blocks`. Its `launch()` serves it, without calls to other machines.

    Raises:
        MissingDependencyError: gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with needs("the page", "gradio", "demo"):
        import gradio as gr
    demo = Demo(model, device)
    examples = demo.examples()
    has_map = tuple(demo.names[:2]) == ("lon", "lat")

    def answer(*inputs: Any) -> tuple[Any, ...]:
        try:
            return demo.answer(*inputs)
        except MoeDgError as error:
            raise gr.Error(str(error), print_exception=False) from error

    def choose(event: gr.SelectData) -> list[str]:
        path, values = examples[event.index]
        return [path, *(values or [""] * len(demo.names))]

    # One call at a time, since matplotlib and the network are shared
    once: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "model", "show_progress": "minimal"}
    path = Path(model.removeprefix(LOCAL))
    name = (path.parent if path.name == "best" else path).name if model.startswith(LOCAL) else model
    shown: dict[str, Any] = {"interactive": False, "buttons": []}
    with gr.Blocks(title=name, analytics_enabled=False, delete_cache=(600, 3600)) as page:
        gr.Markdown(f"# {markdown(name)}")
        with gr.Row():
            with gr.Column(min_width=300):
                image = gr.File(label="Image", height=120)
                numbers = [gr.Textbox(label=_LABELS.get(name, name), placeholder="unknown") for name in demo.names]
                if has_map:
                    gr.Markdown("Click the map to choose the place. Dots are training locations.")
                    world = gr.Image(demo.world(), show_label=False, **shown)
                button = gr.Button("Predict", variant="primary")
                if examples:
                    gr.Markdown("Examples of the held-out domain:")
                    thumbnails: dict[str, Any] = {"columns": 3, "height": "auto", "allow_preview": False}
                    gallery = gr.Gallery([path for path, _ in examples], show_label=False, **thumbnails, **shown)
            with gr.Column(min_width=300):
                label = gr.Label(label="Probability", num_top_classes=_CLASSES)
                remarks = gr.Markdown()
                picture = gr.Image(label="Experts" if demo.predictor.options.columns else "Image", **shown)
        inputs, outputs = [image, *numbers], [label, remarks, picture]
        gr.on([button.click, image.upload, *(box.submit for box in numbers)], answer, inputs, outputs, **once)
        if has_map:
            places = numbers[:2]

            def click(event: gr.SelectData) -> tuple[str, str]:
                return place_of(event.index)

            world.select(click, None, places)
            gr.on([box.change for box in places], demo.world, places, world, **{**once, "show_progress": "hidden"})
        if examples:
            gallery.select(choose, None, inputs).then(answer, inputs, outputs, **once)
    return page
