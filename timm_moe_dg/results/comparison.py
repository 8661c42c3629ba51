"""Rows of a table compared: two side by side, with the papers' figures, and all relative to one (GMoE, Table 3)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import isnan
from pathlib import Path

import pandas as pd

from ..cli.escape import markdown, one_line
from ..errors import ArgumentError
from .paired import sign_flip_p
from .paper_figures import paper_columns
from .rendering import RENDERERS, cell_texts
from .runs import RowKey
from .table_columns import AVERAGE, AVERAGE_OOD, at, average
from .tables import Table

_KINDS = {"id": "IID", "ood": "OOD"}  # role -> title
_TEST = "Differences paired by trial seed (n), two-sided sign-flip test, exact up to 16 pairs, p at least 2 / 2^n"


def compare(tables: Sequence[Table], first: str, second: str, format_: str) -> str:
    """Formats one comparison for each table and pair of rows. Its rows are the table's columns, such as domains.

    Differences are computed within a trial seed, for the seeds of both rows. Their mean and standard error follow.
    `first` and `second` name rows as in `rows_named`. The two rows of a pair have the same data, and the same algorithm
    or the same model.
    """
    pairs = [(table, *pair) for table in tables if table.runs for pair in _pairs(table, first, second)]
    texts = [_comparison(*pair, format_) for pair in pairs if not pair[0].on_other_data(*pair[1:])]
    if pairs and not texts:
        raise ArgumentError.of("compare", [first, second], "have different data; give rows with the same data=")
    if not texts:
        rows = sorted({str(row) for table in tables for row in table.rows})
        raise ArgumentError.of("compare", [first, second], f"no table has both; the rows are: {'; '.join(rows)}")
    return "\n\n".join(texts)


def _pairs(table: Table, first: str, second: str) -> Iterator[tuple[RowKey, RowKey]]:
    for row, other in product(rows_named(table, first), rows_named(table, second)):
        if row != other and (row.algorithm == other.algorithm or row.model == other.model):
            yield row, other


def rows_named(table: Table, name: str) -> list[RowKey]:
    """Finds the rows with a model, an algorithm or a variant, with all three (`str(row)`), or with runs in a folder."""
    if Path(name).is_dir():
        folder = Path(name).resolve()
        return [
            row for row, runs in table.runs.items() if any(run.folder.resolve().is_relative_to(folder) for run in runs)
        ]
    return [row for row in table.runs if name in (row.algorithm, row.model, row.variant, str(row))]


def _comparison(table: Table, first: RowKey, second: RowKey, format_: str) -> str:
    pair, papers, differences = [first, second], paper_columns(table), table.differences(first, second)
    texts = cell_texts(table)
    between = cell_texts(replace(table, rows=[first], scores=pd.concat({first: differences}, names=["row"])))
    # Most settings have no figure in a paper, so an empty column is left out.
    with_figures = [row for row in pair if any(figures[row] for figures in papers.values())]
    header = ["domain", *map(str, pair), "difference", *(f"paper's figure for {row}" for row in with_figures)]
    lines, tests, escape = [], [], markdown if format_ == "markdown" else one_line
    for position, domain in enumerate(table.columns):
        values = at(differences, "column", position)
        p = sign_flip_p(list(values))
        tests.append(f"{escape(domain)}: n = {len(values)}, p = {'-' if isnan(p) else f'{p:.2g}'}")
        cells = [texts[row, position] for row in pair]
        if any(text != "missing" for text in cells):
            figures = [papers.get(domain, {}).get(row, "") for row in with_figures]
            lines.append([domain, *cells, _signed(between[first, position]), *figures])
    comment = "% " if format_ == "latex" else ""
    return f"{RENDERERS[format_](table.title, header, lines, ())}\n\n{comment}{_TEST}: {'; '.join(tests)}"


def _signed(text: str) -> str:
    return text if text.startswith(("-", "missing")) else f"+{text}"


def with_improvements(table: Table, reference: str) -> Table:
    """Adds columns of relative improvement: the mean over domains of accuracy / reference accuracy - 1.

    The ratio is computed within a trial seed, for the seeds that both rows have on all of the domains. IID covers the
    training domain of single-source tables and "id" test domains. OOD covers held-out domains and "ood" test domains.
    A data set's own test domains count by group if the table has group columns, and as a whole otherwise. The
    reference names a row as in `compare`.
    """
    kinds = _positions(table)
    named = rows_named(table, reference)
    if len(named) != 1:
        rows = "; ".join(map(str, table.rows))
        remedy = f"names {len(named)} rows of {table.title}; give one of: {rows}"
        raise ArgumentError.of("relative_to", reference, remedy)
    base = table.shares(named[0])
    ratios = {}
    for row in table.rows:
        if not table.on_other_data(row, named[0]):  # accuracies on other data are no reference
            shares, references = table.shares(row).align(base, join="inner")
            ratios[row] = shares / references.where(references != 0) - 1
    joined = pd.concat(ratios, names=["row"])
    parts, expected = [table.scores], [*table.expected]
    for positions in kinds.values():
        # Ratios come first, then their mean over domains, as in the paper: hard domains weigh as much as easy ones.
        counted = joined[joined.index.get_level_values("column").isin(positions)]
        added = pd.concat({len(expected): average(counted, len(positions))}, names=["column"])
        parts.append(added.swaplevel("column", "row"))
        expected.append(max(table.expected[position] for position in positions))
    columns = [*table.columns, *(f"{kind} improvement" for kind in kinds)]
    return replace(table, columns=columns, scores=pd.concat(parts).sort_index(), expected=expected)


def _positions(table: Table) -> dict[str, list[int]]:
    """Positions of the columns that each kind of improvement averages."""
    titles = list(table.columns)
    if AVERAGE_OOD in titles:
        return {"IID": [0], "OOD": list(range(1, titles.index(AVERAGE_OOD)))}
    if AVERAGE in titles:
        return {"OOD": list(range(titles.index(AVERAGE)))}
    by_kind = {kind: _role_columns(table, role) for role, kind in _KINDS.items()}
    return {kind: positions for kind, positions in by_kind.items() if positions}


def _role_columns(table: Table, role: str) -> list[int]:
    titles = list(enumerate(table.columns))
    groups = [position for position, title in titles if title in table.groups and title.startswith(f"{role} ")]
    return groups or [position for position, title in titles if title == f"{role} accuracy"]
