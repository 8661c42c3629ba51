"""All about a run that is settled, and checked, before there is a model."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from timm.models import safe_model_name

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
from ..errors import ArgumentError
from ..protocols.run_identity import FILLED_IN
from ..protocols.search_space import draw_hparams, resolve_hparams
from ..storage.run_folder import RunFolder
from .optimization import check_optimizer

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Plan:
    """What a run is made of.

    Attributes:
        benchmark: Its row.
        hparams: The hyper-parameters, resolved.
        domains: All domains of the benchmark.
        training: Positions of those that are trained on.
        splits: One per domain.
        folder: Where the run writes, or goes on.
        record_args: Arguments as the records keep them.
    """

    benchmark: Benchmark
    hparams: Mapping[str, float]
    domains: Sequence[Domain]
    training: Sequence[int]
    splits: Sequence[Split]
    folder: RunFolder
    record_args: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """Names of the domains."""
        return [domain.name for domain in self.domains]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    def identity(self, **launched: Any) -> dict[str, Any]:
        """Returns all that the numbers of a run follow from; a resumed run has to have the same.

        Args:
            **launched: What the launcher decides, such as the number of processes.
        """
        data = [(domain.name, domain.classes, [int(target) for target in domain.targets]) for domain in self.domains]
        return {**self.record_args, "hparams": self.hparams, "data": seed_hash(data), **launched}


def make_plan(args: argparse.Namespace, method: Any, averaging: Any = None) -> Plan:
    """Reads the data, checks the command line against it, and fills in, in place, what was left to the benchmark.

    Args:
        args: Of tools/finetune.py.
        method: The class of the algorithm, which has HPARAMS, SEARCH, SEARCH_ALIASES and OVERRIDES_LR.
        averaging: The class of the weight averaging, which has HPARAMS, if there is any.

    Raises:
        ArgumentError: An option has a value that cannot work.
        DataError: The data cannot be used.
        ProtocolError: Domains or splits leave nothing to train on or to evaluate.
    """
    args.filled_in = [name for name in FILLED_IN if vars(args).get(name) is None]
    benchmark = get_benchmark(args.dataset)
    check_optimizer(args.opt)
    _check_rate(args, method)
    defaults = {**benchmark.hparams, **method.HPARAMS, **(averaging.HPARAMS if averaging else {})}
    defaults |= benchmark.swad_hparams if _follows_swad(args) else {}
    hparams = settle_hparams(args, defaults, benchmark.search_space, method.SEARCH, method.SEARCH_ALIASES)
    domains = _readable(args, benchmark.read(args.data_dir))
    if args.test_domains is None:
        args.test_domains = evaluation_only(domains) or [0]
    settle_options(args, benchmark)
    args.num_classes = args.num_classes or len(domains[0].classes)
    if args.num_classes < len(domains[0].classes):
        raise ArgumentError.of("num_classes", args.num_classes, f"the data has {len(domains[0].classes)} classes")
    training = training_domains([domain.name for domain in domains], args.test_domains, evaluation_only(domains))
    splits = split_domains(domains, training, trial_seed=args.trial_seed, holdout_fraction=args.holdout_fraction)
    folder = RunFolder(Path(args.output, args.experiment), vars(args), resume=args.resume is not None)
    names = [domain.name for domain in domains]
    record_args = {**vars(args), "test_envs": args.test_domains, "domains": names}
    return Plan(benchmark, hparams, domains, training, splits, folder, record_args)


def settle_hparams(
    args: argparse.Namespace,
    defaults: Mapping[str, float],
    search_space: str,
    further: Mapping[str, Any] = _NOTHING,
    drawn_as: Mapping[str, str] = _NOTHING,
) -> dict[str, float]:
    """Merges defaults, random draw, --hparams and the options that name a hyper-parameter; the last of them wins.

    Args:
        args: Its `lr`, `weight_decay` and `batch_size` are filled in.
        defaults: Every hyper-parameter there is.
        search_space: The benchmark's.
        further: What is drawn besides.
        drawn_as: Other names under which something is drawn.
    """
    seeds = {"hparams_seed": args.hparams_seed, "trial_seed": args.trial_seed}
    drawn = draw_hparams(search_space, **seeds, further=further, aliases=drawn_as) if args.hparams_seed else {}
    direct = {name: vars(args)[name] for name in defaults if vars(args).get(name) is not None}
    hparams = resolve_hparams(defaults, drawn, {**args.hparams, **direct})
    args.lr, args.weight_decay, args.batch_size = (hparams[name] for name in ("lr", "weight_decay", "batch_size"))
    return hparams


def settle_options(args: argparse.Namespace, benchmark: Benchmark) -> None:
    """Fills in the options whose default depends on others."""
    args.model_kwargs = dict(args.model_kwargs)
    args.steps = args.steps or benchmark.steps
    frequency = benchmark.swad_checkpoint_freq if _follows_swad(args) else benchmark.checkpoint_freq
    args.checkpoint_freq = args.checkpoint_freq or frequency
    args.img_size = args.img_size or benchmark.image_size
    if args.seed is None:
        args.seed = seed_hash(args.dataset, args.algorithm, args.test_domains, args.hparams_seed, args.trial_seed)
    if args.experiment is None:
        args.experiment = f"{datetime.now():%Y%m%d-%H%M%S}-{args.dataset}-{safe_model_name(args.model)}"


def _check_rate(args: argparse.Namespace, method: Any) -> None:
    """Leaves the learning rate to one of the options and the algorithm."""
    for name in ("sched", "warmup_steps", "layer_decay") if method.OVERRIDES_LR else ():
        if vars(args)[name]:
            remedy = f"{args.algorithm} sets the learning rate itself, which this would undo; leave it out"
            raise ArgumentError.of(name, vars(args)[name], remedy)


def _follows_swad(args: argparse.Namespace) -> bool:
    """Whether weights are averaged as SWAD does, for which the benchmarks have settings of their own."""
    return (args.averaging or "").startswith("swad")


def _readable(args: argparse.Namespace, domains: Sequence[Domain]) -> Sequence[Domain]:
    return drop_unreadable(domains, args.workers)[0] if args.skip_unreadable else domains
