"""Tables as tests read and make them, with a cell for each row and column, and runs with one evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from tests.invented import invented_records
from timm_moe_dg.results.runs import FinishedRun, RowKey
from timm_moe_dg.results.tables import Table


class Cell(NamedTuple):
    """One number of a table."""

    values: dict[int, float]  # shares by trial seed
    mean: float
    error: float
    expected: int


def cells_of(table: Table) -> dict[RowKey, list[Cell]]:
    """The cells of each row, in the order of the columns."""
    values: dict[tuple[RowKey, int], dict[int, float]] = {}
    for (row, column, seed), share in table.scores.items():
        values.setdefault((row, column), {})[seed] = share
    cells: dict[RowKey, list[Cell]] = {row: [] for row in table.rows}
    for (row, column), cell in table.summary().iterrows():
        found = values.get((row, column), {})
        assert len(found) == cell.seeds
        cells[row].append(Cell(found, cell["mean"], cell.error, cell.expected))
    return cells


def table_of(
    rows: Mapping[RowKey, Sequence[Mapping[int, float]]],
    columns: Sequence[str],
    *,
    dataset: str = "toy",
    rule: str = "oracle",
    expected: int = 2,
    runs: Mapping[RowKey, Sequence[FinishedRun]] | None = None,
) -> Table:
    """A table of shares by trial seed, one mapping for each row and column."""
    shares = {
        (row, column, seed): share
        for row, cells in rows.items()
        for column, cell in enumerate(cells)
        for seed, share in cell.items()
    }
    index = pd.MultiIndex.from_tuples(list(shares), names=["row", "column", "seed"])
    scores = pd.Series(list(shares.values()), index=index).sort_index()
    seeds = [expected] * len(columns)
    return Table(dataset, rule, "a table", columns, list(rows), scores, seeds, runs or {})


def run_of(
    test: Sequence[int],
    in_acc: Sequence[float] = (0.5, 0.5, 0.5),
    out_acc: Sequence[float] = (0.5, 0.5, 0.5),
    folder: str = "run",
    **options: Any,
) -> FinishedRun:
    """A run with one evaluation."""
    (record,) = invented_records(test, at=(0,), num_domains=len(in_acc), **options)
    return FinishedRun(Path(folder), [replace(record, in_acc=tuple(in_acc), out_acc=tuple(out_acc))])


def held_out_run(region: str, ood: float, ids: Mapping[str, float], seed: int) -> FinishedRun:
    """A run that holds out one of three regions, which is then the "ood" group."""
    names = [f"{role} {name}" for role in ("train", "id") for name in ("Africa", "Asia", "Europe")]
    run = run_of([names.index(f"train {region}"), 3, 4, 5], (0.5,) * 6, (0.5,) * 6, trial_seed=seed, domains=names)

    def scores(groups: Mapping[str, float]) -> Any:
        mean = sum(groups.values()) / len(groups)
        return {"accuracy": mean, "worst_accuracy": min(groups.values()), "f1_macro": 0.5, "group_accuracy": groups}

    roles = {"id": scores(ids), "ood": scores({region: ood})}
    return FinishedRun(Path(f"{region}{seed}"), [replace(run.records[0], roles=roles)])
