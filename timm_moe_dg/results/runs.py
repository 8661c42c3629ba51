"""Finds finished runs below folders, DomainBed's included, and groups them into table rows."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..data import BENCHMARKS
from ..errors import RecordError
from ..protocols.options import Arguments
from ..protocols.records import Record, read_records
from ..protocols.run_identity import canonical_json, setting_text, settings
from .in_effect import comparable, in_effect

RESULTS = "results.jsonl"
NOTHING = canonical_json(None)
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

    @property
    def described_model(self) -> str:
        """The model, with the variant in brackets."""
        return f"{self.model} ({self.variant})" if self.variant else self.model


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
    """Groups the runs of one data set into rows. Runs share a row if only seeds and held-out domains differ.

    Settings are compared by their effect: a run that spells out a default is like one that does not. Numbers of images
    and files are seen through, see `run_identity.settings`.
    """
    # Data that differ name the rows of all methods and networks. DomainBed's runs did not record theirs.
    further = ["data"] if len({run.args.get("data") for run in runs} - {None}) > 1 else []
    frame = pd.DataFrame({"run": runs, "method": [run.algorithm for run in runs]})
    frame["model"] = [setting_text("model", run.model) for run in runs]
    rows: dict[RowKey, list[FinishedRun]] = {}
    for _, group in frame.groupby(["method", "model"]):
        members = list(group.run)
        effects = _differing_settings(members)
        for _, part in effects.groupby(list(effects), sort=False) if len(effects.columns) else [((), effects)]:
            alike = [members[number] for number in part.index]
            named = [(name, _spelled_out(name, alike)) for name in sorted({*effects, *further})]
            variant = ", ".join(f"{name}={value}" for name, value in named if value is not None)
            rows.setdefault(RowKey(alike[0].algorithm, alike[0].model, variant), []).extend(alike)
    for row, alike in rows.items():
        _check_unique(row, alike)
    return rows


def _differing_settings(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Returns a line for each run, and a column with the effects of each setting that differs between them."""
    # Defaults are slow to find, so settings that are spelled alike in all runs are left out first
    spelled = _differing(pd.DataFrame([{n: setting_text(n, v) for n, v in settings(run.args).items()} for run in runs]))
    drawn = any(run.seeds[1] for run in runs)
    values = [in_effect(run.args, drawn=drawn) for run in runs] if len(spelled.columns) else []
    effects = _differing(pd.DataFrame([{name: comparable(name, table) for name in spelled} for table in values]))
    if "weights_sha256" in effects:
        # Runs of several trial seeds may each start from a network of their own
        present = effects.assign(weights_sha256=effects.weights_sha256 != NOTHING)
        if not present.assign(run=[(run.test_domains, run.seeds) for run in runs]).duplicated().any():
            effects = _differing(present)
    return effects if len(effects) else pd.DataFrame(index=range(len(runs)))


def _differing(texts: pd.DataFrame) -> pd.DataFrame:
    """Keeps the columns with several values."""
    texts = texts.fillna(NOTHING)
    return texts.loc[:, texts.nunique() > 1]


def _spelled_out(name: str, runs: Sequence[FinishedRun]) -> object:
    return next((value for run in runs if (value := settings(run.args).get(name)) is not None), None)


def _check_unique(row: RowKey, runs: Sequence[FinishedRun]) -> None:
    seen: dict[tuple[tuple[int, ...], tuple[int, int]], FinishedRun] = {}
    for run in runs:
        first = seen.setdefault((run.test_domains, run.seeds), run)
        if first is not run:
            raise RecordError(
                f"runs={[str(first.folder), str(run.folder)]}: are both {run.dataset}, {row}, test domains "
                f"{list(run.test_domains)}, trial seed and hparams seed {run.seeds}; give only one of these folders"
            )
