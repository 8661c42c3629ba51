"""Options of a fine-tuning run, under timm's names, and under DomainBed's for the protocol.

Every option is declared once: its default, spellings, role, type and help are one line. Runs that were recorded without
an option count as run with its default.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Flag, auto
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Any, get_args, get_origin

from ..algorithms import ALGORITHMS, AVERAGING
from ..cli.arguments import add_options, declared, option
from ..cli.program import program
from ..cli.values import (
    folder_name,
    fraction,
    fraction_to_1,
    json_object,
    key_value,
    kilometers_or_auto,
    non_negative,
    non_negative_int,
    position_or_name,
    positive,
    positive_int,
    seed_number,
)
from ..data import BENCHMARKS
from ..data.bands import RGB
from ..losses.router import FORMS
from ..networks.freeze import FREEZABLE

Arguments = Mapping[str, Any]  # option values by name, as parsed or as read from JSON and YAML
Kind = type | UnionType | list["Kind"]  # a list stands for lists of values of its type
SCHEDULES = ("cosine", "tanh", "poly")


class Role(Flag):
    """An option's effect on a run. Options without a role are settings, which tell the rows of a table apart."""

    IDENTITY = auto()  # identifies a run among those of its setting, or follows from what does
    DATA = auto()  # determines which images there are and how they are split
    NO_EFFECT = auto()  # on results: where files are, what is logged, how the numbers are computed
    ONCE = auto()  # of one start of a run, so that repeating its args.yaml leaves it out
    MEASURED = auto()  # no option but a digest of files, which is a setting


IDENTITY, DATA, NO_EFFECT, ONCE, MEASURED = Role


# fmt: off
@dataclass(frozen=True)
class DataOptions:
    """The data set, the held-out domains, and the loading of images."""

    dataset: str = option("rotated_digits", role=IDENTITY | DATA, metavar="NAME",
        help=f"one of {', '.join(BENCHMARKS)} (%(default)s)")
    data_dir: str | None = option(None, role=NO_EFFECT | DATA, metavar="DIR",
        help="folder of the images, for data sets that do not come with a package")
    test_domains: Sequence[int | str] | None = option(None, "--test-envs", role=IDENTITY | DATA,
        type=position_or_name, nargs="+", metavar="DOMAIN",  # `make_plan` turns names into positions
        help="domains to hold out: names, positions, @I for the position I where I could be a name, or none to train "
        "on all domains (default: the test domains of the data itself, or 0)")
    trial_seed: int = option(0, role=IDENTITY | DATA, type=int,
        help="repetition, which determines the splits (default: 0)")
    holdout_fraction: float = option(0.2, role=DATA, type=float,
        help="share of a domain's images for validation (default: %(default)s)")
    split_by_photograph: bool = option(False, role=DATA,
        help="split by photograph, alike in all domains, if these show the same photographs (default: by domain)")
    metadata_columns: Sequence[str] | None = option(None, role=DATA, nargs="+", metavar="COLUMN",
        help="numeric columns of metadata.csv, each with an encoder of its own in MoGE (default: none)")
    class_balanced: bool = option(False,
        help="sample the classes of a domain equally often (default: the images)")
    val_augment: bool = option(False,
        help="augment the out-splits of training domains, as DomainBed does (default: off)")
    skip_unreadable: bool = option(False, role=DATA,
        help="read all images first, then leave out and count damaged ones (default: stop at the first)")
    in_chans: int = option(RGB, role=DATA, type=positive_int,
        help="bands of the images (default: %(default)s); other numbers than 3 need TIFF files, whose integers are "
        "divided by their type's maximum, and are augmented by crop and mirror alone")
    aa: str | None = option(None, metavar="POLICY",
        help="timm's automatic augmentation before the data set's own, such as rand-m9-mstd0.5 (default: off)")
    reprob: float = option(0.0, type=fraction, metavar="P",
        help="probability of timm's random erasing, in training (default: off)")
    mean: Sequence[float] | None = option(None, type=float, nargs="+", metavar="VALUE",
        help="mean of each channel, from 0 to 1 (default: the model's; with other than 3 bands, that of the training "
        "images)")
    std: Sequence[float] | None = option(None, type=positive, nargs="+", metavar="VALUE",
        help="standard deviation of each channel (default: likewise)")
    workers: int = option(2, "-j", role=NO_EFFECT, type=non_negative_int,
        help="loader processes; 0 for none (default: %(default)s)")
    validation_batch_size: int = option(64, type=positive_int,
        help="images per evaluation batch and process (default: %(default)s)")


@dataclass(frozen=True)
class ModelOptions:
    """The network and its initial weights."""

    model: str = option("gmoe_small_patch16", role=IDENTITY, metavar="NAME",
        help="any timm model, such as gmoe_tiny_patch16 or its dense twin deit_tiny_patch16_224 (%(default)s)")
    pretrained: bool = option(False, help="start from published weights")
    initial_checkpoint: str | None = option(None, metavar="FILE",
        help="start from this file; dense weights are upcycled")
    num_classes: int | None = option(None, role=IDENTITY, type=positive_int,
        help="size of the classifier (default: classes in the data)")
    img_size: int | None = option(None, type=positive_int, metavar="PIXELS",
        help="side of the input (default: data set's, else model's)")
    drop_path: float | None = option(None, type=fraction, metavar="RATE",
        help="stochastic depth (default: 0.1 for models that have it, none for ResNets)")
    freeze: str | None = option(None, choices=tuple(FREEZABLE), shorthand=("--train-routers-only", "all-but-routers"),
        help="part that is not trained; backbone also initializes a new classifier (default: nothing)")
    freeze_bn: bool = option(True,
        help="keep the running statistics of batch normalization, as the papers do (default: on)")
    expert_mode: str = option("routed", choices=("routed", "shared"),
        help="MoGE: experts to use, in training and evaluation (default: %(default)s)")
    coverage_radius: float | str | None = option(None, type=kilometers_or_auto, metavar="KM|auto",
        help="MoGE: in evaluation, use the shared expert alone beyond this distance from the training data; auto: "
        "the largest distance of the training domains' validation images (default: inf)")
    model_kwargs: Mapping[str, object] = option({}, type=key_value, nargs="*", metavar="KEY=VALUE",
        help="further model arguments, such as num_experts=4 'moe_layers=(8,10)'")


@dataclass(frozen=True)
class MethodOptions:
    """The training method: losses, weight averaging and hyper-parameters."""

    algorithm: str = option("ERM", role=IDENTITY, metavar="NAME",
        help=f"one of {', '.join(ALGORITHMS)} (default: %(default)s)")
    averaging: str | None = option(None, role=IDENTITY, metavar="NAME",
        help=f"average weights over steps: one of {', '.join(AVERAGING)} (default: off)")
    aux_coef: float = option(0.01, type=non_negative,
        help="weight of the routers' auxiliary loss (default: %(default)s)")
    aux_form: str = option("vmoe", choices=tuple(FORMS),
        help="form of that loss: vmoe (as in the GMoE paper) or tutel (as in its released code) (default: %(default)s)")
    cka_coef: float = option(0.01, type=non_negative, help="MoGE: weight of the diversity loss (default: %(default)s)")
    cka_tokens: int = option(256, type=positive_int,
        help="MoGE: tokens per layer and step that all experts process for the diversity loss (default: %(default)s)")
    supcon_coef: float = option(0.1, type=non_negative,
        help="MoGE: weight of the invariance loss (default: %(default)s)")
    supcon_temperature: float = option(0.1, type=float, help="MoGE: temperature of that loss (default: %(default)s)")
    label_smoothing: float = option(0.0, type=fraction,
        help="ERM: smoothing of the labels in the task loss (default: %(default)s)")
    class_weights: str | None = option(None, choices=("balanced",),
        help="ERM: weight of a class in the task loss; balanced: 1 / its number of training images (default: 1)")
    hparams: Mapping[str, float] = option({}, type=json_object, metavar="JSON",
        help="hyper-parameters under DomainBed's names; --lr, --weight-decay and --batch-size win over them")
    hparams_seed: int = option(0, role=IDENTITY, type=int,
        help="number of the random draw of hyper-parameters; 0 for their defaults (default: 0)")


@dataclass(frozen=True)
class TrainingOptions:
    """The length of training, the optimizer, and the computation."""

    steps: int | None = option(None, type=positive_int, help="training steps (default: data set's)")
    epochs: float | None = option(None, role=NO_EFFECT, type=positive,  # the steps that follow from it are recorded
        help="passes over the smallest training domain, instead of --steps")
    eval_freq: int | None = option(None, "--checkpoint-freq", type=positive_int,
        help="steps between evaluations; the other name is DomainBed's (default: data set's)")
    eval_train: bool | None = option(None, role=NO_EFFECT, action=argparse.BooleanOptionalAction,
        help="evaluate the in-splits of training domains too, as DomainBed does; takes most of the time "
        "(default: on its data sets)")
    early_stop: int | None = option(None, type=positive_int,
        help="stop after N evaluations without a better training-domain validation (default: off)")
    batch_size: int | None = option(None, "-b", role=IDENTITY, type=positive_int,
        help="images per training domain and step, over all processes (default: data set's)")
    grad_accum_steps: int = option(1, type=positive_int,
        help="parts of a step's minibatch, computed in turn to save memory (default: %(default)s)")
    opt: str = option("adam", metavar="NAME", help="timm optimizer (default: %(default)s)")
    momentum: float = option(0.9, type=fraction, help="momentum of optimizers that have it (default: %(default)s)")
    lr: float | None = option(None, role=IDENTITY, type=non_negative, help="learning rate (default: data set's)")
    weight_decay: float | None = option(None, role=IDENTITY, type=non_negative,
        help="of all parameters; with --layer-decay, of all but biases and norms (default: data set's)")
    layer_decay: float | None = option(None, type=fraction_to_1, metavar="RATIO",
        help="learning rate of a layer as a share of that of the next one, such as 0.75 (default: 1)")
    sched: str | None = option(None, choices=SCHEDULES, help="timm schedule of the learning rate (default: constant)")
    warmup_steps: int = option(0, type=non_negative_int, help="steps of rising learning rate (default: %(default)s)")
    min_lr: float = option(0.0, type=non_negative,
        help="learning rate at the end of the schedule (default: %(default)s)")
    amp_dtype: str | None = option(None, choices=("bfloat16", "float16"),
        help="automatic mixed precision (default: off, or that of accelerate launch)")
    grad_checkpointing: bool = option(False,
        help="recompute activations in the backward pass, to save memory (default: off)")
    channels_last: bool = option(False,
        help="channels-last memory format, in which ResNets are faster (default: off)")
    compile: bool = option(False, help="compile the model by torch.compile (default: off)")
    cpu_threads: int | None = option(None, role=NO_EFFECT, type=positive_int,
        help="threads of a process on CPU (default: OMP_NUM_THREADS, or else an equal share of the cores)")
    process_timeout: float = option(10.0, role=NO_EFFECT, type=positive, metavar="MINUTES",
        help="end the run if a process waits longer for another one; give more than the longest evaluation, "
        "checkpoint or reading of images takes on one process alone (default: %(default)s)")
    seed: int | None = option(None, role=IDENTITY, type=seed_number,
        help="seed of the run (default: derived from data set, algorithm, domains and seeds)")


@dataclass(frozen=True)
class OutputOptions:
    """The run folder, checkpoints and logs."""

    config: str | None = option(None, "-c", role=ONCE, metavar="YAML",
        help="file of option values; the command line wins over it")
    output: str = option("output", role=NO_EFFECT, metavar="DIR",
        help="folder of all runs (default: %(default)s)")
    experiment: str | None = option(None, role=NO_EFFECT, type=folder_name, metavar="NAME",
        help="sub-folder of this run (default: time, data set, model)")
    dry_run: bool = option(False, role=ONCE,
        help="read the data with every image, build the model, describe the run, and stop")
    check_images: bool = option(True, role=ONCE,
        help="open every image, to find and count damaged ones; dry runs alone (default: on)")
    resume: str | None = option(None, role=ONCE, nargs="?", const="auto", metavar="auto|DIR",
        help="folder of a run to resume; auto: --experiment's run, or the newest unfinished one")
    save_freq: int | None = option(None, role=NO_EFFECT, type=positive_int,
        help="steps between checkpoints beside those at evaluations (default: none)")
    log_tensorboard: bool = option(False, role=NO_EFFECT, help="write RUN/tensorboard/ (default: off)")
    log_wandb: bool = option(False, role=NO_EFFECT, help="log to Weights & Biases; files in RUN/wandb/ (default: off)")
# fmt: on


GROUPS = {
    "data and protocol": DataOptions,
    "model": ModelOptions,
    "method": MethodOptions,
    "training": TrainingOptions,
    "output": OutputOptions,
}


@dataclass(frozen=True)
class RunOptions(DataOptions, ModelOptions, MethodOptions, TrainingOptions, OutputOptions):
    """All options of a run, as parsed."""

    filled_in: Sequence[str] = ()  # names of the options that `make_plan` has filled in


@dataclass(frozen=True, kw_only=True)
class FilledOptions(RunOptions):
    """All options of a run, with those filled in that were not given; see `make_plan`."""

    test_domains: Sequence[int]
    num_classes: int
    img_size: int | None
    steps: int
    eval_freq: int
    eval_train: bool
    batch_size: int
    lr: float
    weight_decay: float
    seed: int
    experiment: str


FILLED_IN = frozenset(FilledOptions.__annotations__)
_DECLARED = declared(RunOptions)
DEFAULTS: Arguments = vars(RunOptions())
# Entries of args.yaml and of DomainBed's records that are not options
_FURTHER: Mapping[str, Role] = {
    **dict.fromkeys(("filled_in", "format", "versions", "domain_facts", "domain_digests", "split_sizes"), ONCE),
    **dict.fromkeys(("data", "weights_sha256"), MEASURED),
    **dict.fromkeys(("output_dir", "save_model_every_checkpoint", "skip_model_save"), NO_EFFECT),
}
_ROLES = {**{name: declaration.role for name, declaration in _DECLARED.items()}, **_FURTHER}
_OTHER_NAMES = {other: name for name, declaration in _DECLARED.items() for other in declaration.long_names()}


def _kind(hint: Any) -> Kind:
    """The types that JSON and YAML have for the annotated values of an option."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if get_origin(parts[0]) is Sequence:
        return [_kind(get_args(parts[0])[0])]
    kinds = {float: int | float, bool: bool | int, Mapping: dict}
    return reduce(or_, (kinds.get(get_origin(part) or part, part) for part in parts))


_WORDS = {bool: "boolean", float: "number", int: "whole number", str: "text", dict: "mapping"}
_KINDS = {item.name: _kind(item.type) for item in fields(RunOptions)}
_KINDS["hparams"] = dict | str | None  # DomainBed's records have JSON or nothing there


def _described(kind: Kind) -> str:
    """Names a type in words, such as "a list of texts"."""
    item = kind[0] if isinstance(kind, list) else kind
    types = {item, *get_args(item)} - ({int} if {bool, float} & set(get_args(item)) else set())
    words = [word for type_, word in _WORDS.items() if type_ in types]
    return " or ".join(f"a {word}" for word in words) if item is kind else f"a list of {'s or '.join(words)}s"


def fits(value: object, kind: Kind) -> bool:
    """Whether a value that was read from JSON or YAML has a type."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(item, kind[0]) for item in value)
    # To Python, True and False are whole numbers
    return isinstance(value, kind) and (not isinstance(value, bool) or bool in get_args(kind))


def mistyped(args: Arguments) -> str | None:
    """Describes the first recorded option whose value is of another type than the option's; None without one."""
    for name, value in args.items():
        kind = _KINDS.get(name)
        if kind and not fits(value, kind) and not (value is None and DEFAULTS[name] is None):
            return f"{name}={value!r:.60}: must be {_described(kind)}"
    return None


@cache
def options_with(role: Role) -> tuple[str, ...]:
    """Returns the names of the options, and of further entries of args.yaml, that have one of the roles."""
    return tuple(name for name, its_role in _ROLES.items() if its_role is not None and its_role & role)


NO_EFFECT_ON_RESULTS = frozenset(options_with(NO_EFFECT | ONCE))


def canonical_names(args: Arguments) -> Arguments:
    """Renames arguments with DomainBed's or another further spelling of an option to the option's name."""
    renamed = {_OTHER_NAMES.get(name, name): value for name, value in args.items()}
    return renamed | {name: value for name, value in args.items() if name in renamed}


def run_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Builds the command line of tools/finetune.py."""
    parser = argparse.ArgumentParser(
        prog=program("finetune.py"),
        usage="%(prog)s [options]",  # a list of all 75 options would hide the error message below it
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, group in GROUPS.items():
        add_options(parser, title, group)
    return parser
