"""The plan of a run: everything that is decided and checked before the model is built."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from timm.models import safe_model_name
from timm.optim import get_optimizer_info

from ..algorithms import Algorithm, Averaging, get_algorithm, get_averaging
from ..algorithms.hparams import LOSS_COEFFICIENTS, Hparams, draw_hparams, loss_coefficients, resolve_hparams
from ..cli.values import LOCAL
from ..data import (
    Benchmark,
    Domain,
    Split,
    drop_unreadable,
    get_benchmark,
    seed_hash,
    training_domains,
)
from ..data.bands import band_settings
from ..data.domains import listed
from ..data.inspection import Fingerprint, fingerprint, short, with_decided_values, with_readable
from ..data.splits import group_squares, hold_out, image_groups, make_splits, test_positions
from ..errors import ArgumentError, MissingDependencyError, MoeDgError
from ..protocols.evaluation import recognize
from ..protocols.options import DEFAULTS, FILLED_IN, SPLITTING, Arguments, FilledOptions, RunOptions
from ..protocols.run_identity import measured_settings, stamp
from ..storage.run_folder import RunFolder, run_arguments

_logger = logging.getLogger(__name__)
TRACKERS = ("tensorboard", "wandb")
MAX_CLASSES = 12  # in a message or table


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
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.domains[0].classes

    def training_rows(self, column: str, part: str = "inside") -> list[np.ndarray]:
        """Rows of a column of the training domains, "targets" or "metadata", in their splits."""
        splits = [(self.domains[position], self.splits[position]) for position in self.training]
        return [np.asarray(getattr(domain, column))[getattr(split, part)] for domain, split in splits]

    def reopened(self) -> "RunPlan":
        """Returns the plan with its folder examined anew, which may have been filled since."""
        return replace(self, folder=open_folder(self.options, self.folder.args))

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
    _check_method(options, method)
    for name in ("mean", "std"):
        values = vars(options)[name]
        if values and len(values) != options.in_chans:
            raise ArgumentError.of(name, values, f"give a value for each of the {options.in_chans} bands (--in-chans)")
    hparams = config_hparams(options, benchmark, method, averaging)
    coefficients = loss_coefficients(options.hparams_seed, options.trial_seed)
    measured = measured_settings(vars(options))
    metadata_columns = options.metadata_columns or ()
    domains = benchmark.read(options.data_dir, metadata_columns, options.image_bands, columns=options.columns)
    digests = fingerprint(domains)
    domains = with_decided_values(domains, options.image_bands)
    if options.skip_unreadable:
        domains, _ = drop_unreadable(domains, options.workers)
        digests = with_readable(digests, domains)
    names, test_domains = [domain.name for domain in domains], test_positions(options.test_domains, domains)
    training = training_domains(names, test_domains)
    domains = hold_out(domains, test_domains)
    filled = fill_in(options, benchmark, {**hparams, **coefficients}, domains, test_domains)
    splits = make_splits(domains, training, vars(filled), checking=True)
    _check_validated(filled, averaging, [splits[position] for position in training])
    if filled.epochs is not None:
        per_epoch = steps_per_epoch(splits, training, filled.batch_size)
        filled = replace(filled, steps=max(1, round(filled.epochs * per_epoch)))
    if filled.linear_steps > filled.steps:
        raise ArgumentError.of("linear_steps", filled.linear_steps, f"is more than the run's {filled.steps} steps")
    args = {**vars(filled), **stamp(), **measured, "data": short(digests)}
    folder = open_folder(filled, {**args, "domain_digests": digests})
    _warn_of_seen(args, domains, digests)
    kind = "photograph" if filled.split_by_photograph else "group" if filled.group_column else "random"
    facts = [[domain.role, domain.group, "official" if domain.split else kind] for domain in domains]
    sizes = [[len(split.inside), len(split.outside)] for split in splits]
    record_args = {**args, "test_envs": test_domains, "domains": names, "domain_facts": facts, "split_sizes": sizes}
    counts = class_counts(domains, splits, training)
    record_args |= most_frequent(domains, splits, int(np.argmax([row[0] for row in counts])))
    record_args |= {"reported_split": benchmark.reported_split(domains)}
    if filled.group_column:
        record_args |= {"group_squares": group_squares(splits, image_groups(domains, args) or [])}
    _check_metric(record_args, training)
    if untrained := [repr(name) for name, row in zip(domains[0].classes, counts, strict=True) if not row[0]]:
        words = f"no training image is of the classes {listed(untrained, MAX_CLASSES)}"
        _logger.warning(f"{words}: the model cannot learn them")
    return RunPlan(filled, benchmark, hparams, domains, training, splits, folder, record_args)


def most_frequent(domains: Sequence[Domain], splits: Sequence[Split], target: int) -> Arguments:
    """Returns what answering with one class would give: its name, and its images in both splits of each domain.

    Beside it are the numbers of classes in both splits and in the whole domain.
    """
    images, classes = [], []
    for domain, split in zip(domains, splits, strict=True):
        parts = [np.asarray(domain.targets, int)[rows] for rows in (split.inside, split.outside)]
        images.append([int((part == target).sum()) for part in parts])
        classes.append([len(np.unique(part)) for part in (*parts, np.concatenate(parts))])
    return {"most_frequent_class": domains[0].classes[target], "most_frequent": images, "classes_present": classes}


def _check_metric(args: Arguments, training: Sequence[int]) -> None:
    """Refuses a score over classes where a domain has one class alone, and warns of such validation images."""
    if args["metric"] == "accuracy":
        return
    names, classes = args["domains"], args["classes_present"]
    has_roles = any(role != "train" for role, *_ in args["domain_facts"])  # whose images are scored together
    alone = [name for name, (*_, whole) in zip(names, classes, strict=True) if whole == 1 and not has_roles]
    if alone:
        remedy = f"domain {alone[0]!r} has images of one class alone, whose score would be its recall; use accuracy"
        raise ArgumentError.of("metric", args["metric"], remedy)
    if alone := [names[position] for position in training if classes[position][1] == 1]:
        _logger.warning(f"metric={args['metric']!r}: the validation images of {listed(alone)} are of one class alone")


def start_arguments(args: Arguments) -> Arguments:
    """Returns the arguments of the run whose network a run starts from. Without such a run they are empty."""
    file = args["initial_checkpoint"]
    if file or args["pretrained"]:
        source = dict(args["model_kwargs"]).get("backbone") or args["model"]
        with suppress(MoeDgError):  # args.yaml of something else
            return run_arguments(f"{LOCAL}{Path(file).resolve().parent}" if file else source)
    return {}


def seen_domains(start: Arguments, domains: Sequence[Domain], digests: Fingerprint) -> list[int]:
    """Returns the positions of domains that a run was trained on, and that hold the same images as then."""
    recognized = recognize(start, domains, digests) or ()
    return [index for index, domain in enumerate(recognized) if domain.trained and not domain.changed]


def _warn_of_seen(args: Arguments, domains: Sequence[Domain], digests: Fingerprint) -> None:
    """Warns of images to test or validate on that the network at the start was trained on."""
    start = start_arguments(args)
    trained = seen_domains(start, domains, digests)
    if tested := [domains[index].name for index in trained if index in args["test_domains"]]:
        _logger.warning(f"the weights to start from were trained on {listed(tested)}, which this run holds out")
    different = [name for name in SPLITTING if args[name] != start.get(name, DEFAULTS[name])]
    if different and (validating := [domains[index].name for index in trained if index not in args["test_domains"]]):
        remark = f"images of {listed(validating)} that validate here ({', '.join(different)} differs)"
        _logger.warning(f"the weights to start from were trained on {remark}")


def class_counts(domains: Sequence[Domain], splits: Sequence[Split], training: Sequence[int]) -> np.ndarray:
    """Counts the images of each class to train on, to validate on and in held-out domains, (classes, 3)."""
    counts = np.zeros((len(domains[0].classes), 3), int)
    for index, (domain, split) in enumerate(zip(domains, splits, strict=True)):
        parts = {0: split.inside, 1: split.outside} if index in training else {2: np.arange(len(domain))}
        for column, part in parts.items():
            counts[:, column] += np.bincount(np.asarray(domain.targets, int)[part], minlength=len(counts))
    return counts


def steps_per_epoch(splits: Sequence[Split], training: Sequence[int], batch_size: int) -> float:
    """Returns the steps of an epoch: one pass over the smallest training domain, of which each step takes a batch."""
    return min(len(splits[position].inside) for position in training) / batch_size


def open_folder(options: FilledOptions, args: Arguments) -> RunFolder:
    """Opens the folder that the options name, with `args` for its args.yaml."""
    path = Path(options.output, options.experiment)
    return RunFolder(path, args, resume=options.resume is not None)


def config_hparams(
    options: RunOptions, benchmark: Benchmark, method: type[Algorithm], averaging: type[Averaging] | None
) -> Hparams:
    """Merges defaults, a random draw, --hparams and the options that name a hyper-parameter. Later ones win."""
    defaults = {**benchmark.hparams, **method.HPARAMS, **(averaging.HPARAMS if averaging else {})}
    defaults |= benchmark.swad_hparams if _follows_swad(options) else {}
    seeds = {"hparams_seed": options.hparams_seed, "trial_seed": options.trial_seed}
    drawn = {}
    if options.hparams_seed:
        drawn = draw_hparams(benchmark.search_space, **seeds, further=method.SEARCH, aliases=method.SEARCH_ALIASES)
    direct = {name: vars(options)[name] for name in defaults if vars(options).get(name) is not None}
    return resolve_hparams(defaults, drawn, {**options.hparams, **direct})


def fill_in(
    options: RunOptions,
    benchmark: Benchmark,
    rates: Mapping[str, float],
    domains: Sequence[Domain],
    test_domains: list[int],
) -> FilledOptions:
    """Fills in the open options from benchmark, hyper-parameters and coefficients of losses, data and seeds."""
    classes = len(domains[0].classes)
    identity = (options.dataset, options.algorithm, test_domains, options.hparams_seed, options.trial_seed)
    defaults: dict[str, Any] = {
        **{name: rates[name] for name in ("lr", "weight_decay", "batch_size", *LOSS_COEFFICIENTS)},
        "test_domains": test_domains,
        "steps": benchmark.steps,
        "eval_freq": benchmark.swad_checkpoint_freq if _follows_swad(options) else benchmark.checkpoint_freq,
        "eval_train": benchmark.eval_train,
        "split_by_photograph": benchmark.split_by_photograph,
        "img_size": benchmark.image_size,
        "num_classes": classes,
        "experiment": run_name(options),
        "seed": seed_hash(*identity),
    }
    open_names = [name for name in FILLED_IN if vars(options)[name] is None]
    values = {**vars(options), "test_domains": test_domains, "filled_in": sorted(open_names)}
    filled = FilledOptions(**{**values, **{name: defaults[name] for name in open_names}})
    if filled.num_classes < classes or (filled.head and filled.num_classes != classes):
        raise ArgumentError.of("num_classes", filled.num_classes, f"the data has {classes} classes")
    return filled


def run_name(options: RunOptions) -> str:
    """Makes the name of a run from the time, the data set and the model. Runs may start in the same second."""
    dataset = re.sub(r"[^\w.+-]+", "_", options.dataset)  # names from the Hub have a colon and a slash
    return "-".join([f"{datetime.now():%Y%m%d-%H%M%S-%f}", dataset, safe_model_name(options.model)])


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
    if options.freeze:
        remedies["linear_steps"] = f"leave it out, or --freeze {options.freeze}"
    if not method.TAKES_LINEAR_STEPS:
        remedies["linear_steps"] = f"{options.algorithm} moves all weights in its inner steps; leave it out"
    if options.freeze == "backbone":
        remedies["head"] = "--freeze backbone trains a new classifier; leave one out"
    if not has_frozen_trunk(options.freeze):
        remedies["cache_trunk"] = "keeps the outputs of frozen blocks; add --freeze trunk"
    elif options.cache_trunk:
        remedy = "needs pixels, and --cache-trunk keeps the outputs of blocks; leave one out"
        remedies |= dict.fromkeys(needing_pixels(vars(options)), remedy)
    for name, remedy in remedies.items():
        if vars(options)[name] != DEFAULTS[name]:
            raise ArgumentError.of(name, vars(options)[name], remedy)


def has_frozen_trunk(freeze: str | None) -> bool:
    """Whether a value of --freeze leaves blocks whose outputs never change."""
    return (freeze or "").startswith(("trunk", "backbone"))


def needing_pixels(options: Arguments) -> list[str]:
    """Names the options that change the pixels of training images."""
    method = get_algorithm(options.get("algorithm", RunOptions.algorithm))
    names = ("aa", "reprob", "val_augment", *(("algorithm",) if method.NEEDS_PIXELS else ()))
    return [name for name in names if options.get(name, DEFAULTS[name]) != DEFAULTS[name]]


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


def wanted_trackers(options: RunOptions) -> list[str]:
    """Names of the trackers that the options switch on."""
    return [name for name in TRACKERS if vars(options)[f"log_{name}"]]


def check_trackers(names: Sequence[str]) -> None:
    """Checks that trackers are installed, and that Weights & Biases has a key or is offline."""
    for name in names:
        if find_spec(name) is None:
            raise MissingDependencyError.of(f"--log-{name}", name, "tracking")
    if "wandb" in names and os.environ.get("WANDB_MODE", "online") == "online":
        import wandb

        if not wandb.api.api_key:
            remedy = "Weights & Biases has no key; set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline"
            raise ArgumentError.of("log_wandb", True, remedy)
