"""Formats result tables as text, Markdown and LaTeX."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import isnan
from types import MappingProxyType

from tabulate import LATEX_ESCAPE_RULES, tabulate

from ..cli.escape import markdown, one_line
from .paper_figures import paper_columns
from .table_columns import Cell
from .tables import Table

Grid = Sequence[Sequence[str]]
_LATEX = str.maketrans({**LATEX_ESCAPE_RULES, "±": r"$\pm$"})


def render(table: Table, format_: str, papers: bool = False) -> str:
    """Formats a table in a format of `RENDERERS`, with its title and the list of missing runs.

    With `papers`, the papers' figures follow each column that has any.
    """
    stated = paper_columns(table) if papers else {}
    titles = [[column, f"{column} (papers)"] if column in stated else [column] for column in table.columns]
    grid = [["algorithm", "model", *chain.from_iterable(titles)]]
    for row, cells in table.rows.items():
        model = f"{row.model} ({row.variant})" if row.variant else row.model
        texts = [[cell_text(cell)] for cell in cells]
        for column, text in zip(table.columns, texts, strict=True):
            text += [stated[column][row]] if column in stated else []
        grid.append([row.algorithm, model, *chain.from_iterable(texts)])
    return RENDERERS[format_](table.title, grid, table.missing)


def cell_text(cell: Cell, digits: int = 1) -> str:
    """Formats a cell in percent: the mean, the standard error of two or more seeds, and the number of missing seeds."""
    if not cell.values:
        return "missing"
    if isnan(cell.mean):  # such as the F1 of a role without images
        return "-"
    error = "" if isnan(cell.error) else f" ± {100 * cell.error:.{digits}f}"
    seeds = "" if len(cell.values) == cell.expected else f" ({len(cell.values)} of {cell.expected} seeds)"
    return f"{100 * cell.mean:.{digits}f}{error}{seeds}"


def data_rows(tables: Sequence[Table], papers: bool = False) -> list[dict[str, object]]:
    """Returns one entry per cell, with percentages as numbers, and the papers' figures if wanted.

    A cell without a value has None.
    """
    return [
        {
            "dataset": table.dataset,
            "rule": table.rule,
            "table": table.title,
            "algorithm": row.algorithm,
            "model": row.model,
            "variant": row.variant,
            "column": column,
            "mean": _percentage(cell.mean),
            "standard_error": _percentage(cell.error),
            "seeds": len(cell.values),
            "expected_seeds": cell.expected,
            **({"papers": stated.get(column, {}).get(row, "")} if papers else {}),
        }
        for table, stated in ((table, paper_columns(table) if papers else {}) for table in tables)
        for row, cells in table.rows.items()
        for column, cell in zip(table.columns, cells, strict=True)
    ]


def _percentage(share: float) -> float | None:
    return None if isnan(share) else round(100 * share, 6)


def text_grid(title: str, grid: Grid, missing: Sequence[str]) -> str:
    """Formats cells as aligned text. The first row is the header."""
    return "\n".join([title, "", _tabulate(grid, "simple", one_line), *_missing_runs(missing, "  ")])


def markdown_grid(title: str, grid: Grid, missing: Sequence[str]) -> str:
    """Formats cells as a Markdown table. The first row is the header."""
    notes = _missing_runs(list(map(markdown, missing)), "- ")
    return "\n".join([f"**{markdown(title)}**", "", _tabulate(grid, "github", markdown), *notes])


def latex_grid(title: str, grid: Grid, missing: Sequence[str]) -> str:
    """Formats cells as a LaTeX table (package booktabs). The first row is the header."""
    # tabulate escapes the cells with the same rules as `_latex`, except for the plus-minus sign.
    tabular = _tabulate(grid, "latex_booktabs", one_line, number_align="center").replace("±", r"$\pm$")
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(title)}}}", tabular, r"\end{table}"]
    return "\n".join([*lines, *(f"% {note}" for note in _missing_runs(missing, ""))])


def _tabulate(grid: Grid, table_format: str, escape: Callable[[str], str], number_align: str = "left") -> str:
    header, *rows = [list(map(escape, row)) for row in grid]
    align = ["left", "left", *[number_align] * (len(header) - 2)]
    # Without disable_numparse tabulate would print "12.50" as 12.5 and align on the decimal point.
    return tabulate(rows, header, table_format, disable_numparse=True, colalign=align)


def _missing_runs(missing: Sequence[str], bullet: str) -> list[str]:
    return ["", "Missing runs:", "", *(f"{bullet}{one_line(phrase)}" for phrase in missing)] if missing else []


def _latex(text: str) -> str:
    return one_line(text).translate(_LATEX)


RENDERERS: Mapping[str, Callable[[str, Grid, Sequence[str]], str]] = MappingProxyType(
    {"text": text_grid, "markdown": markdown_grid, "latex": latex_grid}
)
