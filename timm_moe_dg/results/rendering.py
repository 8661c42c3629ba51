"""Formats result tables as text, Markdown and LaTeX, and as frames for other programs."""

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from types import MappingProxyType

import pandas as pd
from tabulate import LATEX_ESCAPE_RULES

from ..cli.escape import csv_cell, markdown, one_line
from .paper_figures import paper_columns
from .runs import RowKey
from .tables import Table

Lines = Sequence[Sequence[str]]
_LATEX = str.maketrans({**LATEX_ESCAPE_RULES, "±": r"$\pm$"})


def render(table: Table, format_: str, papers: bool = False) -> str:
    """Formats a table in a format of `RENDERERS`, with its title and the list of missing runs.

    With `papers`, the papers' figures follow each column that has any.
    """
    stated = paper_columns(table) if papers else {}
    header, lines = ["algorithm", "model"], [[row.algorithm, row.described_model] for row in table.rows]
    texts = cell_texts(table)
    for position, column in enumerate(table.columns):
        header += [column, f"{column} (papers)"] if column in stated else [column]
        for row, line in zip(table.rows, lines, strict=True):
            line += [texts[row, position], stated[column][row]] if column in stated else [texts[row, position]]
    return RENDERERS[format_](table.title, header, lines, table.missing)


def cell_texts(table: Table) -> dict[tuple[RowKey, int], str]:
    """Formats all cells of a table, by row and column (position)."""
    summary = table.summary()
    return dict(zip(summary.index, map(cell_text, *summary.to_numpy().T), strict=True))


def cell_text(mean: float, error: float, seeds: float, expected: float) -> str:
    """Formats a cell in percent: the mean, the standard error of two or more seeds, and the number of missing seeds."""
    if not seeds:
        return "missing"
    if isnan(mean):  # such as the F1 of a role without images
        return "-"
    deviation = "" if isnan(error) else f" ± {100 * error:.1f}"
    return f"{100 * mean:.1f}{deviation}" + ("" if seeds == expected else f" ({seeds:.0f} of {expected:.0f} seeds)")


def data_frame(tables: Sequence[Table], papers: bool = False) -> pd.DataFrame:
    """Returns a row for each cell, with percentages as numbers, and the papers' figures if wanted."""
    return pd.concat([_cells(table, paper_columns(table) if papers else None) for table in tables], ignore_index=True)


def _cells(table: Table, stated: Mapping[str, Mapping[RowKey, str]] | None) -> pd.DataFrame:
    summary = table.summary().reset_index()
    words = [(table.dataset, table.rule, table.title)] * len(summary)
    frame = pd.DataFrame(words, columns=["dataset", "rule", "table"])
    for name in ("algorithm", "model", "variant"):
        frame[name] = [getattr(row, name) for row in summary.row]
    frame["column"] = [table.columns[position] for position in summary.column]
    frame[["mean", "standard_error"]] = (100 * summary[["mean", "error"]]).round(6)
    frame[["seeds", "expected_seeds"]] = summary[["seeds", "expected"]]
    if stated is not None:
        pairs = zip(frame.column, summary.row, strict=True)
        frame["papers"] = [stated.get(column, {}).get(row, "") for column, row in pairs]
    return frame


def data_text(frame: pd.DataFrame, format_: str) -> str:
    """Formats a frame as "csv" or "json". A cell without a value is empty, or null."""
    if format_ == "json":
        return frame.to_json(orient="records", indent=1, force_ascii=False) + "\n"
    return frame.map(lambda cell: csv_cell(cell) if isinstance(cell, str) else cell).to_csv(index=False)


def text_table(title: str, header: Sequence[str], lines: Lines, missing: Sequence[str]) -> str:
    """Formats cells as aligned text."""
    return "\n".join([title, "", _markdown(header, lines, "simple", one_line), *_missing_runs(missing, "  ")])


def markdown_table(title: str, header: Sequence[str], lines: Lines, missing: Sequence[str]) -> str:
    """Formats cells as a Markdown table."""
    notes = _missing_runs(list(map(markdown, missing)), "- ")
    return "\n".join([f"**{markdown(title)}**", "", _markdown(header, lines, "github", markdown), *notes])


def latex_table(title: str, header: Sequence[str], lines: Lines, missing: Sequence[str]) -> str:
    """Formats cells as a LaTeX table (package booktabs)."""
    frame, align = pd.DataFrame(lines).map(_latex), "ll" + "c" * (len(header) - 2)
    tabular = frame.to_latex(index=False, header=list(map(_latex, header)), escape=False, column_format=align)
    text = [r"\begin{table}", r"\centering", rf"\caption{{{_latex(title)}}}", tabular.rstrip(), r"\end{table}"]
    return "\n".join([*text, *(f"% {note}" for note in _missing_runs(missing, ""))])


def _markdown(header: Sequence[str], lines: Lines, format_: str, escape: Callable[[str], str]) -> str:
    headers = list(map(escape, header))
    # Without disable_numparse "12.50" would be printed as 12.5 and aligned on the decimal point
    options = {"headers": headers, "tablefmt": format_, "disable_numparse": True, "colalign": ["left"] * len(headers)}
    return pd.DataFrame(lines).map(escape).to_markdown(index=False, **options)


def _missing_runs(missing: Sequence[str], bullet: str) -> list[str]:
    return ["", "Missing runs:", "", *(f"{bullet}{one_line(phrase)}" for phrase in missing)] if missing else []


def _latex(text: str) -> str:
    return one_line(text).translate(_LATEX)


RENDERERS: Mapping[str, Callable[[str, Sequence[str], Lines, Sequence[str]], str]] = MappingProxyType(
    {"text": text_table, "markdown": markdown_table, "latex": latex_table}
)
