"""Pictures of what a network does inside: where patches go, where the class token looks, what domains it found."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn

from ..analysis.geography_report import draw_domains, is_geographic
from ..analysis.routing.map_report import draw_attention, draw_experts
from ..analysis.run_view import RunView
from ..protocols.records import SCORED_ROLES
from .pictures import Missing, Picture, attempt, inlined

COLUMNS = 4  # images side by side


class Section(NamedTuple):
    """A picture with its title and what to know when looking at it.

    Attributes:
        title: Of the section.
        caption: Below the picture.
        picture: It, or why there is none.
    """

    title: str
    caption: str
    picture: Picture | Missing


def experts_note(model: nn.Module) -> str | None:
    """A line in place of expert sections, for a model without experts; None for a mixture."""
    if any(hasattr(module, "record_routing") for module in model.modules()):
        return None
    return f"{type(model).__name__} is a dense model: there are no experts to look at."


def model_pictures(view: RunView, data_dir: str | None) -> list[Section]:
    """Draws what there is to see of a network: maps for mixtures, attention for all.

    Args:
        view: The run.
        data_dir: Where its data lies now; None for where it lay.
    """
    selection = [] if experts_note(view.model) else [_selection(view, data_dir)]
    roles = [role for role in SCORED_ROLES if attempt(partial(is_geographic, view, data_dir, role)) is True]
    return [*selection, *(_discovered(view, data_dir, role) for role in roles[:1]), _attention(view, data_dir)]


def _selection(view: RunView, data_dir: str | None) -> Section:
    def draw(path: Path) -> None:
        draw_experts(view, path.parent, data_dir=data_dir, images=None, target=None, columns=COLUMNS, block=None)

    caption = "The first expert of each patch, or image, in the last block with experts; the first class, by domain."
    return Section("Expert selection", caption, inlined(draw, "Images under their patches' experts", "experts.png"))


def _attention(view: RunView, data_dir: str | None) -> Section:
    similar: dict[str, float] = {}

    def draw(path: Path) -> None:
        twin, folder = None, path.parent
        found = draw_attention(view, twin, folder, data_dir=data_dir, images=None, target=None, columns=2, mass=None)
        similar.update(found)

    picture = inlined(draw, "The class token's attention, head by head", "attention.png")
    numbers = "".join(f" Mean cosine between two heads' maps: {value:.3f}." for value in similar.values())
    return Section("Attention", f"Where the class token looks in the last block, head by head.{numbers}", picture)


def _discovered(view: RunView, data_dir: str | None, role: str) -> Section:
    numbers: dict[str, object] = {}

    def draw(path: Path) -> None:
        numbers.update(nmi=draw_domains(view, path.parent, data_dir, role, 2.0)["nmi"])

    picture = inlined(draw, "Map of the discovered domains", "map.png")
    agreement = f" Their agreement with the data's groups (NMI) is {numbers['nmi']:.3f}." if numbers else ""
    caption = f"The routed expert with the largest weight at every place.{agreement}"
    return Section("Discovered domains", caption, picture)
