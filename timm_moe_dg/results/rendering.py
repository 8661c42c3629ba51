"""Formats result tables as text, Markdown and LaTeX, and as frames for other programs."""

from collections.abc import Sequence
from math import isnan

import pandas as pd
from tabulate import LATEX_ESCAPE_RULES

from ..cli.escape import csv_cell, markdown, one_line
from .papers import paper_columns
from .tables import Table

_LATEX = str.maketrans({**LATEX_ESCAPE_RULES, "±": r"$\pm$"})
FORMATS = {"text": one_line, "markdown": markdown, "latex": lambda text: one_line(text).translate(_LATEX)}  # -> escape


def render(table: Table, format_: str, papers: bool = False) -> str:
    """Formats a table in a format of `FORMATS`, with its title and the list of missing runs.

    With `papers`, the papers' figures follow each column that has any.
    """
    stated = paper_columns(table) if papers else {}
    model = [f"{row.model} ({row.variant})" if row.variant else row.model for row in table.rows]
    columns = [pd.Series([row.algorithm for row in table.rows], name="algorithm"), pd.Series(model, name="model")]
    for column, (_, texts) in zip(table.columns, cell_texts(table).items(), strict=True):
        columns.append(texts.reset_index(drop=True).rename(column))
        if column in stated:
            columns.append(pd.Series([stated[column][row] for row in table.rows], name=f"{column} (papers)"))
    return formatted(table.title, pd.concat(columns, axis="columns"), format_, table.missing)


def cell_texts(table: Table) -> pd.DataFrame:
    """Formats all cells of a table, by row and column (position)."""
    summary = table.summary()
    texts = pd.Series(map(cell_text, *summary.to_numpy().T), index=summary.index, dtype=object)
    return texts.unstack("column").reindex(table.rows)


def cell_text(mean: float, error: float, seeds: float, expected: float) -> str:
    """Formats a cell in percent: the mean, the standard error of two or more seeds, and the number of missing seeds."""
    if not seeds:
        return "missing"
    if isnan(mean):  # such as the F1 of a role without images
        return "-"
    deviation = "" if isnan(error) else f" ± {100 * error:.1f}"
    return f"{100 * mean:.1f}{deviation}" + ("" if seeds == expected else f" ({seeds:.0f} of {expected:.0f} seeds)")


def formatted(title: str, texts: pd.DataFrame, format_: str, missing: Sequence[str] = ()) -> str:
    """Formats a frame of texts in a format of `FORMATS`, with a title and the list of missing runs."""
    escape, left = FORMATS[format_], ["left"] * len(texts.columns)
    escaped, titles = texts.map(escape), list(map(escape, texts.columns))
    notes = ["", "Missing runs:", "", *map(markdown if format_ == "markdown" else one_line, missing)] if missing else []
    if format_ == "latex":  # with the package booktabs
        align = "ll" + "c" * (len(titles) - 2)
        # pandas calls `str.format` on titles
        header = [title.replace("{", "{{").replace("}", "}}") for title in titles]
        tabular = escaped.to_latex(index=False, header=header, escape=False, column_format=align)
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{escape(title)}}}", tabular.rstrip(), r"\end{table}"]
        return "\n".join([*lines, *(f"% {note}" for note in notes)])
    style, title, bullet = ("simple", title, "  ") if format_ == "text" else ("github", f"**{escape(title)}**", "- ")
    # Without disable_numparse "12.50" would be printed as 12.5 and aligned on the decimal point
    table = escaped.to_markdown(index=False, headers=titles, tablefmt=style, disable_numparse=True, colalign=left)
    return "\n".join([title, "", table, *notes[:3], *(f"{bullet}{note}" for note in notes[3:])])


def data_frame(tables: Sequence[Table], papers: bool = False) -> pd.DataFrame:
    """Returns a row for each cell, with percentages as numbers, and the papers' figures if wanted."""
    return pd.concat([_cells(table, papers) for table in tables], ignore_index=True)


def _cells(table: Table, papers: bool) -> pd.DataFrame:
    cells = table.summary().reset_index()
    cells["column"] = [table.columns[position] for position in cells.column]
    cells[["mean", "standard_error"]] = (100 * cells[["mean", "error"]]).round(6)
    cells = cells.assign(dataset=table.dataset, rule=table.rule, table=table.title, expected_seeds=cells.expected)
    cells = cells.join(pd.DataFrame(list(cells.row))[["algorithm", "model", "variant"]])
    names = ["dataset", "rule", "table", "algorithm", "model", "variant", "column", "mean", "standard_error", "seeds"]
    if papers:
        stated = paper_columns(table)
        pairs = zip(cells.column, cells.row, strict=True)
        cells["papers"] = [stated.get(column, {}).get(row, "") for column, row in pairs]
    return cells[[*names, "expected_seeds", *(["papers"] if papers else [])]]


def data_text(frame: pd.DataFrame, format_: str) -> str:
    """Formats a frame as "csv" or "json". A cell without a value is empty, or null."""
    if format_ == "json":
        return frame.to_json(orient="records", indent=1, force_ascii=False) + "\n"
    return frame.map(lambda cell: csv_cell(cell) if isinstance(cell, str) else cell).to_csv(index=False)
