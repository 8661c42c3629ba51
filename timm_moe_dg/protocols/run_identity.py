"""What of a run's arguments decides its numbers, to tell settings apart and name what differs."""

import json
from collections.abc import Mapping
from typing import Any

from ..data import Benchmark
from ..errors import ArgumentError

# What has no part in the numbers. Moved data is recognised by its content, see `Plan.identity` in run_plan.py
_PLACES = ("config", "data_dir", "experiment", "filled_in", "output", "resume")
_MEANS = ("cpu_threads", "log_tensorboard", "log_wandb", "save_freq", "workers")
FREE = frozenset((*_PLACES, *_MEANS))
IDENTITY = ("dataset", "algorithm", "averaging", "model", "test_domains", "test_envs", "trial_seed", "hparams_seed")
DERIVED = ("seed", "num_classes", "lr", "weight_decay", "batch_size")  # from the seeds and the data
# By finetune.py where they are not given; args.yaml names those that were
FILLED_IN = (*DERIVED, "test_domains", "img_size", "steps", "checkpoint_freq", "experiment")
DOMAINBED = ("output_dir", "save_model_every_checkpoint", "skip_model_save")  # where DomainBed puts things


def settings(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of a run's arguments that are the same for all seeds and held-out domains; tables are flattened."""
    left_out = {*FREE, *IDENTITY, *DERIVED, *DOMAINBED}
    found: dict[str, Any] = {}
    for name, value in args.items():
        if name not in left_out:
            found |= value if isinstance(value, Mapping) else {name: value}
    return found


def differences(
    planned: Mapping[str, Any], there: Mapping[str, Any], defaults: Mapping[str, Any], benchmark: Benchmark
) -> list[str]:
    """Compares the options that a run would be started with to the arguments of one that exists.

    Args:
        planned: Options as parsed, None for those that are left to the benchmark.
        there: The arguments that the run wrote down, everything filled in.
        defaults: What options have that are not given, and that an older run does not know.
        benchmark: What it is trained on.

    Returns:
        One phrase per option that differs.
    """
    filled = {
        **planned,
        **{name: value for name, value in left_open(planned, benchmark).items() if planned[name] is None},
    }
    there = {**defaults, **there}
    return [
        f"{name}: {there[name]!r} there, {value!r} planned"
        for name, value in filled.items()
        if name not in FREE
        and not (value is None and name in FILLED_IN)
        and comparable(value) != comparable(there[name])
    ]


def left_open(planned: Mapping[str, Any], benchmark: Benchmark) -> dict[str, Any]:
    """What options that are not given come to, as far as the benchmark decides them alone."""
    known: dict[str, Any] = {"steps": benchmark.steps, "img_size": benchmark.image_size}
    if not str(planned["averaging"]).startswith("swad"):
        known["checkpoint_freq"] = benchmark.checkpoint_freq
    if planned["hparams_seed"]:
        return known
    hparams = {**benchmark.hparams, **planned["hparams"]}
    return known | {name: hparams[name] for name in ("lr", "weight_decay", "batch_size")}


def comparable(value: Any) -> str:
    """Text that is equal for values that mean the same: 1 and 1.0, tuples and lists, pairs and tables, empty ones."""
    if isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        value = dict(value)
    text = json.dumps(None if value in ({}, []) else value, default=str)
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


def check_unchanged(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Makes sure that a run goes on as it began.

    Args:
        recorded: The run's arguments by name.
        asked: Those of the command line.

    Raises:
        ArgumentError: One that has a part in the numbers differs; the message gives the old and the new value.
    """
    recorded, asked = (json.loads(json.dumps(dict(arguments))) for arguments in (recorded, asked))
    for name in sorted((recorded.keys() | asked.keys()) - FREE):
        old, new = recorded.get(name), asked.get(name)
        if old != new:
            remedy = f"the run to resume was started with {old!r}; use that, or start another run with --experiment"
            raise ArgumentError.of(name, new, remedy)
