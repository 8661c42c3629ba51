"""One fixed color for each expert, the same in every picture.

The first eight are Okabe and Ito's, which people with any common color blindness tell apart (dark gray stands for their
black); eight of Paul Tol's "muted" scheme and its neighbors follow. Sixteen are as many as can be told apart at all, so
they repeat from there on, and pictures write the experts' numbers too wherever there is room.
"""

EXPERT_COLORS = (
    *("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#555555"),
    *("#332288", "#882255", "#44AA99", "#999933", "#AA4499", "#661100", "#88CCEE", "#DDCC77"),
)
SHARED_COLOR = "#FFFFFF"  # where no routed expert answers


def expert_color(index: int) -> str:
    """Returns an expert's color as #RRGGBB; a negative index stands for no routed expert."""
    return EXPERT_COLORS[index % len(EXPERT_COLORS)] if index >= 0 else SHARED_COLOR
