"""Colors: one for each expert and one for each kind of model, the same in every picture.

The first eight are Okabe and Ito's, which people with any common color blindness tell apart (dark gray stands for their
black); eight of Paul Tol's "muted" scheme and its neighbors follow. Sixteen are as many as can be told apart at all, so
they repeat from there on, and pictures write the experts' numbers too wherever there is room.
"""

from collections.abc import Sequence

EXPERT_COLORS = (
    *("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#555555"),
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#88CCEE", "#DDCC77"),
)
SHARED_COLOR = "#FFFFFF"  # where no routed expert answers
CATEGORIES = len(EXPERT_COLORS)  # how many classes, domains or lines can be told apart
# How a model's name begins -> its color; the longest beginning counts
_MODEL_COLORS = {
    **{"": "#555555", "resnet": "#999933", "erm_le": "#CC79A7"},
    **{"gmoe": "#0072B2", "sfmoe": "#009E73", "hybrid": "#E69F00", "moge": "#D55E00", "moge_se": "#882255"},
}
# Lines and classes: the experts' colors with the dark ones first, as thin lines on white want it
_CATEGORY_ORDER = (4, 5, 2, 0, 6, 1, 7, 8, 9, 10, 11, 12, 13, 14, 15, 3)


def expert_color(index: int) -> str:
    """Returns an expert's color as #RRGGBB; a negative index stands for no routed expert."""
    return EXPERT_COLORS[index % CATEGORIES] if index >= 0 else SHARED_COLOR


def category_color(index: int) -> str:
    """Returns the color of a class, a domain or a line as #RRGGBB."""
    return EXPERT_COLORS[_CATEGORY_ORDER[index % CATEGORIES]]


def model_colors(models: Sequence[str]) -> list[str]:
    """Returns a color for each entry: that of its kind of model for the first of a kind, then those nobody has.

    Args:
        models: Names such as gmoe_small_patch16; dense models, of whatever name, are gray.
    """
    wanted = [_MODEL_COLORS[max(filter(name.startswith, _MODEL_COLORS), key=len)] for name in models]
    free = [color for color in map(category_color, range(CATEGORIES)) if color not in wanted]
    return [free.pop(0) if color in wanted[:number] and free else color for number, color in enumerate(wanted)]
