"""Discovered domains, expert usage and forced experts of a MoGE run, as pictures and as numbers in analysis.json.

All of them are of one role, one network and one set of images. A call with others replaces what was there.
"""

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import Domain, EvaluationImages, PlacesDomain, Split
from ..errors import ArgumentError
from ..networks.build import Network
from ..protocols.run_identity import sha256
from ..storage.files import json_text, write_text
from .geography import (
    DomainMap,
    cell_width,
    domain_map,
    domains_at,
    expert_usage,
    forced_expert_matrix,
    geo_layers,
    map_extent,
)
from .geography_plots import plot_domain_map, plot_expert_matrix, plot_expert_usage
from .run_view import RunView
from .style import optional_picture

_logger = logging.getLogger(__name__)
FILE = "analysis.json"
PICTURES = ("map.png", "routing.png", "forced_experts.png")


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
