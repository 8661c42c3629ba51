"""Tables as text and frames, and their rows compared by differences and paired tests."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import permutation_test
from tabulate import LATEX_ESCAPE_RULES

from ..cli.text import csv_cell, markdown, one_line
from ..errors import ArgumentError
from .papers import paper_columns
from .runs import RowKey
from .tables import Table, at, average

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


_TEST = "Differences paired by trial seed (n), two-sided sign-flip test, exact up to 16 pairs, p at least 2 / 2^n"
_RESAMPLES, _SEED = 99_999, 0


def compare(tables: Sequence[Table], first: str, second: str, format_: str) -> str:
    """Formats one comparison for each table and pair of rows. Its rows are the table's columns, such as domains.

    Differences are computed within a trial seed, for the seeds of both rows. Their mean and standard error follow.
    `first` and `second` name rows as in `rows_named`. The two rows of a pair have the same data, and the same algorithm
    or the same model.
    """
    pairs = [
        (table, *pair)
        for table in tables
        for pair in product(rows_named(table, first), rows_named(table, second))
        if pair[0] != pair[1] and (pair[0].algorithm == pair[1].algorithm or pair[0].model == pair[1].model)
    ]
    texts = [_comparison(*pair, format_) for pair in pairs if not pair[0].on_other_data(*pair[1:])]
    if pairs and not texts:
        raise ArgumentError.of("compare", [first, second], "have different data; give rows with the same data=")
    if not texts:
        rows = sorted({str(row) for table in tables for row in table.rows})
        raise ArgumentError.of("compare", [first, second], f"no table has both; the rows are: {'; '.join(rows)}")
    return "\n\n".join(texts)


def rows_named(table: Table, name: str) -> list[RowKey]:
    """Finds the rows with a model, an algorithm or a variant, with all three (`str(row)`), or with runs in a folder."""
    if Path(name).is_dir():
        folder = Path(name).resolve()
        return [
            row for row, runs in table.runs.items() if any(run.folder.resolve().is_relative_to(folder) for run in runs)
        ]
    return [row for row in table.runs if name in (row.algorithm, row.model, row.variant, str(row))]


def _comparison(table: Table, first: RowKey, second: RowKey, format_: str) -> str:
    pair, differences = [first, second], table.differences(first, second)
    texts = cell_texts(table).loc[pair].T
    between = replace(table, rows=[first], scores=pd.concat({first: differences}, names=["row"]))
    unsigned = cell_texts(between).loc[first]
    title = "first minus second"
    texts[title] = unsigned.where(unsigned.str.startswith(("-", "missing")), "+" + unsigned)
    texts.insert(0, "domain", table.columns)
    tests, escape = [], markdown if format_ == "markdown" else one_line
    for position, domain in enumerate(table.columns):
        values = at(differences, "column", position)
        p = sign_flip_p(list(values))
        tests.append(f"{escape(domain)}: n = {len(values)}, p = {'-' if isnan(p) else f'{p:.2g}'}")
    comment = "% " if format_ == "latex" else ""
    shown = texts[(texts[pair] != "missing").any(axis="columns")]
    return f"{formatted(table.title, shown, format_)}\n\n{comment}{_TEST}: {'; '.join(tests)}"


def with_improvements(table: Table, reference: str) -> Table:
    """Adds columns of relative improvement: the mean over domains of accuracy / reference accuracy - 1.

    The ratio is computed within a trial seed, for the seeds that both rows have on all of the domains. IID covers the
    training domain of single-source tables and "id" test domains. OOD covers held-out domains and "ood" test domains.
    The reference names a row as in `compare`. This is the measure of GMoE's Table 3.
    """
    named = rows_named(table, reference)
    if len(named) != 1:
        rows = "; ".join(map(str, table.rows))
        remedy = f"names {len(named)} rows of {table.title}; give one of: {rows}"
        raise ArgumentError.of("relative_to", reference, remedy)
    ratios = {}
    for row in table.rows:
        if not table.on_other_data(row, named[0]):  # accuracies on other data are no reference
            shares, references = table.shares(row, named[0])
            ratios[row] = shares / references.where(references != 0) - 1
    joined = pd.concat(ratios, names=["row"])
    parts, expected = [table.scores], [*table.expected]
    for positions in table.kinds.values():
        # Ratios come first, then their mean over domains, as in the paper: hard domains weigh as much as easy ones.
        counted = joined[joined.index.get_level_values("column").isin(positions)]
        added = pd.concat({len(expected): average(counted, len(positions))}, names=["column"])
        parts.append(added.swaplevel("column", "row"))
        expected.append(max(table.expected[position] for position in positions))
    columns = [*table.columns, *(f"{kind} improvement" for kind in table.kinds)]
    return replace(table, columns=columns, scores=pd.concat(parts).sort_index(), expected=expected)


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
    """Adjusts p values so that the chance of any false rejection stays below the level (Holm, 1979)."""
    ascending = pd.Series(p_values, dtype=float).sort_values()
    return list((ascending * np.arange(len(ascending), 0, -1)).clip(upper=1).cummax().sort_index())
