"""The plan of a run: everything that is decided and checked before the model is built."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from timm.models import safe_model_name
from timm.optim import get_optimizer_info

from ..algorithms import Algorithm, Averaging, get_algorithm, get_averaging
from ..algorithms.hparams import Distribution, Hparams, draw_hparams, loss_coefficients, resolve_hparams, warn_late
from ..cli.text import one_line
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
from ..data.bands import band_settings, wavelength
from ..data.domains import listed
from ..data.inspection import fingerprint, short, with_readable
from ..data.splits import NO_DOMAIN, check_groups, hold_out, image_groups, split_by_group, test_positions
from ..errors import ArgumentError
from ..networks.build import check_name
from ..protocols.evaluation import describe_role
from ..protocols.options import DEFAULTS, FILLED_IN, Arguments, FilledOptions, RunOptions
from ..protocols.run_identity import measured_settings, stamp
from ..storage.run_folder import RunFolder, warn_of_seen_images
from .optimization import check_optimizer
from .progress import check_trackers, wanted_trackers

_logger = logging.getLogger(__name__)
MAX_CLASSES = 12  # in a message or table
MAX_DOMAINS, MAX_NAME = 8, 10  # domains, and characters of a title, in the table of classes
MANY_EPOCHS = 100  # after which small data are learned by heart
_RATES = ("lr", "weight_decay", "batch_size")  # hyper-parameters that are options as well


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run."""

    options: FilledOptions
    benchmark: Benchmark
    hparams: Hparams
    domains: Sequence[Domain]
    training: Sequence[int]  # positions of the training domains
    splits: Sequence[Split]  # of each domain
    folder: RunFolder
    record_args: Arguments  # as the records hold them

    @property
    def names(self) -> list[str]:
        """Names of the domains."""
        return [domain.name for domain in self.domains]

    @property
    def validated(self) -> list[int]:
        """Positions of the training domains that have validation images. Some official splits leave a domain none."""
        return [position for position in self.training if len(self.splits[position].outside)]

    @property
    def step_domains(self) -> int:
        """Number of domains, and so of minibatches, in a step."""
        return self.benchmark.domains_per_step or len(self.training)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    def named(self, experiment: str) -> "RunPlan":
        """Returns the plan for a run of this name. Its folder is examined anew."""
        options = replace(self.options, experiment=experiment)
        args = {**self.folder.args, "experiment": experiment}
        folder = open_folder(options, args)
        return replace(self, options=options, folder=folder, record_args={**self.record_args, "experiment": experiment})

    def identity(self, **launched: object) -> dict[str, object]:
        """Returns everything that determines the numbers of a run. A resumed run has to have the same identity.

        Settings of the launcher, such as the number of processes, belong to it.
        """
        identity = {**self.record_args, "hparams": self.hparams, **launched}
        # Plain types, so that torch.load(weights_only=True) reads it from a checkpoint
        return json.loads(json.dumps(identity))


def make_plan(options: RunOptions) -> RunPlan:
    """Reads the data, checks the options against it, and fills in the open ones."""
    if options.epochs is not None and options.steps is not None:
        raise ArgumentError.of("epochs", options.epochs, f"leave it out, or --steps {options.steps}")
    options = replace(options, **band_settings(options.bands, options.in_chans))
    method = get_algorithm(options.algorithm)
    averaging = get_averaging(options.averaging) if options.averaging else None
    benchmark = get_benchmark(options.dataset)
    check_optimizer(options.opt)
    check_name(options.model)
    check_trackers(wanted_trackers(options))
    _check_method(options, method)
    for name in ("mean", "std"):
        values = vars(options)[name]
        if values and len(values) != options.in_chans:
            raise ArgumentError.of(name, values, f"give a value for each of the {options.in_chans} bands (--in-chans)")
    defaults = {**benchmark.hparams, **method.HPARAMS, **(averaging.HPARAMS if averaging else {})}
    defaults |= benchmark.swad_hparams if _follows_swad(options) else {}
    hparams = config_hparams(options, defaults, benchmark.search_space, method.SEARCH, method.SEARCH_ALIASES)
    metadata_columns = options.metadata_columns or ()
    domains = benchmark.read(options.data_dir, metadata_columns, options.image_bands, columns=options.columns)
    digests = fingerprint(domains)
    if options.skip_unreadable:
        domains, _ = drop_unreadable(domains, options.workers)
        digests = with_readable(digests, domains)
    filled = fill_in(options, benchmark, hparams, domains)
    names = [domain.name for domain in domains]
    training = training_domains(names, filled.test_domains)
    domains = hold_out(domains, filled.test_domains)
    splits = make_splits(domains, training, vars(filled), checking=True)
    _check_validated(filled, averaging, [splits[position] for position in training])
    if filled.epochs is not None:
        per_epoch = steps_per_epoch(splits, training, filled.batch_size)
        filled = replace(filled, steps=max(1, round(filled.epochs * per_epoch)))
    if filled.linear_steps > filled.steps:
        raise ArgumentError.of("linear_steps", filled.linear_steps, f"is more than the run's {filled.steps} steps")
    warn_late(hparams, filled.steps)
    args = {**vars(filled), **stamp(), **measured_settings(vars(filled)), "data": short(digests)}
    folder = open_folder(filled, {**args, "domain_digests": digests})
    warn_of_seen_images(args, domains, digests)
    kind = "photograph" if filled.split_by_photograph else "group" if filled.group_column else "random"
    kinds = ["official" if domain.split else kind for domain in domains]
    facts = [[domain.role, domain.group, kind] for domain, kind in zip(domains, kinds, strict=True)]
    sizes = [[len(split.inside), len(split.outside)] for split in splits]
    record_args = {**args, "test_envs": filled.test_domains, "domains": names, "domain_facts": facts}
    record_args["split_sizes"] = sizes
    _warn_of_untrained(domains[0].classes, class_counts(domains, splits, training))
    return RunPlan(filled, benchmark, hparams, domains, training, splits, folder, record_args)


def class_counts(domains: Sequence[Domain], splits: Sequence[Split], training: Sequence[int]) -> np.ndarray:
    """Counts the images of each class to train on, to validate on and in held-out domains, (classes, 3)."""
    counts = np.zeros((len(domains[0].classes), 3), int)
    for index, (domain, split) in enumerate(zip(domains, splits, strict=True)):
        parts = {0: split.inside, 1: split.outside} if index in training else {2: np.arange(len(domain))}
        for column, part in parts.items():
            counts[:, column] += np.bincount(np.asarray(domain.targets, int)[part], minlength=len(counts))
    return counts


def _warn_of_untrained(classes: Sequence[str], counts: np.ndarray) -> None:
    if untrained := [repr(name) for name, row in zip(classes, counts, strict=True) if not row[0]]:
        more = f" and {len(untrained) - MAX_CLASSES} more" if len(untrained) > MAX_CLASSES else ""
        listed = ", ".join(untrained[:MAX_CLASSES]) + more
        _logger.warning(f"no training image is of the classes {listed}: the model cannot learn them")


def steps_per_epoch(splits: Sequence[Split], training: Sequence[int], batch_size: int) -> float:
    """Returns the steps of an epoch: one pass over the smallest training domain, of which each step takes a batch."""
    return min(len(splits[position].inside) for position in training) / batch_size


def open_folder(options: FilledOptions, args: Arguments) -> RunFolder:
    """Opens the folder that the options name, with `args` for its args.yaml."""
    path = Path(options.output, options.experiment)
    return RunFolder(path, args, resume=options.resume is not None)


def describe(plan: RunPlan) -> str:
    """Describes a run before it starts: a table of the domains and their roles, the training, the output folder."""
    options, training = plan.options, set(plan.training)
    images = sum(len(domain) for domain in plan.domains)
    width = max(len("domain"), *map(len, plan.names))
    lines = [
        f"data: {options.dataset}, {len(plan.domains)} domains, {images} images, {len(plan.classes)} classes",
        f"  {'domain':<{width}}  {'role':<9}  in-split  out-split",
    ]
    for position, (domain, split) in enumerate(zip(plan.domains, plan.splits, strict=True)):
        role = describe_role(domain, position not in training)
        lines.append(f"  {domain.name:<{width}}  {role:<10} {len(split.inside):8}  {len(split.outside):9}")
    smallest = min(plan.training, key=lambda position: len(plan.splits[position].inside))
    per_epoch = steps_per_epoch(plan.splits, plan.training, options.batch_size)
    if options.dry_run:
        lines += _describe_classes(plan)
    if not options.image_bands.is_rgb:
        is_photograph = plan.benchmark.augmentation == "photograph"
        remark = "; augmented by crop and mirror alone, as color jitter and gray are of RGB images"
        scaled = "whole numbers scaled by their type's maximum" + (remark if is_photograph else "")
        lines.append(f"images: {options.in_chans} bands, {scaled}")
        if options.bands:
            lines.append(f"bands: {', '.join(f'{name} ({wavelength(name):g} nm)' for name in options.bands)}")
    lines += [
        f"held out: {', '.join(plan.names[position] for position in options.test_domains) or NO_DOMAIN}",
        f"training: {options.model}, {options.algorithm}; {options.steps} steps of {len(training)} x "
        f"{options.batch_size} images, evaluated every {options.eval_freq}; {per_epoch:.1f} steps are an "
        f"epoch, one pass over {plan.names[smallest]}, the smallest training domain; "
        f"{options.steps / per_epoch:.1f} epochs in all",
    ]
    if options.linear_steps:
        probed = "classifier and routers" if options.linear_routers else "classifier"
        lines.append(f"first {options.linear_steps} steps: {probed} alone")
    if options.dry_run:
        rates = f"learning rate {options.lr:g} ({options.sched or 'constant'}), weight decay {options.weight_decay:g}"
        lines += [f"optimizer: {options.opt}, {rates}", *_advise_steps(plan, per_epoch)]
    return "\n".join(map(one_line, [*lines, f"output: {plan.folder.path}"]))


def _describe_classes(plan: RunPlan) -> list[str]:
    """A table of classes by role and by domain. Of many classes the rarest in training are shown."""
    roles = class_counts(plan.domains, plan.splits, plan.training)
    by_domain = [np.bincount(np.asarray(domain.targets, int), minlength=len(roles)) for domain in plan.domains]
    counts = np.column_stack([roles, *by_domain[:MAX_DOMAINS]])
    shown = sorted(np.argsort(roles[:, 0], kind="stable")[:MAX_CLASSES].tolist())
    rows = [("class", ["training", "validation", "held out", *plan.names[:MAX_DOMAINS]])]
    rows += [(_cut(plan.classes[index], 2 * MAX_NAME), counts[index]) for index in shown]
    rows.append(("all", counts.sum(0)))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  " + "  ".join(f"{_cut(str(cell)):>{MAX_NAME}}" for cell in row) for name, row in rows]
    left_out = {"rarest of %d classes": (MAX_CLASSES, len(roles)), "first of %d domains": (MAX_DOMAINS, len(by_domain))}
    return lines + [f"  the {most} {words % count}" for words, (most, count) in left_out.items() if count > most]


def _cut(name: str, length: int = MAX_NAME) -> str:
    """A name without its middle, if it is long."""
    return name if len(name) <= length else f"{name[: length // 2 - 1]}..{name[1 - length // 2 :]}"


def _advise_steps(plan: RunPlan, per_epoch: float) -> list[str]:
    """A smaller number of steps for small data: `MANY_EPOCHS` passes, with two evaluations at least."""
    options, enough = plan.options, max(round(MANY_EPOCHS * per_epoch), plan.options.eval_freq) + 1
    if options.steps <= 2 * enough:
        return []
    advice = f"{options.steps} steps are many for so few images; --steps {enough} are {enough / per_epoch:.0f} epochs"
    return [f"{advice} (rule: {MANY_EPOCHS} epochs, and at least --eval-freq + 1 steps)"]


def make_splits(
    domains: Sequence[Domain],
    training: Sequence[int],
    args: Arguments,
    *,
    positions: Sequence[int] | None = None,
    checking: bool = False,
) -> list[Split]:
    """Splits every domain as a run with these options does; see `split_domains` and `data.splits.split_by_group`.

    With `checking`, training domains need validation images.
    """
    how = {"trial_seed": args["trial_seed"], "holdout_fraction": args.get("holdout_fraction", 0.2)}
    by_photograph = bool(args.get("split_by_photograph"))
    groups = image_groups(domains, args)
    if groups is None:
        return split_domains(domains, training if checking else [], **how, positions=positions)
    splits = split_by_group(domains, training, groups, **how, positions=positions, all_shared=by_photograph)
    if checking:
        argument = "split_by_photograph=True" if by_photograph else f"group_column={args['group_column']!r}"
        check_groups(domains, training, groups, splits, argument)
        if not by_photograph:
            _log_groups(argument, groups)
    return splits


def _log_groups(argument: str, groups: Sequence[Sequence[str]]) -> None:
    counts = Counter(name for members in groups for name in set(members))
    shared = [name for name, count in counts.items() if count > 1]
    level = logging.WARNING if shared else logging.INFO
    remark = f" ({listed(shared)}), which keep one part in all; some of their images are in no split" if shared else ""
    _logger.log(level, f"{argument}: {len(counts)} groups, {len(shared)} of them in several domains{remark}")


def config_hparams(
    options: RunOptions,
    defaults: Mapping[str, float],
    search_space: str,
    extra: Mapping[str, Distribution | str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> Hparams:
    """Merges defaults, a random draw, --hparams and the options that name a hyper-parameter. Later ones win."""
    seeds = {"hparams_seed": options.hparams_seed, "trial_seed": options.trial_seed}
    drawn = draw_hparams(search_space, **seeds, further=extra, aliases=aliases) if options.hparams_seed else {}
    direct = {name: vars(options)[name] for name in defaults if vars(options).get(name) is not None}
    return resolve_hparams(defaults, drawn, {**options.hparams, **direct})


def fill_in(
    options: RunOptions, benchmark: Benchmark, hparams: Mapping[str, float], domains: Sequence[Domain]
) -> FilledOptions:
    """Fills in the open options from benchmark, hyper-parameters, data and seeds."""
    classes = len(domains[0].classes)
    if options.test_domains is None:
        test_domains = evaluation_only(domains) or [0]
    else:
        test_domains = test_positions(options.test_domains, domains)
        options = replace(options, test_domains=test_domains)
    identity = (options.dataset, options.algorithm, test_domains, options.hparams_seed, options.trial_seed)
    defaults: dict[str, Any] = {
        **{name: hparams[name] for name in _RATES},
        **loss_coefficients(options.hparams_seed, options.trial_seed),
        "test_domains": test_domains,
        "steps": benchmark.steps,
        "eval_freq": benchmark.swad_checkpoint_freq if _follows_swad(options) else benchmark.checkpoint_freq,
        "eval_train": benchmark.eval_train,
        "split_by_photograph": benchmark.split_by_photograph,
        "img_size": benchmark.image_size,
        "num_classes": classes,
        "seed": seed_hash(*identity),
        "experiment": next((name for name in run_names(options) if not Path(options.output, name).exists()), None),
    }
    open_names = [name for name in FILLED_IN if vars(options)[name] is None]
    values = {**vars(options), **{name: defaults[name] for name in open_names}, "filled_in": sorted(open_names)}
    filled = FilledOptions(**values)
    if filled.num_classes < classes or (filled.head and filled.num_classes != classes):
        raise ArgumentError.of("num_classes", filled.num_classes, f"the data has {classes} classes")
    return filled


def run_names(options: RunOptions) -> Iterator[str]:
    """Yields the names that a run may have: --experiment, or time, data set and model, without and with a number."""
    if options.experiment is not None and "experiment" not in options.filled_in:
        yield options.experiment
        return
    time = f"{datetime.now():%Y%m%d-%H%M%S}"
    dataset = re.sub(r"[^\w.+-]+", "_", options.dataset)  # names from the Hub have a colon and a slash
    name = options.experiment or "-".join([time, dataset, safe_model_name(options.model)])
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _check_method(options: RunOptions, method: type[Algorithm]) -> None:
    """Refuses options that have no meaning for the training method, or beside other options."""
    remedies: dict[str, str] = {}
    if method.OVERRIDES_LR:
        remedy = f"{options.algorithm} sets the learning rate itself, which this would undo; leave it out"
        remedies |= dict.fromkeys(("sched", "warmup_steps", "layer_decay"), remedy)
    if not method.TAKES_TASK_LOSS:
        remedy = f"is not defined for {options.algorithm}; leave it out, or use ERM"
        remedies |= dict.fromkeys(("label_smoothing", "class_weights"), remedy)
    if not options.linear_steps:
        remedy = "has no effect without --linear-steps N; add it"
        remedies |= dict.fromkeys(("linear_lr", "linear_routers"), remedy)
    if not options.sched:
        remedies["min_lr"] = "has no effect without --sched NAME; add it"
    if not get_optimizer_info(options.opt).has_momentum:
        remedies["momentum"] = f"has no effect with --opt {options.opt}; leave it out, or take one such as sgd"
    if not options.bands:
        remedies["band_init"] = "has no effect without --bands; add it"
    if options.grad_accum_steps > 1:
        # A weighted mean divides by the weights of its own images
        remedies["class_weights"] = "each part of a step would be weighted alone; leave it out, or --grad-accum-steps"
    if options.freeze:
        remedies["linear_steps"] = f"leave it out, or --freeze {options.freeze}"
    if not method.TAKES_LINEAR_STEPS:
        remedies["linear_steps"] = f"{options.algorithm} moves all weights in its inner steps; leave it out"
    if options.freeze == "backbone":
        remedies["head"] = "--freeze backbone trains a new classifier; leave one out"
    for name, remedy in remedies.items():
        if vars(options)[name] != DEFAULTS[name]:
            raise ArgumentError.of(name, vars(options)[name], remedy)


def _check_validated(options: RunOptions, averaging: type[Averaging] | None, splits: Sequence[Split]) -> None:
    """Refuses options that need validation images of training domains, if there are none."""
    if any(len(split.outside) for split in splits):
        return
    needing = {"averaging": averaging is not None and averaging.NEEDS_VALIDATION, "early_stop": options.early_stop}
    needing |= {"coverage_radius": options.coverage_radius == "auto"}
    for name, is_needing in needing.items():
        if is_needing:
            remedy = "needs validation images, and no training domain has any; leave it out, or correct the split"
            raise ArgumentError.of(name, vars(options)[name], remedy)


def _follows_swad(options: RunOptions) -> bool:
    """Whether weights are averaged by SWAD, for which the benchmarks have their own settings."""
    return (options.averaging or "").startswith("swad")
