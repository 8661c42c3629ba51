"""Pictures of what a network does inside: where patches go, where the class token looks, what domains it found."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..analysis import domain_map
from ..analysis.expert_plots import plot_domain_map
from ..analysis.run_view import RunView
from ..layers import GeoMoeMlp
from .network_facts import Reading
from .pictures import Missing, Picture, inlined


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


def model_pictures(view: RunView, reading: Reading) -> list[Section]:
    """Draws what there is to see of a network.

    Args:
        view: The run.
        reading: How the network is looked at.
    """
    sections = []
    if any(isinstance(module, GeoMoeMlp) for module in view.model.modules()):
        caption = "The routed expert with the largest weight at every place; dots are the data's images."
        picture = inlined(partial(_draw_map, view, reading.data_dir), "Map of the discovered domains")
        sections.append(Section("Discovered domains", caption, picture))
    return sections


def _draw_map(view: RunView, data_dir: str | None, path: Path) -> None:
    domains: Any = view.domains(data_dir)
    places: dict[str, Tensor] = {}
    plot_domain_map(domain_map(view.model), path, places)
    del domains
