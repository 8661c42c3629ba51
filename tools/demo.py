r"""Serves a page on which people try a model in their browser.

    timm-moe-dg demo output/RUN
    timm-moe-dg demo hf-hub:OWNER/NAME --port 8000

You drop an image, give its place if the model reads places, and see what
predict answers. The page is for this machine alone unless you give --host.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from timm_moe_dg.cli.arguments import add_device_option
from timm_moe_dg.cli.text import markdown
from timm_moe_dg.cli.tool import ToolParser, tool, tool_parser
from timm_moe_dg.cli.values import model_source, positive_int
from timm_moe_dg.errors import ArgumentError, MoeDgError, needs
from timm_moe_dg.inference import predictor as inference
from timm_moe_dg.inference.image_rows import ImageRow
from timm_moe_dg.inference.predictor import PartOptions, Predictor, load_model

CLASSES, COVERAGE = 5, 0.9  # classes that are shown, and the coverage of a calibrated model's sets
LABELS = {"lon": "Longitude (degrees)", "lat": "Latitude (degrees)", "location": "Location id"}
NOTES = {
    inference.UNLIKE: "This image is **unlike** the training images. Do not rely on the answer.",
    inference.OUTSIDE_COVERAGE: "The place is **outside of the coverage**: the shared expert answers alone.",
    inference.SHARED_EXPERT: "No place is given, or one without training images: the shared expert answers alone.",
}


def build_parser() -> ToolParser:
    """Builds the command line."""
    parser = tool_parser("demo.py", __doc__, "MODEL [options]")
    add = parser.add_argument
    add("model", type=model_source, metavar="MODEL", help="run folder, hf-hub:OWNER/NAME or local-dir:FOLDER")
    add("--host", help="address to listen on; 0.0.0.0 is for every machine (default: 127.0.0.1)")
    add("--port", type=positive_int, metavar="N", help="port to listen on (default: the first free one from 7860)")
    add_device_option(add)
    return parser


def open_predictor(model: str, device: str | None = None) -> Predictor:
    """Loads a model, with the sets of its calibration if it has one."""
    options = PartOptions(model=model, device=device, workers=0)
    loaded = load_model(options)
    coverage = None if loaded.calibration is None else COVERAGE
    return Predictor(replace(options, top_k=min(CLASSES, loaded.network.num_classes), coverage=coverage), loaded)


def answer(predictor: Predictor, path: str | None, *values: float | None) -> tuple[dict[str, float], str]:
    """Returns the probabilities of classes, and remarks in Markdown, for an image and its metadata. None is unknown.

    Raises:
        MoeDgError: The file is no image, or a value is out of its range. The message has no path of this machine.
    """
    if path is None:
        raise MoeDgError("Choose an image first.")
    numbers = [unknown if v is None else v for v, unknown in zip(values, predictor.names.unknown, strict=False)]
    (part,) = predictor.parts([(0, [ImageRow(path, tuple(numbers) or None)])])
    row = {name: column[0] for name, column in part.table.items()}
    if row[inference.STATUS] == inference.UNREADABLE:
        raise MoeDgError(f"{Path(path).name} cannot be read. Choose an image file.")
    suffixes = ["", *(f"_{rank}" for rank in range(2, predictor.options.top_k + 1))]
    probabilities = {str(row[f"class{suffix}"]): float(row[f"probability{suffix}"]) for suffix in suffixes}
    notes = [NOTES.get(row[inference.STATUS], "")]
    if inference.SET in row:
        classes = ", ".join(map(markdown, row[inference.SET])) or "no class"
        notes.append(f"Set for {COVERAGE:.0%} coverage on images like the validation images: **{classes}**.")
    return probabilities, "\n\n".join(filter(None, notes))


def build_page(model: str, device: str | None = None) -> Any:
    """Builds the page of a model, a `gradio.Interface`. Its `launch()` serves it, without calls to other machines."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with needs("the page", "gradio", "demo"):
        import gradio as gr
    predictor = open_predictor(model, device)

    def answered(*inputs: Any) -> tuple[dict[str, float], str]:
        try:
            return answer(predictor, *inputs)
        except MoeDgError as error:
            raise gr.Error(str(error), print_exception=False) from error

    # A browser shows no file of other bands than RGB. Without an image mode, the file arrives as it was sent
    is_rgb = predictor.model.bands.is_rgb
    image = gr.Image(type="filepath", image_mode=None, label="Image") if is_rgb else gr.File(label="Image")
    names = predictor.names.all if predictor.reads_metadata else ()
    precision = 0 if predictor.names.ids else None
    numbers = [gr.Number(label=LABELS.get(name, name), precision=precision) for name in names]
    outputs = [gr.Label(label="Probability", num_top_classes=CLASSES), gr.Markdown()]
    title = markdown(Path(model.removesuffix("/best")).name)
    # One call at a time, since the network is shared
    settings: dict[str, Any] = {"flagging_mode": "never", "concurrency_limit": 1, "delete_cache": (600, 3600)}
    return gr.Interface(answered, [image, *numbers], outputs, title=title, api_name="answer", **settings)


@tool
def main(argv: Sequence[str]) -> None:
    """Serves the page until the process is interrupted."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    page = build_page(args.model, args.device)
    private = {"share": False, "ssr_mode": False, "footer_links": [], "quiet": True, "max_file_size": "20mb"}
    try:
        place = {"server_name": args.host, "server_port": args.port}
        _, address, _ = page.launch(prevent_thread_lock=True, **place, **private)
    except OSError as error:
        raise ArgumentError.of("port", args.port, f"cannot be listened on ({error}); give another") from error
    print(f"{address} (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    main()
