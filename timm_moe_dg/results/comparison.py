"""Two rows of a table side by side: a mixture model and its dense twin, say, and what the papers state for each."""

from collections.abc import Iterator, Sequence
from math import isnan
from pathlib import Path

from ..errors import ArgumentError
from .columns import Cell, paired_differences
from .paper_figures import PaperFigure, figures_for
from .rendering import RENDERERS, cell_text
from .runs import RowKey
from .significance import sign_flip_p
from .tables import Table

_TEST = "Differences paired by trial seed (n), two-sided sign-flip test, exact up to 16 pairs, no p below 2 / 2^n"


def compare(tables: Sequence[Table], first: str, second: str, format_: str) -> str:
    """Formats comparisons, one for each table and pair of rows; a row of it is a domain.

    Differences are taken within a trial seed, over the seeds that both rows have, before their mean and standard error.

    Args:
        tables: From `make_tables`.
        first: Names rows: a model, an algorithm, a variant, all of these as a table's row has them, or a folder.
        second: What they are compared with; pairs have the same algorithm or the same model.
        format_: A name in `rendering.RENDERERS`.

    Raises:
        ArgumentError: No table has such a pair.
    """
    texts = [
        _comparison(table, *pair, format_) for table in tables if table.runs for pair in _pairs(table, first, second)
    ]
    if not texts:
        rows = sorted({str(row) for table in tables for row in table.rows})
        raise ArgumentError.of("compare", [first, second], f"no table has both; the rows are: {'; '.join(rows)}")
    return "\n\n".join(texts)


def _pairs(table: Table, first: str, second: str) -> Iterator[tuple[RowKey, RowKey]]:
    for one in rows_named(table, first):
        for other in rows_named(table, second):
            if one != other and (one.algorithm == other.algorithm or one.model == other.model):
                yield one, other


def rows_named(table: Table, name: str) -> list[RowKey]:
    """Returns the rows of a model, an algorithm, a variant, all of these as the table has them, or a folder of runs."""
    if Path(name).is_dir():
        folder = Path(name).resolve()
        return [row for row, runs in table.runs.items() if any(folder in _above(run.folder) for run in runs)]
    return [row for row in table.runs if name in (row.algorithm, row.model, row.variant, str(row))]


def _above(folder: Path) -> list[Path]:
    return [folder.resolve(), *folder.resolve().parents]


def _comparison(table: Table, first: RowKey, second: RowKey, format_: str) -> str:
    names = [str(first), str(second)]
    papers = [_paper_column(table, row) for row in (first, second)]
    shown = [number for number, column in enumerate(papers) if any(column)]
    grid = [["domain", *names, "difference", *(f"paper's figure for {names[number]}" for number in shown)]]
    for position, domain in enumerate(table.columns):
        cells = [table.rows[row][position] for row in (first, second)]
        if any(cell.values for cell in cells):
            measured = [*map(cell_text, cells), difference_text(*cells)]
            grid.append([domain, *measured, *(papers[number][position] for number in shown)])
    remark = "% " if format_ == "latex" else ""
    tests = "; ".join(_test(domain, table, position, first, second) for position, domain in enumerate(table.columns))
    return f"{RENDERERS[format_](table.title, grid, ())}\n\n{remark}{_TEST}: {tests}"


def _test(domain: str, table: Table, position: int, first: RowKey, second: RowKey) -> str:
    found = paired_differences(table.rows[first][position], table.rows[second][position])
    p = sign_flip_p(list(found.values()))
    return f"{domain}: n = {len(found)}, p = {'-' if isnan(p) else f'{p:.2g}'}"


def difference_text(first: Cell, second: Cell) -> str:
    """Formats the mean difference over the trial seeds that both cells have, with its standard error."""
    cell = Cell(paired_differences(first, second), max(first.expected, second.expected))
    text = cell_text(cell)
    return text if text.startswith(("-", "missing")) else f"+{text}"


def _paper_column(table: Table, row: RowKey) -> list[str]:
    args = table.runs[row][0].args
    return [
        "; ".join(map(_stated, figures_for(table.dataset, table.rule, args, row.algorithm, column, table.trained_on)))
        for column in (column.removesuffix(" (IID)") for column in table.columns)
    ]


def _stated(figure: PaperFigure) -> str:
    error = "" if figure.error is None else f" ± {figure.error}"
    return f"{figure.value}{error} ({figure.source})"
