"""All about a run that is decided, and checked, before there is a model."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from timm.models import safe_model_name

from ..algorithms import Algorithm, get_algorithm, get_averaging
from ..data import (
    Benchmark,
    Domain,
    Split,
    drop_unreadable,
    evaluation_only,
    get_benchmark,
    seed_hash,
    split_domains,
    training_domains,
)
from ..data.splits import split_by_photograph as by_photograph
from ..errors import ArgumentError, ProtocolError
from ..protocols.options import FILLED_IN, Arguments, FilledOptions, RunOptions
from ..protocols.run_identity import stamp
from ..protocols.search_space import Distribution, Hparams, draw_hparams, resolve_hparams
from ..storage.run_folder import RunFolder
from .optimization import check_optimizer
from .progress import TRACKERS, check_trackers

_RATES = ("lr", "weight_decay", "batch_size")  # hyper-parameters that are options as well


@dataclass(frozen=True)
class RunPlan:
    """What a run is made of.

    Attributes:
        options: As given, with everything filled in that was left open.
        benchmark: Its row.
        hparams: The hyper-parameters, resolved.
        domains: All domains of the benchmark.
        training: Positions of those that are trained on.
        splits: One per domain.
        folder: Where the run writes, or goes on.
        record_args: Arguments as the records keep them.
    """

    options: FilledOptions
    benchmark: Benchmark
    hparams: Hparams
    domains: Sequence[Domain]
    training: Sequence[int]
    splits: Sequence[Split]
    folder: RunFolder
    record_args: Arguments

    @property
    def names(self) -> list[str]:
        """Names of the domains."""
        return [domain.name for domain in self.domains]

    @property
    def step_domains(self) -> int:
        """How many domains, and so minibatches, a step has."""
        return self.benchmark.domains_per_step or len(self.training)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    def named(self, experiment: str) -> "RunPlan":
        """Returns the plan for a run of this name; its folder is looked at anew, see `RunFolder` for its errors."""
        options = replace(self.options, experiment=experiment)
        args = {**self.folder.args, "experiment": experiment}
        folder = open_folder(options, args)
        return replace(self, options=options, folder=folder, record_args={**self.record_args, "experiment": experiment})

    def identity(self, **launched: object) -> dict[str, object]:
        """Returns all that the numbers of a run follow from; a resumed run has to have the same.

        Args:
            **launched: What the launcher decides, such as the number of processes.
        """
        data = [(domain.name, domain.classes, np.asarray(domain.targets).tolist()) for domain in self.domains]
        return {**self.record_args, "hparams": self.hparams, "data": seed_hash(data), **launched}


def make_plan(options: RunOptions) -> RunPlan:
    """Reads the data, checks the options against it, and fills in what was left open.

    Raises:
        ArgumentError: An option has a value that cannot work.
        DataError: The data cannot be used.
        MissingDependencyError: A tracker is not installed.
        ProtocolError: Domains or splits leave nothing to train on or to evaluate.
    """
    if options.epochs is not None and options.steps is not None:
        raise ArgumentError.of("epochs", options.epochs, f"leave it out, or --steps {options.steps}")
    method = get_algorithm(options.algorithm)
    averaging = get_averaging(options.averaging) if options.averaging else None
    benchmark = get_benchmark(options.dataset)
    check_optimizer(options.opt)
    check_trackers(wanted_trackers(options))
    _check_rate(options, method)
    _check_task_loss(options, method)
    _check_channels(options)
    defaults = {**benchmark.hparams, **method.HPARAMS, **(averaging.HPARAMS if averaging else {})}
    defaults |= benchmark.swad_hparams if _follows_swad(options) else {}
    hparams = config_hparams(options, defaults, benchmark.search_space, method.SEARCH, method.SEARCH_ALIASES)
    domains = benchmark.read(options.data_dir, options.metadata_columns or (), options.in_chans)
    if options.skip_unreadable:
        domains, _ = drop_unreadable(domains, options.workers)
    filled = fill_in(options, benchmark, hparams, domains)
    names = [domain.name for domain in domains]
    training = training_domains(names, filled.test_domains, evaluation_only(domains))
    splits = make_splits(
        domains,
        training,
        trial_seed=filled.trial_seed,
        holdout_fraction=filled.holdout_fraction,
        split_by_photograph=filled.split_by_photograph,
    )
    if filled.epochs is not None:
        smallest = min(len(splits[position].inside) for position in training)
        filled = replace(filled, steps=max(1, round(filled.epochs * smallest / filled.batch_size)))
    args = {**vars(filled), **stamp()}
    folder = open_folder(filled, args)
    facts = [[domain.role, domain.group, _way_of_splitting(filled, domain)] for domain in domains]
    record_args = {**args, "test_envs": filled.test_domains, "domains": names, "domain_facts": facts}
    return RunPlan(filled, benchmark, hparams, domains, training, splits, folder, record_args)


def open_folder(options: FilledOptions, args: Arguments) -> RunFolder:
    """Opens the folder that the options name, with `args` for its args.yaml; see `RunFolder`."""
    path = Path(options.output, options.experiment)
    return RunFolder(path, args, resume=options.resume is not None, verify=options.verify)


def make_splits(
    domains: Sequence[Domain],
    training: Sequence[int],
    *,
    trial_seed: int,
    holdout_fraction: float,
    split_by_photograph: bool,
) -> list[Split]:
    """Splits every domain as a run's options say; see `split_domains` and `data.splits.split_by_photograph`.

    Raises:
        ProtocolError: They leave a domain nothing to train on or to validate on.
    """
    if split_by_photograph:
        return by_photograph(domains, training)
    return split_domains(domains, training, trial_seed=trial_seed, holdout_fraction=holdout_fraction)


def _way_of_splitting(options: RunOptions, domain: Domain) -> str:
    """Names what `make_splits` does with a domain, for whoever reads the records."""
    if options.split_by_photograph:
        return "photograph"
    return "random" if domain.split is None else "official"


def config_hparams(
    options: RunOptions,
    defaults: Mapping[str, float],
    search_space: str,
    extra: Mapping[str, Distribution | str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Hparams:
    """Merges defaults, random draw, --hparams and the options that name a hyper-parameter; the last of them wins.

    Args:
        options: Of the run.
        defaults: Every hyper-parameter there is.
        search_space: The benchmark's.
        extra: What is drawn besides.
        aliases: Other names under which something is drawn.
    """
    seeds = {"hparams_seed": options.hparams_seed, "trial_seed": options.trial_seed}
    drawn = draw_hparams(search_space, **seeds, further=extra, aliases=aliases) if options.hparams_seed else {}
    direct = {name: vars(options)[name] for name in defaults if vars(options).get(name) is not None}
    return resolve_hparams(defaults, drawn, {**options.hparams, **direct})


def fill_in(
    options: RunOptions, benchmark: Benchmark, hparams: Mapping[str, float], domains: Sequence[Domain]
) -> FilledOptions:
    """Returns the options with those filled in that follow from benchmark, hyper-parameters, data and seeds.

    Raises:
        ArgumentError: The classifier is smaller than the data needs.
    """
    classes = len(domains[0].classes)
    if options.test_domains is None:
        test_domains = evaluation_only(domains) or [0]
    else:
        test_domains = domain_positions(options.test_domains, [domain.name for domain in domains])
        options = replace(options, test_domains=test_domains)
    identity = (options.dataset, options.algorithm, test_domains, options.hparams_seed, options.trial_seed)
    found: dict[str, Any] = {
        **{name: hparams[name] for name in _RATES},
        "test_domains": test_domains,
        "steps": benchmark.steps,
        "eval_freq": benchmark.swad_checkpoint_freq if _follows_swad(options) else benchmark.checkpoint_freq,
        "eval_train": benchmark.eval_train,
        "img_size": benchmark.image_size,
        "num_classes": classes,
        "seed": seed_hash(*identity),
        "experiment": next((name for name in run_names(options) if not Path(options.output, name).exists()), None),
    }
    open_ = [name for name in FILLED_IN if vars(options)[name] is None]
    values = {**vars(options), **{name: found[name] for name in open_}, "filled_in": sorted(open_)}
    filled = FilledOptions(**values)
    if filled.num_classes < classes:
        raise ArgumentError.of("num_classes", filled.num_classes, f"the data has {classes} classes")
    return filled


def run_names(options: RunOptions) -> Iterator[str]:
    """Yields the names that a run may have: --experiment, or else time, data set and model, and these with numbers."""
    if options.experiment is not None and "experiment" not in options.filled_in:
        yield options.experiment
        return
    time = f"{datetime.now():%Y%m%d-%H%M%S}"
    name = options.experiment or "-".join([time, _folder_name(options.dataset), safe_model_name(options.model)])
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def domain_positions(given: Sequence[int | str], names: Sequence[str], argument: str = "test_domains") -> list[int]:
    """Finds domains by name; whole numbers are positions, unless they are names and no positions.

    Args:
        given: Names or positions; positions that there are not are left to the caller.
        names: Of all domains.
        argument: What is found fault with.

    Raises:
        ProtocolError: A name is unknown, or stands beside positions.
    """
    positions = [one for one in given if isinstance(one, int)]
    if len(positions) == len(given) and set(positions) <= set(range(len(names))):
        return positions
    words = list(map(str, given))
    if set(words) <= set(names):
        return [names.index(word) for word in words]
    if len(positions) == len(given):
        return positions  # which `training_domains` refuses
    listing = ", ".join(f"{position} {name}" for position, name in enumerate(names))
    if positions:
        raise ProtocolError.of(argument, list(given), f"give names or positions, not both, out of: {listing}")
    unknown = ", ".join(word for word in words if word not in names)
    raise ProtocolError.of(argument, list(given), f"no domain is called {unknown}; choose from: {listing}")


def wanted_trackers(options: RunOptions) -> list[str]:
    """Names of the trackers that the options switch on."""
    return [name for name in TRACKERS if vars(options)[f"log_{name}"]]


def _check_rate(options: RunOptions, method: type[Algorithm]) -> None:
    """Leaves the learning rate to one of the options and the algorithm."""
    for name in ("sched", "warmup_steps", "layer_decay") if method.OVERRIDES_LR else ():
        if vars(options)[name]:
            remedy = f"{options.algorithm} sets the learning rate itself, which this would undo; leave it out"
            raise ArgumentError.of(name, vars(options)[name], remedy)


def _check_task_loss(options: RunOptions, method: type[Algorithm]) -> None:
    """Leaves smoothed labels and weighted classes to the methods whose task loss knows them."""
    for name in ("label_smoothing", "class_weights") if not method.TAKES_TASK_LOSS else ():
        if vars(options)[name]:
            remedy = f"is not defined for {options.algorithm}; leave it out, or use ERM"
            raise ArgumentError.of(name, vars(options)[name], remedy)


def _check_channels(options: RunOptions) -> None:
    for name in ("mean", "std"):
        values = vars(options)[name]
        if values and len(values) != options.in_chans:
            raise ArgumentError.of(name, values, f"give a value for each of the {options.in_chans} bands (--in-chans)")


def _follows_swad(options: RunOptions) -> bool:
    """Whether weights are averaged as SWAD does, for which the benchmarks have settings of their own."""
    return (options.averaging or "").startswith("swad")


def _folder_name(dataset: str) -> str:
    """A data set's name as part of a folder's: those of the Hub have a colon and a slash."""
    return re.sub(r"[^\w.+-]+", "_", dataset)
