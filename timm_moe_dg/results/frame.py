"""Records of runs as a table: one row for each evaluation, with settings and scores as columns."""

import os
from collections.abc import Iterator
from itertools import chain, product

import pandas as pd

from ..errors import RecordError
from ..protocols.options import NO_EFFECT_ON_RESULTS, canonical_names
from ..protocols.records import SCORED_ROLES, read_records
from ..protocols.selection import reported_accuracy, training_domain_validation, validation_accuracy
from .runs import RESULTS, FinishedRun, find_runs
from .table_columns import OFFICIAL_SCORES


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
    - `validation_acc`, `test_acc`: accuracies from 0 to 1, by which runs are selected and reported.
    - `env0_in_acc`, `env0_out_acc`, `env0_out_loss` and so on: scores of every domain's splits, as in results.jsonl.
    - `ood_accuracy`, `id_f1_macro` and so on: scores of the data's own test domains, if there are any.

    A run has no value (NaN or None) in the columns that only other runs have.

    Raises:
        RecordError: There is no such folder, no run in it has an evaluation, or a results.jsonl is damaged.

    >>> runs = read_runs("output/pacs")
    >>> runs[runs.selected].groupby(["algorithm", "model"]).test_acc.mean()
    """
    finished, folders = find_runs([folder])
    begun = [
        FinishedRun(path, records) for path in folders if (records := read_records(path / RESULTS, unfinished=True))
    ]
    rows = [*chain.from_iterable(map(_rows, finished)), *chain.from_iterable(map(_rows, begun))]
    if not rows:
        raise RecordError(f"folder={str(folder)!r}: no run below it has an evaluation; give a folder with runs")
    number = sum(len(run.records) for run in finished)
    frame = pd.DataFrame(rows)
    frame.insert(1, "finished", frame.index < number)
    return frame


def _rows(run: FinishedRun) -> Iterator[dict[str, object]]:
    """Yields a row for each evaluation of a run."""
    args = canonical_names(run.args)
    effective = (name for name in args if name not in NO_EFFECT_ON_RESULTS or name in ("average_method", "domains"))
    settings = {name: args[name] for name in effective if name not in ("hparams", "model_kwargs")}
    settings |= {**dict(args.get("model_kwargs") or {}), "model": run.model}
    selected = training_domain_validation(run.records)
    for record in run.records:
        row = {"run": str(run.folder), "selected": record is selected, "averaged": record.averaged}
        row |= {name: _hashable(value) for name, value in {**settings, **record.hparams}.items()}
        row |= {name: getattr(record, name) for name in ("step", "epoch", "step_time", "mem_gb")} | {**record.losses}
        row |= {"validation_acc": validation_accuracy(record), "test_acc": reported_accuracy(record), **record.scores}
        for role, score in product(SCORED_ROLES, OFFICIAL_SCORES):
            if score in record.roles.get(role, {}):
                row[f"{role}_{score}"] = record.roles[role][score]
        yield row


def _hashable(value: object) -> object:
    # pandas groups rows by tuples, but not by lists
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
