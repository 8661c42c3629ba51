"""Rows of a table compared: two side by side, with the papers' figures, and all relative to one (GMoE, Table 3)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import fmean

from ..cli.escape import markdown, one_line
from ..errors import ArgumentError
from .paired import sign_flip_p
from .paper_figures import paper_columns
from .rendering import RENDERERS, cell_text
from .runs import RowKey
from .table_columns import AVERAGE, AVERAGE_OOD, Cell, paired_differences
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
    names = [str(first), str(second)]
    papers = paper_columns(table)
    # Most settings have no figure in a paper, so an empty column is left out.
    with_figures = [row for row in (first, second) if any(texts[row] for texts in papers.values())]
    grid = [["domain", *names, "difference", *(f"paper's figure for {row}" for row in with_figures)]]
    for position, domain in enumerate(table.columns):
        cells = [table.rows[row][position] for row in (first, second)]
        if any(cell.values for cell in cells):
            measured = [*map(cell_text, cells), difference_text(*cells)]
            grid.append([domain, *measured, *(papers.get(domain, {}).get(row, "") for row in with_figures)])
    comment = "% " if format_ == "latex" else ""
    escape = markdown if format_ == "markdown" else one_line
    titles = enumerate(map(escape, table.columns))
    tests = "; ".join(_test(name, table, position, first, second) for position, name in titles)
    return f"{RENDERERS[format_](table.title, grid, ())}\n\n{comment}{_TEST}: {tests}"


def _test(domain: str, table: Table, position: int, first: RowKey, second: RowKey) -> str:
    differences = paired_differences(table.rows[first][position], table.rows[second][position])
    p = sign_flip_p(list(differences.values()))
    return f"{domain}: n = {len(differences)}, p = {'-' if isnan(p) else f'{p:.2g}'}"


def difference_text(first: Cell, second: Cell) -> str:
    """Formats the mean difference over the trial seeds of both cells, with its standard error."""
    cell = Cell(paired_differences(first, second), max(first.expected, second.expected))
    text = cell_text(cell)  # has a sign only if negative
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
    base = table.rows[named[0]]
    missing = [Cell({}, cell.expected) for cell in base]  # accuracies on other data are no reference
    improved = {}
    for row, cells in table.rows.items():
        pairs = list(zip(cells, missing if table.on_other_data(row, named[0]) else base, strict=True))
        improved[row] = [*cells, *(_improvement([pairs[i] for i in positions]) for positions in kinds.values())]
    return replace(table, columns=[*table.columns, *(f"{kind} improvement" for kind in kinds)], rows=improved)


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


def _improvement(pairs: Sequence[tuple[Cell, Cell]]) -> Cell:
    seeds = [seed for seed in pairs[0][0].values if all(seed in cell.values for pair in pairs for cell in pair)]
    # Ratios come first, then their mean over domains, as in the paper: hard domains weigh as much as easy ones.
    values = {seed: fmean(_relative(cell.values[seed], base.values[seed]) for cell, base in pairs) for seed in seeds}
    return Cell(values, max(cell.expected for pair in pairs for cell in pair))


def _relative(value: float, base: float) -> float:
    return value / base - 1 if base else nan
