"""Arguments that determine a run's results: to tell settings apart, to recognize a run, to name what differs."""

import json
from collections.abc import Mapping

from ..data import Benchmark
from ..errors import ArgumentError
from .options import (
    DEFAULTS,
    DERIVED,
    DOMAINBED,
    FILLED_IN,
    IDENTITY,
    NOT_IDENTITY,
    Arguments,
    by_today_s_names,
    having,
)


def settings(args: Arguments) -> dict[str, object]:
    """Returns those of a run's arguments that are the same for all seeds and held-out domains; tables are flattened."""
    left_out = {*NOT_IDENTITY, *having(IDENTITY | DERIVED | DOMAINBED)}
    found: dict[str, object] = {}
    for name, value in by_today_s_names(args).items():
        if name not in left_out:
            found |= value if isinstance(value, Mapping) else {name: value}
    return found


def as_recorded(args: Arguments) -> dict[str, object]:
    """Returns what a run wrote down, with the defaults of options that it does not know."""
    return {**DEFAULTS, **by_today_s_names(args)}


def differences(planned: Arguments, there: Arguments, benchmark: Benchmark) -> list[str]:
    """Compares the options that a run would be started with to the arguments of one that exists.

    Args:
        planned: Options as parsed, None for those that are left to the benchmark.
        there: The arguments that the run wrote down, everything filled in.
        benchmark: What it is trained on.

    Returns:
        One phrase per option that differs.
    """
    open_ = {name: value for name, value in left_open(planned, benchmark).items() if planned[name] is None}
    there = as_recorded(there)
    return [
        f"{name}: {there[name]!r} there, {value!r} planned"
        for name, value in {**planned, **open_}.items()
        if name not in NOT_IDENTITY
        and not (value is None and name in having(FILLED_IN))
        and repr(value) != repr(there[name])  # the same without a doubt
        and comparable(value) != comparable(there[name])
    ]


def left_open(planned: Arguments, benchmark: Benchmark) -> dict[str, object]:
    """What options that are not given come to, as far as the benchmark decides them alone."""
    known: dict[str, object] = {"steps": benchmark.steps, "img_size": benchmark.image_size}
    if not str(planned["averaging"]).startswith("swad"):
        known["eval_freq"] = benchmark.checkpoint_freq
    if planned["hparams_seed"]:
        return known
    hparams = {**benchmark.hparams, **planned["hparams"]}
    return known | {name: hparams[name] for name in ("lr", "weight_decay", "batch_size")}


def comparable(value: object) -> str:
    """Text that is equal for values that mean the same: 1 and 1.0, tuples and lists, pairs and tables, empty ones."""
    if isinstance(value, list) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        value = dict(value)
    text = json.dumps(None if value in ({}, []) else value, default=str)
    return json.dumps(json.loads(text, parse_int=float), sort_keys=True)


def check_unchanged(recorded: Arguments, asked: Arguments) -> None:
    """Makes sure that a run goes on as it began.

    Args:
        recorded: The run's arguments by name; an option that it does not know had its default.
        asked: Those of the command line.

    Raises:
        ArgumentError: One that has a part in the numbers differs; the message gives the old and the new value.
    """
    there, now = (json.loads(json.dumps(by_today_s_names(arguments))) for arguments in (recorded, asked))
    for name in sorted((there.keys() | now.keys()) - NOT_IDENTITY):
        old, new = (arguments.get(name, DEFAULTS.get(name)) for arguments in (there, now))
        if old != new:
            remedy = f"the run to resume was started with {old!r}; use that, or start another run with --experiment"
            raise ArgumentError.of(name, new, remedy)
