"""A MoGE model's experts over the world: discovered domains, the accuracy of each expert on each, and their pictures.

The discovered domain of a place is the routed expert with the largest weight there. The model is not wrapped.
Coastlines are those of Natural Earth, see coastlines.md. The numbers behind the pictures go to analysis.json and
forced_experts.json.

Axes: E routed experts, B images or places.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..data import Domain, EvaluationImages, PlacesDomain, Split
from ..errors import ArgumentError
from ..layers import GeoMoeMlp
from ..layers.encoders.coverage import distances
from ..layers.reports import discovered_domains
from ..metrics import group_accuracy
from ..networks.build import Network
from ..protocols.evaluation import evaluation_mode
from ..storage.files import json_text, write_text
from .run_view import RunView
from .style import (
    LEGEND_BELOW,
    SHARED_COLOR,
    Style,
    expert_color,
    fitted,
    optional_picture,
    picture,
    swatch,
    write_numbers,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Batches = Iterable[Sequence[Tensor]]  # images (B, 3, H, W), targets, groups and metadata (B, ...)
KM_PER_DEGREE = 111.2
_COLUMNS, _MOST_COLUMNS = 180, 360  # cells across a map, in general and at most
FAR = 1000.0  # km to the nearest training coordinate; routed cells beyond are pale
VEIL = 0.7  # opacity of the white over pale cells
WIDTH = 6.4  # inches, of the map
_LEGEND_COLUMNS = 6


class Extent(NamedTuple):
    """A part of the globe, in degrees."""

    west: float
    east: float
    south: float
    north: float


WORLD = Extent(-180.0, 180.0, -90.0, 90.0)


class DomainMap(NamedTuple):
    """Discovered domains on a grid of equal cells."""

    extent: Extent
    experts: Tensor  # (H, W) int64 from the south-west, the discovered domain; -1 where the model does not route
    num_experts: int  # E
    distance: Tensor | None = None  # (H, W) km to the nearest training coordinate; None if not stored
    radius: float | None = None  # km, beyond which the model does not route; None if it routes everywhere


class ExpertMatrix(NamedTuple):
    """Accuracy by discovered domain of the sample and by forced expert (MoGE, Figure 3)."""

    accuracy: Tensor  # (E, E) rows are domains, columns forced experts; NaN in the row of a domain without samples
    num_samples: Tensor  # (E,) by domain
    routed: Tensor  # (E,) accuracy of each domain with ordinary routing


def geo_layers(model: nn.Module) -> list[GeoMoeMlp]:
    """The MoGE layers of a model in order. Raises ArgumentError if there are none."""
    layers = [module for module in model.modules() if isinstance(module, GeoMoeMlp)]
    if not layers:
        raise ArgumentError.of("model", type(model).__name__, "has no metadata-routed experts; give a MoGE model")
    return layers


def domains_at(model: Network, metadata: Tensor) -> Tensor:
    """The discovered domain of each place: argmax of the last layer's noiseless weights. No image is needed.

    (B, ...) metadata, as the model's encoder takes them, on any device -> (B,) int64 on CPU; -1 for unknown places and
    for places outside the model's coverage radius.
    """
    layers = geo_layers(model)
    with evaluation_mode(model):
        # Of the images, the encoder uses the batch size alone
        codes = layers[-1].router.codes
        context, is_routed = model.metadata_encoder(codes.new_zeros(len(metadata), 1), metadata.to(codes.device))
        return discovered_domains(layers[-1].router(context)._replace(routed=is_routed)).cpu()


def map_extent(places: Sequence[Tensor], radius: float | None = None) -> Extent:
    """Returns the part of the globe that shows all places, (N, 2) degrees each, and a margin: a tenth, or `radius` km.

    It is a degree wide or more, and as high as a half to the whole of its width. Places on both sides of the date line
    have the whole globe.
    """
    rows = torch.cat([part.double() for part in places])
    rows = rows[~rows.isnan().any(dim=1)]
    if not len(rows):
        return WORLD
    low, high = rows.amin(0), rows.amax(0)
    span = high - low
    span = torch.maximum(span * 1.2, span + min(2.2 * (radius or 0.0) / KM_PER_DEGREE, 20.0))
    width = max(float(span[0]), float(span[1]), 1.0)
    height = min(max(float(span[1]), width / 2), 180.0)
    if width > 180.0:
        return WORLD
    west, south = (low + high)[0].item() / 2 - width / 2, (low + high)[1].item() / 2 - height / 2
    west, south = min(max(west, -180.0), 180.0 - width), min(max(south, -90.0), 90.0 - height)
    return Extent(west, west + width, south, south + height)


def cell_width(extent: Extent, radius: float | None) -> float:
    """Returns the width of a map's cells in degrees, at most two thirds of a coverage radius in km.

    Wider cells would miss the places that the model routes. There are 180 to 360 cells across the map.
    """
    across = extent.east - extent.west
    widest = math.inf if radius is None else radius / KM_PER_DEGREE / 1.5
    return max(min(across / _COLUMNS, widest), across / _MOST_COLUMNS)


def domain_map(model: Network, places: Sequence[Tensor]) -> DomainMap:
    """Maps the part of the globe with all places, (N, 2) degrees each, and the training coordinates of the model.

    Further metadata are at their training means.
    """
    coverage, radius = model.metadata_encoder.coverage, None
    if coverage is not None:
        places, radius = [*places, coverage.degrees.cpu()], coverage.radius
    extent = map_extent(places, radius)
    step = cell_width(extent, radius)
    longitude, latitude = _centers(extent.west, extent.east, step), _centers(extent.south, extent.north, step)
    rows, columns = torch.meshgrid(latitude, longitude, indexing="ij")
    means = [number.mean for number in getattr(model.metadata_encoder.encoder, "numbers", ())]
    centers = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    metadata = torch.cat([centers, torch.tensor(means).expand(len(centers), -1)], dim=1)
    experts, distance = domains_at(model, metadata).view(rows.shape), None
    if coverage is not None:
        distance = distances(coverage, centers.to(coverage.points.device)).cpu().view(rows.shape)
    return DomainMap(extent, experts, geo_layers(model)[-1].experts.num_experts, distance, radius)


def _centers(low: float, high: float, step: float) -> Tensor:
    """Centers of equal cells, of at most `step` degrees, from `low` to `high`."""
    number = math.ceil((high - low) / step - 1e-9)
    return low + (torch.arange(number) + 0.5) * ((high - low) / number)


def forced_expert_matrix(model: Network, batches: Batches) -> ExpertMatrix:
    """Measures every expert on the samples of every discovered domain, from batches on the model's device.

    The expert mode is "routed" afterwards. Samples without metadata have no domain and are left out.
    """
    num_experts = geo_layers(model)[-1].experts.num_experts
    parts = []
    try:
        with evaluation_mode(model):
            for images, target, _, metadata in batches:
                rows = [domains_at(model, metadata), target.cpu()]
                for mode in ("routed", *range(num_experts)):
                    model.set_expert_mode(mode)
                    rows.append(model(images, metadata).argmax(1).cpu())
                parts.append(torch.stack(rows))
    finally:
        model.set_expert_mode("routed")
    table = torch.cat(parts, dim=1)
    domain, target, *predictions = table[:, table[0] >= 0]
    columns = [group_accuracy(predicted, target, domain, num_experts) for predicted in predictions]
    accuracy = torch.stack([column.accuracy for column in columns], dim=1)
    return ExpertMatrix(accuracy[:, 1:], columns[0].num_samples, accuracy[:, 0])


def is_geographic(view: RunView, role: str) -> bool:
    """Whether a run is of a MoGE model on data whose images have places."""
    return hasattr(view.model, "set_expert_mode") and bool(_domains_with_places(view, role))


def draw_domains(view: RunView, figures: Path, role: str) -> dict[str, object]:
    """Draws map.png if the metadata are coordinates, and writes the numbers to analysis.json.

    "nmi" of the returned numbers is the agreement of discovered domains with the groups.
    """
    from sklearn.metrics import normalized_mutual_info_score

    domains = _analyzed_domains(view, role)
    places = _by_group((domain, domain.metadata[_test_split(domain).inside]) for domain in domains)
    metadata = torch.cat(list(places.values()))
    groups = torch.repeat_interleave(torch.tensor([len(rows) for rows in places.values()]))
    discovered = domains_at(view.model, metadata)
    if metadata.is_floating_point():  # coordinates; other metadata are integer indices
        tested = view.args.get("test_domains") or ()
        trained = {domain.group for index, domain in enumerate(view.domains) if index not in tested}
        unseen = [domain for domain in view.domains if domain.group not in trained]
        held_out = _by_group((domain, domain.metadata) for domain in unseen if domain.metadata is not None)
        # Without further columns
        shown, dashed = ({name: rows[:, :2] for name, rows in table.items()} for table in (places, held_out))
        with optional_picture(figures / "map.png") as path:
            plot_domain_map(domain_map(view.model, [*shown.values(), *dashed.values()]), path, shown, dashed)
    # The last column counts images without a discovered domain, whose index is -1
    counts = np.zeros((len(places), geo_layers(view.model)[-1].experts.num_experts + 1), int)
    np.add.at(counts, (groups, discovered), 1)
    numbers: dict[str, object] = {
        "role": role,
        "groups": list(places),
        "nmi": float(normalized_mutual_info_score(groups, discovered)),
        "images_by_group_and_domain": counts.tolist(),
    }
    write_text(figures / "analysis.json", json_text(numbers, indent=2))
    return numbers


def draw_forced(view: RunView, figures: Path, role: str) -> None:
    """Draws forced_experts.png for images of the role "id" or "ood", and writes its numbers to forced_experts.json."""
    domains = _analyzed_domains(view, role)
    images = EvaluationImages(domains, list(map(_test_split, domains)), view.transform, with_metadata=True)
    matrix = forced_expert_matrix(view.model, view.evaluation_batches(images))
    with optional_picture(figures / "forced_experts.png") as path:
        plot_expert_matrix(matrix, path)
    numbers = {name: value.tolist() for name, value in matrix._asdict().items()}
    write_text(figures / "forced_experts.json", json_text({"role": role, **numbers}, indent=2))


def _analyzed_domains(view: RunView, role: str) -> list[PlacesDomain]:
    geo_layers(view.model)  # raises for other models
    if not (domains := _domains_with_places(view, role)):
        raise ArgumentError.of("role", role, f"no image of {view.args['dataset']} has this role and a place")
    return domains


def _domains_with_places(view: RunView, role: str) -> list[PlacesDomain]:
    return [domain for domain in view.domains if isinstance(domain, PlacesDomain) and domain.role == role]


def _by_group(rows: Iterable[tuple[Domain, np.ndarray]]) -> dict[str, Tensor]:
    groups: dict[str, list[Tensor]] = {}
    for domain, part in rows:
        groups.setdefault(domain.group, []).append(torch.as_tensor(part))
    return {group: torch.cat(parts) for group, parts in groups.items()}


def _test_split(domain: PlacesDomain) -> Split:
    if domain.split is None:
        remedy = f"{domain.name} has no official test split; give a run on a benchmark with one"
        raise ArgumentError.of("role", domain.role, remedy)
    return Split(domain.split.inside, domain.split.outside[:0])


def plot_domain_map(
    domains: DomainMap, path: Path, places: Mapping[str, Tensor], held_out: Mapping[str, Tensor]
) -> None:
    """Draws discovered domains as a map. Cells far from all training coordinates are pale, cells without routing white.

    `places` and `held_out` map names of groups to coordinates (N, 2), which are black dots. Groups that were not
    trained on have white ones.
    """
    experts = domains.experts[domains.experts >= 0].unique().tolist()
    west, east, south, north = domains.extent
    height = 1.1 + 0.86 * WIDTH * (north - south) / (east - west)
    with picture(path, WIDTH, height + 0.25 * math.ceil(len(experts) / _LEGEND_COLUMNS)) as figure:
        axes = figure.subplots()
        note = _draw_cells(axes, domains)
        for line in coastlines():
            axes.plot(*line.T, color="#404040", linewidth=0.5)
        for groups, color, words in ((places, "black", ""), (held_out, "white", " (held out)")):
            dot: Style = {"markersize": 2, "markerfacecolor": color, "markeredgewidth": 0.4}
            for name, rows in groups.items():
                lonlat = rows[~rows.isnan().any(dim=1)].numpy()
                if len(lonlat):
                    axes.plot(*lonlat.T, "o", color="black", **dot)
                    _write_name(axes, f"{name}{words}", lonlat, domains)
        axes.set(xlim=(west, east), ylim=(south, north), aspect="equal")
        axes.set(xlabel="longitude (degrees)", ylabel="latitude (degrees)")
        axes.set_title(f"Discovered domains: routed expert with the largest weight{note}")
        handles = [swatch(expert_color(index), f"expert {index}") for index in experts]
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": _LEGEND_COLUMNS}, handlelength=1.2)


def coastlines() -> list[np.ndarray]:
    """Returns the world's coastlines, each (N, 2) longitude and latitude in degrees."""
    with np.load(Path(__file__).with_name("coastlines.npz")) as file:
        return np.split(file["points"] / 100.0, file["ends"][:-1])


def _draw_cells(axes: "Axes", domains: DomainMap) -> str:
    """Colors the cells, and returns lines of the title that explain pale and white ones."""
    from matplotlib.colors import ListedColormap

    experts = domains.experts.numpy()
    pale = np.zeros(experts.shape, bool) if domains.distance is None else domains.distance.numpy() > FAR
    pale &= experts >= 0
    colors = ListedColormap([SHARED_COLOR, *map(expert_color, range(domains.num_experts))])
    veil = np.stack([*np.ones((3, *pale.shape)), np.where(pale, VEIL, 0.0)], axis=-1)
    scale: Style = {"cmap": colors, "vmin": -1.5, "vmax": domains.num_experts - 0.5}
    for cells in (experts, veil):
        axes.imshow(cells, extent=domains.extent, origin="lower", interpolation="nearest", **scale)
    notes = [f"pale: more than {FAR:,.0f} km from all training images"] if pale.any() else []
    if domains.radius is not None:
        notes.append(f"white: the shared expert alone, more than {domains.radius:,.0f} km from all training images")
    return "".join(f"\n{note}" for note in notes)


def _write_name(axes: "Axes", name: str, lonlat: np.ndarray, domains: DomainMap) -> None:
    """Writes a group's name beside it, toward the middle of the map, where it has room."""
    from matplotlib.patheffects import withStroke
    from scipy.stats import circmean

    west, east, south, north = domains.extent
    # A mean on the circle: a group on both sides of the date line is not at longitude 0
    longitude, latitudes = circmean(lonlat[:, 0], high=180.0, low=-180.0), lonlat[:, 1]
    below = latitudes.mean() < (south + north) / 2
    axes.annotate(
        fitted(name, 24),
        (longitude, latitudes.max() if below else latitudes.min()),
        ha="left" if longitude < (west + east) / 2 else "right",
        va="bottom" if below else "top",
        path_effects=[withStroke(linewidth=2.0, foreground="white")],
    ).set_in_layout(False)


def plot_expert_matrix(matrix: ExpertMatrix, path: Path) -> None:
    """Draws the accuracy of each forced expert (column) on each discovered domain (row), its own expert framed."""
    from matplotlib.patches import Rectangle

    columns = np.column_stack([matrix.routed.numpy(), matrix.accuracy.numpy()])
    with picture(path, 2.6 + 0.62 * columns.shape[1], 1.5 + 0.5 * len(columns)) as figure:
        axes = figure.subplots()
        image = axes.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        write_numbers(axes, image, columns)
        axes.axvline(0.5, color="white", linewidth=3)
        for domain in range(len(columns)):
            axes.add_patch(Rectangle((domain + 0.5, domain - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
        axes.set_xticks(range(columns.shape[1]), ["routed", *map(str, range(len(columns)))])
        counts = matrix.num_samples.tolist()
        axes.set_yticks(range(len(columns)), [f"{domain} (n={count})" for domain, count in enumerate(counts)])
        axes.set(xlabel="expert forced on all (framed: the domain's own)", ylabel="discovered domain")
        figure.colorbar(image, label="accuracy")
