"""Pictures of a network's internals for a report: expert selection, attention, discovered domains."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..analysis.geography_report import draw_domains, is_geographic
from ..analysis.routing.map_report import draw_attention, draw_experts
from ..analysis.run_view import RunView
from ..protocols.records import SCORED_ROLES
from .pictures import Missing, Picture, attempt, inlined

COLUMNS = 4  # images side by side


class Section(NamedTuple):
    """A picture, or the reason why there is none, with its title and caption."""

    title: str
    caption: str
    picture: Picture | Missing


def experts_note(model: nn.Module) -> str | None:
    """Text in place of the expert sections for a model without experts, None for a mixture."""
    if any(hasattr(module, "record_routing") for module in model.modules()):
        return None
    return f"{type(model).__name__} is a dense model without experts."


def model_pictures(view: RunView) -> list[Section]:
    """Draws expert maps for mixtures, discovered domains for geographic mixtures, and attention for all networks."""
    selection = [] if experts_note(view.model) else [_selection(view)]
    # One map is enough for a page, of "id" images if the data has some.
    roles = [role for role in SCORED_ROLES if attempt(partial(is_geographic, view, role)) is True]
    return [*selection, *(_discovered(view, role) for role in roles[:1]), _attention(view)]


def _selection(view: RunView) -> Section:
    def draw(path: Path) -> None:
        # The function writes its files into a folder, under names of its own: `inlined` picks up experts.png.
        draw_experts(view, path.parent, images=None, target=None, columns=COLUMNS, block=None)

    caption = (
        "The first expert of each patch, or of each image, in the last block with experts. "
        "Images of the first class, by domain."
    )
    return Section("Expert selection", caption, inlined(draw, "Images colored by expert", "experts.png"))


def _attention(view: RunView) -> Section:
    similarity: dict[str, float] = {}

    def draw(path: Path) -> None:
        choice: dict[str, Any] = {"twin": None, "images": None, "target": None, "columns": 2, "mass": None}
        # The page shows no dense baseline beside the network
        similarity.update(draw_attention(view, path.parent, **choice))

    picture = inlined(draw, "Attention of the class token by head", "attention.png")
    numbers = "".join(f" Mean cosine similarity between the maps of two heads: {c:.3f}." for c in similarity.values())
    return Section("Attention", f"Attention of the class token in the last block, by head.{numbers}", picture)


def _discovered(view: RunView, role: str) -> Section:
    numbers: dict[str, object] = {}

    def draw(path: Path) -> None:
        numbers.update(nmi=draw_domains(view, path.parent, role, None)["nmi"])

    picture = inlined(draw, "Map of the discovered domains", "map.png")
    agreement = f" Normalized mutual information with the data's groups: {numbers['nmi']:.3f}." if numbers else ""
    caption = f"The routed expert with the largest weight at each place.{agreement}"
    return Section("Discovered domains", caption, picture)
