"""Runs below folders, DomainBed's included: finds them, reads them as a frame, and groups them into table rows.

Runs of the protocol "per_region" are joined here: each is trained and evaluated on one region alone, of data with one
training domain per region, like geo_digits and FMoW_regions.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import cast, get_args

import pandas as pd

from ..data import BENCHMARKS, UNGROUPED
from ..errors import RecordError
from ..metrics import Metric
from ..protocols.options import NO_EFFECT_ON_RESULTS, Arguments, canonical_names
from ..protocols.planner import TRAINING_PREFIX
from ..protocols.records import PARTS, SCORED_ROLES, Record, RoleScores, Score, SplitName, read_records
from ..protocols.run_identity import canonical_json, comparable, in_effect, setting_text, settings, spelled_out
from ..protocols.selection import selected_scores, training_domain_validation

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
    def row_name(self) -> str:
        """The name of the run's row, with the average over runs if it is one; empty if the row has none."""
        name = self.args.get("row")
        return " + ".join(filter(None, (name, self.args.get("average_method")))) if name else ""

    @property
    def metric(self) -> Metric:
        """The score by which the run is selected and reported, a name in `metrics.METRICS`."""
        return self.records[0].metric

    @property
    def test_domains(self) -> tuple[int, ...]:
        """Positions of the held-out domains, ascending."""
        return tuple(sorted(self.records[0].test_domains))

    @property
    def seeds(self) -> tuple[int, int]:
        """Trial seed and hyper-parameter seed."""
        return self.args["trial_seed"], self.args["hparams_seed"]


@dataclass(frozen=True, order=True)
class RowKey:
    """Identifies a row of a table."""

    algorithm: str  # the training method
    model: str
    variant: str = ""  # settings that differ between rows of the same method and network, such as "steps=15001"
    name: str = ""  # of --rows; without one, the row is called by the other three

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.name or f"{self.algorithm}, {self.model}", self.variant)))


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


def read_runs(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Reads the evaluations of all runs below a folder, finished or not, DomainBed's included.

    Columns:

    - `run`, `finished`: the run's folder, and whether the run has ended.
    - `selected`: whether training-domain validation selects this evaluation among those of its run.
    - `averaged`: whether the averaged network at the end of the run was evaluated.
    - One column for each option that affects results, such as `dataset`, `model`, `test_domains` (positions) and
      `trial_seed`. Model arguments and hyper-parameters have columns of their own. Lists are tuples.
    - `domains`: the names of the domains by position.
    - `step`, `epoch`, `step_time` (seconds) and `mem_gb` (GiB), then losses by name.
    - `validation_acc`, `test_acc`: accuracies from 0 to 1, by which runs are selected and reported. Runs of another
      metric have `validation_f1_macro` and `test_f1_macro`, for example.
    - `env0_in_acc`, `env0_out_acc`, `env0_out_loss` and so on: scores of every domain's splits, as in results.jsonl.
    - `ood_accuracy`, `id_f1_macro` and so on: scores of the data's own test domains, if there are any.

    A run has no value (NaN or None) in the columns that only other runs have.

    Raises:
        RecordError: There is no such folder, no run in it has an evaluation, or a results.jsonl is damaged.

    For example, `runs[runs.selected].groupby(["algorithm", "model"]).test_acc.mean()` averages accuracies.
    """
    finished, folders = find_runs([folder])
    runs = [*finished, *(FinishedRun(path, read_records(path / RESULTS, unfinished=True)) for path in folders)]
    rows = [row for number, run in enumerate(runs) if run.records for row in _rows(run, number < len(finished))]
    if not rows:
        raise RecordError(f"folder={str(folder)!r}: no run below it has an evaluation; give a folder with runs")
    return pd.DataFrame(rows)


def _rows(run: FinishedRun, finished: bool) -> Iterator[dict[str, object]]:
    """Yields a row for each evaluation of a run."""
    args = canonical_names(run.args)
    effective = (name for name in args if name not in NO_EFFECT_ON_RESULTS or name in ("average_method", "domains"))
    settings = {name: args[name] for name in effective if name not in ("hparams", "model_kwargs")}
    settings |= {**dict(args.get("model_kwargs") or {}), "model": run.model}
    selected = training_domain_validation(run.records)
    for record in run.records:
        row = {"run": str(run.folder), "finished": finished}
        row |= {"selected": record is selected, "averaged": record.averaged}
        row |= {name: _hashable(value) for name, value in {**settings, **record.hparams}.items()}
        row |= {name: getattr(record, name) for name in ("step", "epoch", "step_time", "mem_gb")} | {**record.losses}
        row |= {**selected_scores(record), **record.scores}
        for role in SCORED_ROLES:
            scores = record.roles.get(role, {})
            row |= {f"{role}_{name}": score for name, score in scores.items() if name in get_args(Score)}
        yield row


def _hashable(value: object) -> object:
    # pandas groups rows by tuples, but not by lists
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def by_row(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Groups the runs of one data set into rows. Runs share a row if only seeds and held-out domains differ.

    Runs of a sweep with named rows share a row only with those of the same name.

    Settings are compared by their effect: a run that spells out a default is like one that does not. Numbers of images
    and files are seen through, see `run_identity.settings`.

    Returns:
        A line for each "run", with its "row", "test_domains", trial "seed" and hyper-parameter seed ("draw").
    """
    # Data that differ name the rows of all methods and networks. DomainBed's runs did not record theirs.
    further = ["data"] if len({run.args.get("data") for run in runs} - {None}) > 1 else []
    frame = pd.DataFrame({"run": runs, "method": [run.algorithm for run in runs]})
    frame["model"] = [setting_text("model", run.model) for run in runs]
    frame["name"] = [run.row_name for run in runs]
    lines = []
    for (*_, name), group in frame.groupby(["method", "model", "name"]):
        members = list(group.run)
        effects = _differing_settings(members)
        for _, part in effects.groupby(list(effects), sort=False) if len(effects.columns) else [((), effects)]:
            alike = [members[number] for number in part.index]
            # A setting has the text of the first run that spells it out
            spelled = {name: value for run in alike[::-1] for name, value in spelled_out(run.args).items()}
            named = [name for name in sorted({*effects, *further}) if name in spelled]
            variant = ", ".join(f"{name}={spelled[name]}" for name in named)
            row = RowKey(alike[0].algorithm, alike[0].model, variant, name)
            lines += [(row, run.test_domains, *run.seeds, run) for run in alike]
    key = ["row", "test_domains", "seed", "draw"]
    rows = pd.DataFrame(lines, columns=[*key, "run"])
    for (row, held_out, *seeds), same in rows[rows.duplicated(key, keep=False)].groupby(key, sort=False).run:
        raise RecordError(
            f"runs={[str(run.folder) for run in same[:2]]}: are both {runs[0].dataset}, {row}, test domains "
            f"{list(held_out)}, trial seed and hparams seed {tuple(seeds)}; give only one of these folders"
        )
    return rows


def _differing_settings(runs: Sequence[FinishedRun]) -> pd.DataFrame:
    """Returns a line for each run, and a column with the effects of each setting that differs between them."""
    # Defaults are slow to find, so settings that are spelled alike in all runs are left out first
    spelled = _differing(pd.DataFrame([{n: setting_text(n, v) for n, v in settings(run.args).items()} for run in runs]))
    if spelled.columns.empty:
        return spelled
    drawn = any(run.seeds[1] for run in runs)
    values = [in_effect(run.args, drawn=drawn) for run in runs]
    effects = _differing(pd.DataFrame([{name: comparable(name, table) for name in spelled} for table in values]))
    if "weights_sha256" in effects:
        # Runs of several trial seeds may each start from a network of their own
        present = effects.assign(weights_sha256=effects.weights_sha256 != NOTHING)
        if not present.assign(run=[(run.test_domains, run.seeds) for run in runs]).duplicated().any():
            effects = _differing(present)
    return effects


def _differing(texts: pd.DataFrame) -> pd.DataFrame:
    """Keeps the columns with several values."""
    texts = texts.fillna(NOTHING)
    return texts.loc[:, texts.nunique() > 1]


def trained_region(run: FinishedRun) -> str | None:
    """Returns the only region that a run was trained on, None if it was trained on several or has no regions."""
    first = run.records[0]
    regions, trained = _regions(first), first.training_domains
    if not first.roles or len(regions) < 2 or len(trained) != 1:
        return None
    return regions.get(trained[0])


def held_out_regions(run: FinishedRun) -> list[str]:
    """Names the regions that a run held out; none if it was trained on all or has no regions."""
    first = run.records[0]
    return [name for position, name in _regions(first).items() if first.roles and position in first.test_domains]


def joined_regions(runs: Sequence[FinishedRun]) -> Record:
    """Joins one trial seed's models of all regions into one record, with the scores of each on its own region.

    The "ood" scores are joined only if every region has "ood" test images, like FMoW with its later years.

    Raises:
        RecordError: A region has no run, or no test image of a region was scored.
    """
    by_region: dict[str, list[Record]] = {}
    for run in runs:
        if region := trained_region(run):
            by_region.setdefault(region, []).extend(run.records)
    needed = _regions(runs[0].records[0]).values() if runs else []
    if missing := sorted(set(needed) - set(by_region)) or not by_region:
        raise RecordError(f"records: per-region models lack runs trained on {missing or 'any region'}")
    selected = {region: training_domain_validation(records) for region, records in by_region.items()}
    roles = {"id": _joined(selected, "id")}
    if all(region in group_scores(record, "ood") for region, record in selected.items()):
        roles["ood"] = _joined(selected, "ood")
    return replace(next(iter(selected.values())), roles=roles, metrics={})


def _joined(selected: Mapping[str, Record], role: str) -> RoleScores:
    names = ("group_accuracy", "num_samples")
    lines = [[group_scores(record, role, name).get(region) for name in names] for region, record in selected.items()]
    frame = pd.DataFrame(lines, index=list(selected), columns=names, dtype=float)
    for region in frame.index[frame.isna().any(axis="columns")]:
        raise RecordError(f"records: the model of region {region!r} was scored on no {role} test image of that region")
    accuracy, number = frame.group_accuracy, frame.num_samples
    return {
        # Regions have different numbers of images, and the overall accuracy is over images.
        "accuracy": float((accuracy * number).sum() / number.sum()),
        "worst_accuracy": float(accuracy.min()),
        "worst_group": str(accuracy.idxmin()),
        "group_accuracy": accuracy.to_dict(),
        "num_samples": number.astype(int).to_dict(),
    }


def group_scores(record: Record, role: str, name: str = "group_accuracy") -> Mapping[str, float]:
    """Returns the accuracy of each group of a role, or another score of them."""
    return cast(Mapping[str, float], record.roles.get(role, {}).get(name, {}))


def scores_by_group(record: Record, role: str, metric: str) -> Mapping[str, float]:
    """Returns a score of each group of "id" or "ood" test images, by any name that `Record.scores_on` takes."""
    if metric == "accuracy":
        return group_scores(record, role)
    scores = record.scores_on("in", metric)
    return {group: scores[domain] for group, domain in _domains_of_groups(record, role).items()}


def _domains_of_groups(record: Record, role: str) -> dict[str, int]:
    """Group -> position of its domain."""
    facts = enumerate(record.args.get("domain_facts") or ())
    return {group: domain for domain, (domain_role, group, _) in facts if domain_role == role}


def unseen_scores(record: Record, split: SplitName, metric: str | None = None) -> dict[str, float]:
    """Returns a score on a part of each held-out domain, for data with its own test domains on each "ood" group.

    The score is by `metric`, by default the run's. Groups that were trained on are left out, as is "Other". With pooled
    training domains no group is surely unseen.
    """
    names = domain_names([record])
    if not record.roles:
        return {names[domain]: record.scores_on(split, metric)[domain] for domain in record.test_domains}
    trained = {names[domain].removeprefix(TRAINING_PREFIX) for domain in record.training_domains}
    # A single training domain has this name alone
    groups = {} if TRAINING_PREFIX.strip() in trained else scores_by_group(record, "ood", metric or record.metric)
    return {group: score for group, score in groups.items() if group not in {*trained, UNGROUPED}}


def unseen_of_most_frequent(record: Record, split: SplitName) -> dict[str, float]:
    """Returns what the most frequent class of the training images would reach where `unseen_scores` has scores.

    Records that do not count it, such as DomainBed's, have none.
    """
    names = domain_names([record])
    places = {names[domain]: domain for domain in record.test_domains}
    if record.roles:
        places, split = _domains_of_groups(record, "ood"), "in"
    zeros, unseen = _scores_of_most_frequent(record, split), unseen_scores(record, split)
    return {name: zeros[domain] for name, domain in places.items() if name in unseen and domain in zeros}


def validation_of_most_frequent(record: Record) -> float:
    """Returns what that class would reach in training-domain validation; NaN where it is not counted."""
    by_domain = _scores_of_most_frequent(record, "out")
    shares = [by_domain[domain] for domain in record.training_domains if domain in by_domain]
    return sum(shares) / len(shares) if shares else nan


def _scores_of_most_frequent(record: Record, split: SplitName) -> dict[int, float]:
    """The score that answering with that class alone has in a part of the domains with images, by position."""
    counts, sizes = record.args.get("most_frequent") or (), record.args.get("split_sizes") or ()
    classes, column = record.args.get("classes_present"), list(PARTS).index(split)
    scores: dict[int, float] = {}
    for domain, pair in enumerate(zip(counts, sizes, strict=False)):
        count, size = (sum(numbers[PARTS[split]]) for numbers in pair)
        if size and record.metric == "accuracy":
            scores[domain] = count / size
        elif size and classes:
            recall_or_f1 = float(count > 0) if record.metric == "balanced_accuracy" else 2 * count / (size + count)
            scores[domain] = recall_or_f1 / classes[domain][column]
    return scores


def _regions(record: Record) -> dict[int, str]:
    """Names of the regions by the position of their training domain."""
    names = enumerate(record.args.get("domains") or ())
    return {i: name.removeprefix(TRAINING_PREFIX) for i, name in names if name.startswith(TRAINING_PREFIX)}
