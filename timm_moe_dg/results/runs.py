"""Finds finished runs below folders, DomainBed's included, and groups them into table rows."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data import BENCHMARKS
from ..errors import RecordError
from ..protocols.options import Arguments
from ..protocols.records import Record, read_records
from ..protocols.run_identity import canonical_json, settings

RESULTS = "results.jsonl"
NO_MODEL = "(not recorded)"  # DomainBed's rows do not name their network


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, and at least one evaluation."""

    folder: Path
    records: Sequence[Record]

    @property
    def args(self) -> Arguments:
        """The run's arguments."""
        return self.records[0].args

    @property
    def dataset(self) -> str:
        """The data set."""
        return self.args["dataset"]

    @property
    def algorithm(self) -> str:
        """The training method, the weight averaging if there was any, and the average over runs if it is one."""
        parts = (self.args["algorithm"], self.args.get("averaging"), self.args.get("average_method"))
        return " + ".join(filter(None, parts))

    @property
    def model(self) -> str:
        """The network's name."""
        return self.args.get("model", NO_MODEL)

    @property
    def test_domains(self) -> tuple[int, ...]:
        """Positions of the held-out domains, ascending."""
        return tuple(sorted(self.records[0].test_domains))

    @property
    def seeds(self) -> tuple[int, int]:
        """Trial seed and hyper-parameter seed."""
        return self.args["trial_seed"], self.args["hparams_seed"]

    @property
    def num_domains(self) -> int:
        """Number of domains of the data set."""
        return len(self.records[0].in_acc)


@dataclass(frozen=True, order=True)
class RowKey:
    """Identifies a row of a table."""

    algorithm: str  # the training method
    model: str
    variant: str = ""  # settings that differ between rows of the same method and network, such as "steps=15001"

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.algorithm, self.model, self.variant)))


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[FinishedRun], list[Path]]:
    """Finds the finished runs below folders, and the folders of unfinished runs that have a results.jsonl."""
    runs, unfinished = [], []
    for folder in folders:
        if not Path(folder).is_dir():
            raise RecordError(f"folder={str(folder)!r}: no such folder; give a folder with runs")
        for path in _results_below(Path(folder)):
            # Records are read only if the run is finished: a run in progress may be writing its last line.
            if (path.parent / "done").exists() and (records := read_records(path)):
                runs.append(FinishedRun(path.parent, records))
            else:
                unfinished.append(path.parent)
    # Folders may overlap, such as a sweep and one of its runs.
    unique = {run.folder.resolve(): run for run in runs}
    return list(unique.values()), sorted(set(unfinished))


def _results_below(folder: Path) -> list[Path]:
    """Lists the results.jsonl files at any depth. Links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise RecordError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable")

    paths = [Path(parent, RESULTS) for parent, _, names in os.walk(folder, onerror=refuse) if RESULTS in names]
    return sorted(path for path in paths if path.is_file())


def domain_names(records: Sequence[Record]) -> list[str]:
    """Names the domains of one data set, from records of any runs on it.

    The names are those that all records agree on, or else the benchmark's, or else "domain 0", "domain 1" and so on.
    """
    number = max(len(record.in_acc) for record in records)
    recorded = {tuple(record.args.get("domains") or ()) for record in records}
    benchmark = BENCHMARKS.get(records[0].args["dataset"])
    names = (recorded.pop() if len(recorded) == 1 else ()) or (benchmark.domains if benchmark else ())
    return list(names) if len(names) == number else [f"domain {position}" for position in range(number)]


def by_row(runs: Sequence[FinishedRun]) -> dict[RowKey, list[FinishedRun]]:
    """Groups the runs of one data set into rows. Runs share a row if only seeds and held-out domains differ."""
    alike: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs:
        alike.setdefault((run.algorithm, run.model), []).append(run)
    rows: dict[RowKey, list[FinishedRun]] = {}
    # Data that differ name the rows of all methods and networks. DomainBed's runs did not record theirs.
    common = {"data"} if len({run.args.get("data") for run in runs} - {None}) > 1 else set()
    for (algorithm, model), group in sorted(alike.items()):
        tables = [settings(run.args) for run in group]
        # Only settings that differ between these runs name a row. Others would repeat in every row.
        differing = {name for name in set().union(*tables) if _differs([table.get(name) for table in tables])}
        varying = sorted(differing | common)
        for run, table in zip(group, tables, strict=True):
            variant = ", ".join(f"{name}={table[name]}" for name in varying if table.get(name) is not None)
            rows.setdefault(RowKey(algorithm, model, variant), []).append(run)
    for row, members in rows.items():
        _check_unique(row, members)
    return rows


def _differs(values: Iterable[object]) -> bool:
    """Whether values differ by more than their spelling, such as 1 and 1.0."""
    # `comparable` is slow, so each distinct spelling among thousands of runs is compared once.
    spellings = {repr(value): value for value in values}
    return len(set(map(canonical_json, spellings.values()))) > 1


def _check_unique(row: RowKey, runs: Sequence[FinishedRun]) -> None:
    seen: dict[tuple[tuple[int, ...], tuple[int, int]], FinishedRun] = {}
    for run in runs:
        first = seen.setdefault((run.test_domains, run.seeds), run)
        if first is not run:
            raise RecordError(
                f"runs={[str(first.folder), str(run.folder)]}: are both {run.dataset}, {row}, test domains "
                f"{list(run.test_domains)}, trial seed and hparams seed {run.seeds}; give only one of these folders"
            )
