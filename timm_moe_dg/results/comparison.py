"""Tables as text and frames, and paired tests."""

from collections.abc import Sequence
from math import isnan

import numpy as np
import pandas as pd
from scipy.stats import permutation_test
from tabulate import LATEX_ESCAPE_RULES

from ..cli.text import csv_cell, markdown, one_line
from .papers import paper_columns
from .tables import Table

_LATEX = str.maketrans({**LATEX_ESCAPE_RULES, "±": r"$\pm$"})
FORMATS = {"text": one_line, "markdown": markdown, "latex": lambda text: one_line(text).translate(_LATEX)}  # -> escape


def render(table: Table, format_: str, papers: bool = False) -> str:
    """Formats a table in a format of `FORMATS`, with its title and the list of missing runs.

    With `papers`, the papers' figures follow each column that has any.
    """
    return formatted(table.title, row_texts(table, papers), format_, table.missing)


def row_texts(table: Table, papers: bool = False) -> pd.DataFrame:
    """Formats the rows of a table, with columns for the method and the model, or for names of rows; see `render`."""
    stated = paper_columns(table) if papers else {}
    if any(row.name for row in table.rows):
        columns = [pd.Series([str(row) for row in table.rows], name="row")]
    else:
        model = [f"{row.model} ({row.variant})" if row.variant else row.model for row in table.rows]
        columns = [pd.Series([row.algorithm for row in table.rows], name="algorithm"), pd.Series(model, name="model")]
    for column, (_, texts) in zip(table.columns, cell_texts(table).items(), strict=True):
        columns.append(texts.reset_index(drop=True).rename(column))
        if column in stated:
            columns.append(pd.Series([stated[column][row] for row in table.rows], name=f"{column} (papers)"))
    return pd.concat(columns, axis="columns")


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
    frames = []
    for table in tables:
        cells = table.summary().reset_index()
        cells["column"] = [table.columns[position] for position in cells.column]
        cells[["mean", "standard_error"]] = (100 * cells[["mean", "error"]]).round(6)
        cells = cells.assign(dataset=table.dataset, rule=table.rule, table=table.title, expected_seeds=cells.expected)
        cells = cells.join(pd.DataFrame(list(cells.row))[["algorithm", "model", "variant"]])
        if papers:
            stated, pairs = paper_columns(table), zip(cells.column, cells.row, strict=True)
            cells["papers"] = [stated.get(column, {}).get(row, "") for column, row in pairs]
        frames.append(cells.assign(row=cells.row.map(str)))
    names = ["dataset", "rule", "table", "row", "algorithm", "model", "variant", "column", "mean", "standard_error"]
    return pd.concat(frames, ignore_index=True)[[*names, "seeds", "expected_seeds", *(["papers"] if papers else [])]]


def data_text(frame: pd.DataFrame, format_: str) -> str:
    """Formats a frame as "csv" or "json". A cell without a value is empty, or null."""
    if format_ == "json":
        return frame.to_json(orient="records", indent=1, force_ascii=False) + "\n"
    return frame.map(lambda cell: csv_cell(cell) if isinstance(cell, str) else cell).to_csv(index=False)


_RESAMPLES, _SEED = 99_999, 0


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p value of the mean of paired differences, by a sign-flip permutation test (Fisher, 1935).

    If neither row is better, each difference is as likely as its negative. The p value is the share of sign patterns
    whose mean is at least as far from 0. Up to n = 16 pairs all 2^n patterns are counted, beyond that 99,999 random
    ones. The p value of n pairs is at least 2 / 2^n. Without any pair, or with a NaN, the result is NaN.

    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    if not len(differences) or np.isnan(differences).any():
        return float("nan")
    if len(differences) == 1:  # scipy needs two observations
        return 1.0
    test = permutation_test(
        (np.asarray(differences),),
        # Accuracies are fractions, so many patterns have the same mean. Rounding keeps such ties despite float errors.
        lambda values, axis: np.mean(values, axis=axis).round(12),
        permutation_type="samples",
        n_resamples=_RESAMPLES,  # scipy counts all patterns if there are no more than that
        rng=np.random.default_rng(_SEED),
    )
    return float(test.pvalue)


def smallest_p(pairs: int) -> float:
    """Returns the smallest p value of `sign_flip_p` for a number of pairs."""
    return min(1.0, max(2.0 ** (1 - pairs), 2 / (_RESAMPLES + 1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusts p values so that the chance of any false rejection stays below the level (Holm, 1979). NaN stays."""
    every = pd.Series(p_values, dtype=float)
    ascending = every.dropna().sort_values()
    return list((ascending * np.arange(len(ascending), 0, -1)).clip(upper=1).cummax().reindex(every.index))
