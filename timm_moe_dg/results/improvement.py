"""How much better a table's rows are than one of them: IID and OOD improvement (GMoE, Table 3)."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from statistics import fmean

from ..errors import ArgumentError
from .columns import AVERAGE, AVERAGE_OOD, Cell
from .comparison import rows_named
from .tables import Table

_OFFICIAL = {"id": "IID", "ood": "OOD"}


def with_improvements(table: Table, reference: str) -> Table:
    """Adds columns of relative improvement: the mean over domains of accuracy / the reference's accuracy - 1.

    It is taken within a trial seed, over the seeds that both rows have on all of the domains. IID are the training
    domain of single-source tables and the "id" groups, OOD the domains that are held out and the "ood" groups; of data
    with its own test domains these are the groups if the table shows them, else all images of a role.

    Args:
        table: From `make_tables`.
        reference: Names a row as `compare` does.

    Raises:
        ArgumentError: The table has no such row, or several.
    """
    kinds = _positions(table)
    found = rows_named(table, reference)
    if len(found) != 1:
        known = "; ".join(map(str, table.rows))
        raise ArgumentError.of("relative_to", reference, f"names {len(found)} rows of {table.title}; they are: {known}")
    base = table.rows[found[0]]
    rows = {
        row: [*cells, *(_improvement([(cells[at], base[at]) for at in positions]) for positions in kinds.values())]
        for row, cells in table.rows.items()
    }
    return replace(table, columns=[*table.columns, *(f"{kind} improvement" for kind in kinds)], rows=rows)


def _positions(table: Table) -> dict[str, list[int]]:
    """Positions of the columns that each kind of improvement is a mean over."""
    titles = list(table.columns)
    if AVERAGE_OOD in titles:
        return {"IID": [0], "OOD": list(range(1, titles.index(AVERAGE_OOD)))}
    if AVERAGE in titles:
        return {"OOD": list(range(titles.index(AVERAGE)))}
    found = {kind: _of_role(table, role) for role, kind in _OFFICIAL.items()}
    return {kind: positions for kind, positions in found.items() if positions}


def _of_role(table: Table, role: str) -> list[int]:
    groups = [at for at, title in enumerate(table.columns) if title in table.groups and title.startswith(f"{role} ")]
    return groups or [at for at, title in enumerate(table.columns) if title == f"{role} accuracy"]


def _improvement(pairs: Sequence[tuple[Cell, Cell]]) -> Cell:
    seeds = [seed for seed in pairs[0][0].values if all(seed in cell.values for pair in pairs for cell in pair)]
    values = {seed: fmean(_relative(own.values[seed], base.values[seed]) for own, base in pairs) for seed in seeds}
    return Cell(values, max(cell.expected for pair in pairs for cell in pair))


def _relative(value: float, base: float) -> float:
    return value / base - 1 if base else nan
