"""What the runs of a sweep say together: tables, seeds, paired tests, and which runs are not there yet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from math import isnan
from pathlib import Path
from typing import NamedTuple

from ..errors import RecordError
from ..results.paired import PairedTest, paired_tests
from ..results.rendering import cell_text
from ..results.runs import FinishedRun, find_runs
from ..results.table_columns import Cell
from ..results.tables import Table, make_tables
from ..sweeping.jobs import Job
from .pictures import Missing, attempt
from .run_facts import RunFacts, at_chance, divergence, given, read_run


class Dots(NamedTuple):
    """A cell of a table with a dot for each seed.

    Attributes:
        text: Mean and standard error.
        dots: For each seed, its place in percent of the table's scale, and what it is.
    """

    text: str
    dots: Sequence[tuple[float, str]]


class Compared(NamedTuple):
    """One table, and what can be said about the differences between its rows.

    Attributes:
        table: It.
        columns: Titles of its columns that some run has a number for.
        empty: Titles of the others.
        rows: Title of a row -> its cells, in the order of `columns`.
        scale: Accuracies in percent at the two ends of the dots' scale.
        tests: Of every two rows.
    """

    table: Table
    columns: Sequence[str]
    empty: Sequence[str]
    rows: Mapping[str, Sequence[Dots]]
    scale: tuple[float, float]
    tests: Sequence[PairedTest]


class Unfinished(NamedTuple):
    """A run without results to count.

    Attributes:
        name: Of its folder.
        state: One of `sweeping.jobs.STATES`.
        progress: How far it is.
        divergence: A sentence if it diverged.
    """

    name: str
    state: str
    progress: str
    divergence: str | None


@dataclass(frozen=True)
class SweepFacts:
    """A sweep as its folder has it.

    Attributes:
        folder: It.
        runs: The finished runs.
        unfinished: The others, of which something is there.
        compared: Its tables; or why there are none.
    """

    folder: Path
    runs: Sequence[RunFacts]
    unfinished: Sequence[Unfinished]
    compared: Sequence[Compared] | Missing

    @property
    def given(self) -> dict[str, object]:
        """Options that all runs have, and that were set to something else than their default."""
        each = [given(run.run.args) for run in self.runs]
        return {name: value for name, value in each[0].items() if all(one.get(name) == value for one in each)}

    @property
    def at_chance(self) -> list[str]:
        """Names of the runs whose selection is."""
        return [run.name for run in self.runs if at_chance(run)]

    @property
    def doubts(self) -> list[str]:
        """What a reader should know before believing the tables, a sentence each."""
        found = []
        if self.unfinished:
            number = len(self.unfinished)
            found.append(f"{number} of {number + len(self.runs)} runs are not finished; tables are made without them.")
        found += [f"{run.name}: {run.divergence}" for run in self.unfinished if run.divergence]
        found += [f"{run.name}: {reason}" for run in self.runs if (reason := divergence(run))]
        if self.at_chance:
            found.append(
                f"Selection is at chance in {len(self.at_chance)} of {len(self.runs)} runs, so that what was selected "
                "means little; they are marked in the list of all runs."
            )
        if self.runs and len({run.run.seeds[0] for run in self.runs}) == 1:
            found.append("There is one trial seed only: no difference can be told from chance.")
        return found


def read_sweep(folder: Path) -> SweepFacts:
    """Reads all runs below a folder.

    Raises:
        RecordError: A finished run's records cannot be read.
    """
    found, halves = find_runs([folder])
    unfinished = [_unfinished(path) for path in halves]
    known = {run.folder.name for run in found} | {each.name for each in unfinished}
    logs = [log for log in sorted(folder.rglob("logs/*.log")) if log.stem not in known]
    unfinished += [Unfinished(log.stem, _without_records(log), "no evaluation yet", None) for log in logs]
    return SweepFacts(folder, [read_run(run.folder) for run in found], unfinished, attempt(lambda: _compared(found)))


def _unfinished(folder: Path) -> Unfinished:
    facts = attempt(lambda: read_run(folder))
    if isinstance(facts, Missing):
        return Unfinished(folder.name, "incomplete", facts.reason, None)
    return Unfinished(facts.name, facts.state, facts.progress, divergence(facts))


def _without_records(log: Path) -> str:
    return Job(log.stem, (), log.parent.parent / log.stem, log).state()


def _compared(runs: Sequence[FinishedRun]) -> list[Compared]:
    tables = make_tables(runs)
    if not tables:
        raise RecordError(f"runs={len(runs)} finished: are not enough for a table of any selection rule")
    return [_with_dots(table) for table in tables]


def _with_dots(table: Table) -> Compared:
    values = [value for cells in table.rows.values() for cell in cells for value in cell.values.values()]
    low, high = _scale([100 * value for value in values if not isnan(value)])
    shown = [any(cell.values for cell in column) for column in zip(*table.rows.values(), strict=True)]
    rows = {str(row): [_dots(cell, low, high) for cell in compress(cells, shown)] for row, cells in table.rows.items()}
    empty = compress(table.columns, [not each for each in shown])
    columns = list(compress(table.columns, shown)), list(empty)
    return Compared(table, *columns, rows, (low, high), paired_tests(table))


def _scale(percents: Sequence[float]) -> tuple[float, float]:
    """Two multiples of five around all values, with some room."""
    if not percents:
        return 0.0, 100.0
    return max(0.0, (min(percents) - 1) // 5 * 5), min(100.0, -(-(max(percents) + 1) // 5) * 5)


def _dots(cell: Cell, low: float, high: float) -> Dots:
    known = {seed: 100 * value for seed, value in cell.values.items() if not isnan(value)}
    places = [((value - low) / (high - low) * 100, f"seed {seed}: {value:.1f}") for seed, value in known.items()]
    return Dots(cell_text(cell), places)
