"""Pictures of a MoGE run: its world map, the usage of its experts, and the accuracy of each expert on each domain.

Coastlines are those of Natural Earth, see coastlines.md. The numbers behind the pictures go to analysis.json. All are
of one role, one network and one set of images, and a call with others replaces what was there.
"""

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from ..data import Domain, EvaluationImages, PlacesDomain, Split
from ..errors import ArgumentError
from ..layers.encoders.coverage import Coverage, distances, thin_coordinates
from ..networks.build import Network
from ..protocols.run_identity import sha256
from ..storage.files import json_text, write_text
from .geography import (
    KM_PER_DEGREE,
    WORLD,
    DomainMap,
    ExpertMatrix,
    ExpertUsage,
    cell_width,
    domain_map,
    domains_at,
    expert_usage,
    forced_expert_matrix,
    geo_layers,
    map_extent,
)
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
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

_logger = logging.getLogger(__name__)
FILE = "analysis.json"
PICTURES = ("map.png", "routing.png", "forced_experts.png")
FAR = 1000.0  # km to the nearest training coordinate; routed cells beyond are pale
VEIL = 0.7  # opacity of the white over pale cells
WIDTH = 6.4  # inches, of the map
_COAST, _INK = "#404040", "#000000"
_LEGEND_COLUMNS = 6
_OUTLINED = 1000  # places that are outlined each for itself
_NAME_GAP = 4.0  # points between a group and its name
_EVEN: Style = {"color": "black", "linestyle": ":", "linewidth": 1}
_SELECTED = 0.4  # opacity of the bars of selected experts


def is_geographic(view: RunView, role: str) -> bool:
    """Whether a run is of a MoGE model on data whose images have places."""
    return hasattr(view.model, "set_expert_mode") and bool(_domains_with_places(view, role))


def draw_domains(view: RunView, figures: Path, role: str, map_step: float | None) -> dict[str, object]:
    """Draws map.png (if the metadata are coordinates) and routing.png, and adds their numbers to analysis.json.

    `map_step` is the largest width of a cell in degrees; None chooses one, see `cell_width`. "nmi" of the returned
    numbers is the agreement of discovered domains with the groups.
    """
    from sklearn.metrics import normalized_mutual_info_score

    domains = _analyzed_domains(view, role)
    earlier = _earlier(view, figures, role)
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
            plot_domain_map(_map(view.model, map_step, [*shown.values(), *dashed.values()]), path, shown, dashed)
    usage = expert_usage(view.model, metadata)
    with optional_picture(figures / "routing.png") as path:
        plot_expert_usage(usage, path)
    # The last column counts images without a discovered domain, whose index is -1
    counts = torch.zeros(len(places), usage.frequency.shape[1] + 1, dtype=torch.long)
    counts.index_put_((groups, discovered), torch.ones_like(discovered), accumulate=True)
    numbers: dict[str, object] = {
        "groups": list(places),
        "nmi": float(normalized_mutual_info_score(groups, discovered)),
        "images_by_group_and_domain": counts.tolist(),
        "expert_usage": {name: value.tolist() for name, value in usage._asdict().items() if torch.is_tensor(value)},
    }
    write_text(figures / FILE, json_text(earlier | numbers, indent=2))
    return numbers


def draw_forced(view: RunView, figures: Path, role: str) -> None:
    """Draws forced_experts.png for images of the role "id" or "ood", and adds its numbers to analysis.json."""
    domains = _analyzed_domains(view, role)
    earlier = _earlier(view, figures, role)
    images = EvaluationImages(domains, list(map(_test_split, domains)), view.transform, with_metadata=True)
    matrix = forced_expert_matrix(view.model, view.evaluation_batches(images))
    with optional_picture(figures / "forced_experts.png") as path:
        plot_expert_matrix(matrix, path)
    forced = {name: value.tolist() for name, value in matrix._asdict().items()}
    write_text(figures / FILE, json_text(earlier | {"forced_experts": forced}, indent=2))


def _map(model: Network, map_step: float | None, places: Sequence[Tensor]) -> DomainMap:
    """Makes the map of the data's extent, which includes the training coordinates that the model holds."""
    coverage, radius = model.metadata_encoder.coverage, None
    if coverage is not None:
        places, radius = [*places, coverage.degrees.cpu()], coverage.radius
    extent = map_extent(places, radius)
    step = cell_width(extent, radius, map_step)
    if map_step is not None and step < map_step:
        _logger.warning(f"map_step={map_step:g}: cells of the coverage radius are narrower; drawn with {step:.2g}")
    return domain_map(model, step, extent)


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


def _earlier(view: RunView, figures: Path, role: str) -> dict[str, object]:
    """Reads the numbers that the other command wrote for the same images and network. Others are removed."""
    # Which images and which network the numbers are of
    identity: dict[str, object] = {"role": role, "data": view.args.get("data"), "skip_unreadable": view.skip_unreadable}
    identity["network_sha256"] = sha256(view.folder / "best" / "model.safetensors")
    path = figures / FILE
    written = json.loads(path.read_text()) if path.is_file() else {}
    if any(written.get(name) != value for name, value in identity.items()):
        for name in (FILE, *PICTURES):
            (figures / name).unlink(missing_ok=True)
        return identity
    return written


def plot_domain_map(
    domains: DomainMap,
    path: Path,
    places: Mapping[str, Tensor] | None = None,
    held_out: Mapping[str, Tensor] | None = None,
) -> None:
    """Draws discovered domains as a map. Cells far from all training coordinates are pale, cells without routing white.

    `places` and `held_out` map names of groups to coordinates (N, 2). Groups that were not trained on have a dashed
    outline.
    """
    experts = domains.experts[domains.experts >= 0].unique().tolist()
    edges = _edges(domains.longitude), _edges(domains.latitude)
    (west, east), (south, north) = ((float(side[0]), float(side[-1])) for side in edges)
    height = 1.1 + 0.86 * WIDTH * (north - south) / (east - west)
    with picture(path, WIDTH, height + 0.25 * math.ceil(len(experts) / _LEGEND_COLUMNS)) as figure:
        axes = figure.subplots()
        note = _draw_cells(axes, domains)
        for line in coastlines():
            axes.plot(*line.T, color=_COAST, linewidth=0.5)
        for name, lonlat in _without_unknown(places or {}).items():
            axes.plot(*lonlat.T, "o", color=_INK, markersize=1.4, markeredgewidth=0)
            _write_name(axes, name, lonlat)
        unseen = _without_unknown(held_out or {})
        _draw_outlines(axes, domains, list(unseen.values()))
        for name, lonlat in unseen.items():
            _write_name(axes, f"{name} (held out)", lonlat, _margin(domains))
        axes.set(xlim=(west, east), ylim=(south, north), aspect="equal")
        if (west, east) == WORLD[:2]:
            axes.set_xticks(range(-180, 181, 60))
            axes.set_yticks(range(-90, 91, 30))
        else:
            axes.locator_params(nbins=5)
        axes.set(xlabel="longitude (degrees)", ylabel="latitude (degrees)")
        axes.set_title(f"Discovered domains: routed expert with the largest weight{note}")
        handles = [swatch(expert_color(index), f"expert {index}") for index in experts]
        columns = max(1, min(len(experts), _LEGEND_COLUMNS))
        figure.legend(handles=handles, **{**LEGEND_BELOW, "ncols": columns}, handlelength=1.2)
        _separate(figure, axes)


def coastlines() -> list[np.ndarray]:
    """Returns the world's coastlines, each (N, 2) longitude and latitude in degrees."""
    with np.load(Path(__file__).with_name("coastlines.npz")) as file:
        return np.split(file["points"] / 100.0, file["ends"][:-1])


def _draw_cells(axes: "Axes", domains: DomainMap) -> str:
    """Colors the cells; returns the title's lines that explain pale and white cells."""
    from matplotlib.colors import ListedColormap

    experts = domains.experts.numpy()
    pale = np.zeros(experts.shape, bool) if domains.distance is None else domains.distance.numpy() > FAR
    pale &= experts >= 0
    edges = _edges(domains.longitude), _edges(domains.latitude)
    colors = ListedColormap([SHARED_COLOR, *map(expert_color, range(domains.num_experts))])
    axes.pcolormesh(*edges, experts, cmap=colors, vmin=-1.5, vmax=domains.num_experts - 0.5)
    veil = np.stack([*np.ones((3, *pale.shape)), np.where(pale, VEIL, 0.0)], axis=-1)
    # zorder: above the cells (1), below the coastlines (2)
    sides = cast("tuple[float, float, float, float]", tuple(side for pair in edges for side in (pair[0], pair[-1])))
    axes.imshow(veil, extent=sides, origin="lower", interpolation="nearest", zorder=1.5)
    notes = [f"pale: more than {FAR:,.0f} km from all training images"] if pale.any() else []
    if domains.radius is not None:
        notes.append(f"white: the shared expert alone, more than {domains.radius:,.0f} km from all training images")
    return "".join(f"\n{note}" for note in notes)


def _edges(centers: Tensor) -> np.ndarray:
    half = (centers[1] - centers[0]) / 2 if len(centers) > 1 else centers.new_tensor(45.0)
    return np.append((centers - half).numpy(), float(centers[-1] + half))


def _margin(domains: DomainMap) -> float:
    """Degrees of one and a half cells, which a map can resolve, or of a part of the map that readers can."""
    edges = _edges(domains.longitude)
    return float(edges[-1] - edges[0]) * max(1.5 / len(domains.longitude), 1 / 120)


def _draw_outlines(axes: "Axes", domains: DomainMap, regions: Sequence[np.ndarray]) -> None:
    """Surrounds each region at a small distance."""
    across, up = np.meshgrid(domains.longitude.numpy(), domains.latitude.numpy())
    cells = torch.from_numpy(np.stack([across.ravel(), up.ravel()], axis=1))
    for lonlat in regions:
        # Thinned points are the centers of cells, which a map of a city would show
        places = torch.from_numpy(lonlat).double()
        points = places if len(places) <= _OUTLINED else thin_coordinates(places)
        distance = distances(Coverage(len(points)).hold(points), cells).numpy().reshape(across.shape)
        # A black line on a white one is visible on every color
        for width, color, style in ((2.4, SHARED_COLOR, "solid"), (1.2, _INK, "dashed")):
            level = [_margin(domains) * KM_PER_DEGREE]
            axes.contour(across, up, distance, level, colors=color, linewidths=width, linestyles=style)


def _separate(figure: "Figure", axes: "Axes") -> None:
    """Moves names into the map and apart from each other, up, down or aside, by as little as is needed."""
    figure.draw_without_rendering()
    inside, placed = axes.get_window_extent(), list[Any]()
    names = cast("list[Annotation]", axes.texts)
    for text in sorted(names, key=lambda text: -text.xy[1]):
        box = text.get_window_extent()
        first = box.translated(max(inside.x0 - box.x0, 0) + min(inside.x1 - box.x1, 0), 0.0)
        steps = [
            (box.width * 1.05 * column, box.height * 1.1 * row) for column in range(-4, 5) for row in range(-20, 21)
        ]
        moved = [first.translated(*step) for step in sorted(steps, key=lambda step: math.hypot(*step))]
        fitting = [new for new in moved if inside.contains(*new.min) and inside.contains(*new.max)]
        free = [new for new in fitting if not any(new.overlaps(other) for other in placed)]
        placed.append((free or fitting or moved)[0])
        across, up = text.xyann
        points = 72 / figure.dpi  # of a pixel
        text.xyann = (across + points * (placed[-1].x0 - box.x0), up + points * (placed[-1].y0 - box.y0))
        text.set_in_layout(False)  # or the layout would move the map


def _write_name(axes: "Axes", name: str, lonlat: np.ndarray, margin: float = 0.0) -> None:
    """Writes a group's name below it, or above it if the group lies north of the equator."""
    from matplotlib.patheffects import withStroke
    from scipy.stats import circmean

    # A mean on the circle: a group on both sides of the date line is not at longitude 0
    longitude = circmean(lonlat[:, 0], high=180.0, low=-180.0)
    south, north = np.percentile(lonlat[:, 1], (2, 98))  # without a few outliers
    is_north = south > 0
    axes.annotate(
        fitted(name, 24),
        (longitude, north + margin if is_north else south - margin),
        xytext=(0, _NAME_GAP if is_north else -_NAME_GAP),
        textcoords="offset points",
        ha="center",
        va="bottom" if is_north else "top",
        path_effects=[withStroke(linewidth=2.0, foreground="white")],
    )


def _without_unknown(groups: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Drops NaN coordinates, and groups that have no others."""
    rows = {name: lonlat[~lonlat.isnan().any(dim=1)].numpy() for name, lonlat in groups.items()}
    return {name: lonlat for name, lonlat in rows.items() if len(lonlat)}


def plot_expert_usage(usage: ExpertUsage, path: Path) -> None:
    """Draws, for each mixture layer, how often each expert has the largest weight and how often it is selected."""
    layers, num_experts = usage.frequency.shape
    positions, colors = np.arange(num_experts), list(map(expert_color, range(num_experts)))
    across = min(layers, 2)
    down = -(-layers // across)
    with picture(path, max(3.4, 0.26 * num_experts) * across + 1.0, 3.0 * down + 0.8) as figure:
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flat
        for index, axes in enumerate(list(panels)[:layers]):
            for shift, shares, opacity in ((-0.2, usage.frequency, 1.0), (0.2, usage.selected, _SELECTED)):
                axes.bar(positions + shift, shares[index].numpy(), 0.4, color=colors, alpha=opacity)
            axes.axhline(1 / num_experts, **_EVEN)
            axes.set(xticks=positions[:: -(-num_experts // 8)])  # there is room for eight numbers
            axes.set_title(f"block {usage.blocks[index]}" if usage.blocks else f"mixture layer {index}")
        for axes in figure.axes[layers:]:
            axes.remove()
        figure.supylabel(f"share of {usage.num_routed} images", size="medium")
        for axes in figure.axes[-across:]:
            axes.set_xlabel("expert")
        solid, pale = swatch("#555555", "largest weight"), swatch("#555555", "among the selected")
        pale.set_alpha(_SELECTED)
        even = figure.axes[0].axhline(1 / num_experts, **_EVEN, label="even use")
        figure.legend(handles=[solid, pale, even], **{**LEGEND_BELOW, "ncols": across + 1})


def plot_expert_matrix(matrix: ExpertMatrix, path: Path) -> None:
    """Draws the accuracy of each forced expert (column) on each discovered domain (row), its own expert framed."""
    from matplotlib.patches import Rectangle

    columns = np.column_stack([matrix.routed.numpy(), matrix.accuracy.numpy()])
    with picture(path, 2.6 + 0.62 * columns.shape[1], 1.5 + 0.5 * len(columns)) as figure:
        axes = figure.subplots()
        image = axes.imshow(columns, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        write_numbers(axes, image, columns)
        axes.axvline(0.5, color="white", linewidth=3)
        for domain in range(len(columns)):  # a frame around the domain's own expert
            for width, color in ((3.5, "white"), (1.5, _INK)):
                frame = Rectangle((domain + 0.53, domain - 0.47), 0.94, 0.94, fill=False, edgecolor=color)
                axes.add_patch(frame).set_linewidth(width)
        axes.set_xticks(range(columns.shape[1]), ["routed", *map(str, range(len(columns)))])
        counts = matrix.num_samples.tolist()
        axes.set_yticks(range(len(columns)), [f"{domain} (n={count})" for domain, count in enumerate(counts)])
        axes.set(xlabel="expert forced on all (framed: the domain's own)", ylabel="discovered domain")
        figure.colorbar(image, label="accuracy")
