"""Tables as text, Markdown and LaTeX."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from types import MappingProxyType

from ..cli.escape import markdown, one_line
from .columns import Cell
from .tables import Table

Grid = Sequence[Sequence[str]]


def render(table: Table, format_: str) -> str:
    """Formats a table with its title and the runs that it lacks.

    Args:
        table: The table.
        format_: A name in `RENDERERS`.
    """
    grid = [["algorithm", "model", *table.columns]]
    for row, cells in table.rows.items():
        model = f"{row.model} ({row.variant})" if row.variant else row.model
        grid.append([row.algorithm, model, *map(cell_text, cells)])
    return RENDERERS[format_](table.title, grid, table.missing)


def cell_text(cell: Cell, digits: int = 1) -> str:
    """Formats a cell in percent: mean, standard error from two seeds on, and how many seeds where some are missing."""
    if not cell.values:
        return "missing"
    if isnan(cell.mean):  # such as the F1 of a role without images
        return "-"
    error = "" if isnan(cell.error) else f" ± {100 * cell.error:.{digits}f}"
    lacking = "" if len(cell.values) == cell.expected else f" ({len(cell.values)} of {cell.expected} seeds)"
    return f"{100 * cell.mean:.{digits}f}{error}{lacking}"


def text_grid(title: str, grid: Grid, notes: Sequence[str]) -> str:
    """Formats cells as aligned text; the first row is the header."""
    grid = [list(map(one_line, row)) for row in grid]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in grid]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([title, "", *lines, *_notes(notes, "  ")])


def markdown_grid(title: str, grid: Grid, notes: Sequence[str]) -> str:
    """Formats cells as a Markdown table; the first row is the header."""
    lines = ["| " + " | ".join(map(markdown, row)) + " |" for row in grid]
    lines.insert(1, "|" + "---|" * len(grid[0]))
    return "\n".join([f"**{markdown(title)}**", "", *lines, *_notes(list(map(markdown, notes)), "- ")])


def latex_grid(title: str, grid: Grid, notes: Sequence[str]) -> str:
    """Formats cells as a LaTeX table (package booktabs); the first row is the header."""
    header, *rows = [" & ".join(map(_latex, row)) + r" \\" for row in grid]
    columns = "ll" + "c" * (len(grid[0]) - 2)
    head = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(title)}}}", rf"\begin{{tabular}}{{{columns}}}"]
    body = [r"\toprule", header, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*head, *body, *(f"% {note}" for note in _notes(notes, ""))])


def _notes(missing: Sequence[str], bullet: str) -> list[str]:
    return ["", "Missing runs:", "", *(f"{bullet}{one_line(phrase)}" for phrase in missing)] if missing else []


def _latex(text: str) -> str:
    return one_line(text).translate(_LATEX)


_LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "&%$#_{}"},
        **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"},
    }
)
RENDERERS: Mapping[str, Callable[[str, Grid, Sequence[str]], str]] = MappingProxyType(
    {"text": text_grid, "markdown": markdown_grid, "latex": latex_grid}
)
