"""Runs that never ran: folders with records of invented accuracies."""

import json
from collections.abc import Container, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from timm_moe_dg.protocols.planner import leave_one_or_two_domains_out
from timm_moe_dg.protocols.records import Record

FIVE = ("PACS", "VLCS", "OfficeHome", "TerraIncognita", "DomainNet")  # whose average the papers compare
ARGS = {"dataset": "PACS", "algorithm": "ERM", "test_envs": [1], "trial_seed": 2, "hparams_seed": 0, "steps": 5001}


def invented_records(
    test: Iterable[int],
    *,
    num_domains: int = 3,
    trial_seed: int = 0,
    hparams_seed: int = 0,
    at: Sequence[int] = (0, 300, 600),
    levels: int = 64,
    seed: int = 0,
    **args: Any,
) -> list[Record]:
    """Random accuracies, of so many levels (a power of two, for exact means); a function of everything given."""
    words = {"dataset": "toy", "algorithm": "ERM", "model": "vit", "holdout_fraction": 0.2, **args}
    words |= {"test_envs": list(test), "trial_seed": trial_seed, "hparams_seed": hparams_seed}
    text = json.dumps([words, seed], sort_keys=True)
    random = np.random.default_rng(list(text.encode()))
    records = []
    for step in at:
        in_acc, out_acc = (random.integers(0, levels + 1, (2, num_domains)) / levels).tolist()
        records.append(Record(step, 0.0, {"loss": 1.0}, 0.1, 0.0, tuple(in_acc), tuple(out_acc), words, {"lr": 1e-3}))
    return records


def write_run(folder: Path, records: list[Record], finished: bool = True) -> Path:
    """Writes the files of a run that tables are made of."""
    folder.mkdir(parents=True)
    (folder / "results.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    (folder / "args.yaml").write_text(yaml.safe_dump(dict(records[0].args)))
    if finished:
        (folder / "done").write_text("done")
    return folder


def write_sweep(
    root: Path,
    *,
    num_domains: int = 3,
    trial_seeds: Sequence[int] = (0, 1, 2),
    hparams_seeds: Sequence[int] = (0, 1),
    skip: Container[tuple[tuple[int, ...], int, int]] = (),
    **args: Any,
) -> None:
    """Writes the runs that cross-validation needs, except those of (test domains, trial, hparams seed) in `skip`."""
    for test, trial, draw in product(leave_one_or_two_domains_out(num_domains), trial_seeds, hparams_seeds):
        if (test, trial, draw) not in skip:
            seeds: dict[str, Any] = {"num_domains": num_domains, "trial_seed": trial, "hparams_seed": draw}
            name = "-".join(map(str, (*args.values(), *test, trial, draw)))
            write_run(root / name, invented_records(test, **seeds, **args))


def make_record(**changes: Any) -> Record:
    """One evaluation of a run of three domains, the second held out."""
    values: dict[str, Any] = {
        "step": 300,
        "epoch": 1.5,
        "losses": {"loss": 0.5, "task_loss": 0.25},
        "step_time": 0.125,
        "mem_gb": 3.5,
        "in_acc": (0.9, 0.8, 0.7),
        "out_acc": (0.6, 0.5, 0.4),
        "args": ARGS,
        "hparams": {"lr": 5e-05, "batch_size": 32},
    }
    return Record(**{**values, **changes})
