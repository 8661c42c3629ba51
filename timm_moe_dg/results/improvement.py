"""Relative IID and OOD improvement of table rows over a reference row (GMoE, Table 3)."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from statistics import fmean

from ..errors import ArgumentError
from .comparison import rows_named
from .table_columns import AVERAGE, AVERAGE_OOD, Cell
from .tables import Table

_ROLES = {"id": "IID", "ood": "OOD"}


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
    improved = {
        row: [*cells, *(_improvement([(cells[i], base[i]) for i in positions]) for positions in kinds.values())]
        for row, cells in table.rows.items()
    }
    return replace(table, columns=[*table.columns, *(f"{kind} improvement" for kind in kinds)], rows=improved)


def _positions(table: Table) -> dict[str, list[int]]:
    """Positions of the columns that each kind of improvement averages."""
    titles = list(table.columns)
    if AVERAGE_OOD in titles:
        return {"IID": [0], "OOD": list(range(1, titles.index(AVERAGE_OOD)))}
    if AVERAGE in titles:
        return {"OOD": list(range(titles.index(AVERAGE)))}
    by_kind = {kind: _role_columns(table, role) for role, kind in _ROLES.items()}
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
