"""Finished runs as tables need them: found below folders, DomainBed's own included, and grouped into rows."""

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
    """A finished run.

    Attributes:
        folder: Where it is.
        records: Its evaluations, in their order; at least one.
    """

    folder: Path
    records: Sequence[Record]

    @property
    def args(self) -> Arguments:
        """Its arguments."""
        return self.records[0].args

    @property
    def dataset(self) -> str:
        """The data set."""
        return self.args["dataset"]

    @property
    def algorithm(self) -> str:
        """The training method, with weight averaging if there was any."""
        averaging = self.args.get("averaging")
        return self.args["algorithm"] + (f" + {averaging}" if averaging else "")

    @property
    def model(self) -> str:
        """The network's name."""
        return self.args.get("model", NO_MODEL)

    @property
    def test_domains(self) -> tuple[int, ...]:
        """Positions of the domains that were held out, ascending."""
        return tuple(sorted(self.records[0].test_domains))

    @property
    def seeds(self) -> tuple[int, int]:
        """Trial seed and hyper-parameter seed."""
        return self.args["trial_seed"], self.args["hparams_seed"]

    @property
    def num_domains(self) -> int:
        """How many domains the data set has."""
        return len(self.records[0].in_acc)


@dataclass(frozen=True, order=True)
class RowKey:
    """What a row of a table stands for.

    Attributes:
        algorithm: The training method.
        model: The network's name.
        variant: What else tells it from rows of the same method and network, such as "steps=15001".
    """

    algorithm: str
    model: str
    variant: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.algorithm, self.model, self.variant)))


def find_runs(folders: Iterable[str | os.PathLike[str]]) -> tuple[list[FinishedRun], list[Path]]:
    """Looks for runs below folders.

    Returns:
        The finished runs, and the folders of those that have records but are not finished.

    Raises:
        RecordError: There is no such folder, one below it cannot be listed, or a finished run's records cannot be read.
    """
    runs, unfinished = [], []
    for folder in folders:
        if not Path(folder).is_dir():
            raise RecordError(f"folder={str(folder)!r}: no such folder; give one that holds runs")
        for path in _results_below(Path(folder)):
            if (path.parent / "done").exists() and (records := read_records(path)):
                runs.append(FinishedRun(path.parent, records))
            else:
                unfinished.append(path.parent)
    unique = {run.folder.resolve(): run for run in runs}
    return list(unique.values()), sorted(set(unfinished))


def _results_below(folder: Path) -> list[Path]:
    """Lists records to any depth; links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise RecordError(f"folder={error.filename!r}: cannot be listed ({error.strerror}); make it readable")

    found = [Path(parent, RESULTS) for parent, _, names in os.walk(folder, onerror=refuse) if RESULTS in names]
    return sorted(path for path in found if path.is_file())


def domain_names(records: Sequence[Record]) -> list[str]:
    """Names the domains of one data set: as the runs wrote them down, else as the benchmark does, else by position.

    Args:
        records: Of any runs on it; names that not all of them agree on do not count. The most domains set the number.
    """
    number = max(len(record.in_acc) for record in records)
    recorded = {tuple(record.args.get("domains") or ()) for record in records}
    benchmark = BENCHMARKS.get(records[0].args["dataset"])
    known = (recorded.pop() if len(recorded) == 1 else ()) or (benchmark.domains if benchmark else ())
    return list(known) if len(known) == number else [f"domain {position}" for position in range(number)]


def by_row(runs: Sequence[FinishedRun]) -> dict[RowKey, list[FinishedRun]]:
    """Groups the runs of one data set into rows; settings other than seeds and held-out domains make rows of their own.

    Raises:
        RecordError: Two runs are of the same row, held-out domains and seeds.
    """
    alike: dict[tuple[str, str], list[FinishedRun]] = {}
    for run in runs:
        alike.setdefault((run.algorithm, run.model), []).append(run)
    rows: dict[RowKey, list[FinishedRun]] = {}
    for (algorithm, model), group in sorted(alike.items()):
        found = [settings(run.args) for run in group]
        varying = sorted(name for name in set().union(*found) if _differs([own.get(name) for own in found]))
        for run, own in zip(group, found, strict=True):
            variant = ", ".join(f"{name}={own[name]}" for name in varying if own.get(name) is not None)
            rows.setdefault(RowKey(algorithm, model, variant), []).append(run)
    for row, members in rows.items():
        _check_unique(row, members)
    return rows


def _differs(values: Iterable[object]) -> bool:
    """Whether values do not all mean the same; few of thousands are written in more than one way."""
    spellings = {repr(value): value for value in values}
    return len(set(map(canonical_json, spellings.values()))) > 1


def _check_unique(row: RowKey, runs: Sequence[FinishedRun]) -> None:
    seen: dict[tuple[tuple[int, ...], tuple[int, int]], FinishedRun] = {}
    for run in runs:
        first = seen.setdefault((run.test_domains, run.seeds), run)
        if first is not run:
            raise RecordError(
                f"runs={[str(first.folder), str(run.folder)]}: are both {run.dataset}, {row}, test domains "
                f"{list(run.test_domains)}, trial seed and hparams seed {run.seeds}; give the folder of one of them"
            )
