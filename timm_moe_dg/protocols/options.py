"""Options of a fine-tuning run, under timm's names, and under DomainBed's for the protocol.

Every option is declared once: its default, spellings, role, type and help are one line. Runs that were recorded without
an option count as run with its default.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Flag, auto
from functools import cache
from typing import Any

from ..algorithms import ALGORITHMS, AVERAGING
from ..cli.arguments import add_options, declared, option
from ..cli.tool import ToolParser, tool_parser
from ..cli.values import (
    described,
    fits,
    folder_name,
    fraction,
    fraction_to_1,
    json_object,
    key_value,
    kilometers_or_auto,
    non_negative,
    non_negative_int,
    option_kind,
    position_or_name,
    positive,
    positive_int,
    seed_number,
    text_file,
    weights_file,
)
from ..data import BENCHMARKS
from ..data.bands import RGB, Bands
from ..layers.reports import BALANCING_LOSSES
from ..metrics import METRICS
from ..networks.bands import BAND_INITS
from ..networks.freeze import FREEZABLE, frozen_part

Arguments = Mapping[str, Any]  # option values by name, as parsed or as read from JSON and YAML
SCHEDULES = ("cosine", "tanh", "poly")
FURTHER_RULES = ("oracle", "ood_worst_group", "ood_f1_macro")  # for selection, beside training-domain validation
# Options that decide which images of a domain are trained on, and which validate
SPLITTING = ("trial_seed", "holdout_fraction", "split_by_photograph", "group_column")


class Role(Flag):
    """An option's effect on a run. Options without a role are settings, which tell the rows of a table apart."""

    IDENTITY = auto()  # identifies a run among those of its setting, or follows from what does
    DATA = auto()  # determines which images there are and how they are split
    NO_EFFECT = auto()  # on results: where files are, what is logged, how the numbers are computed
    ONCE = auto()  # of one start of a run, so that repeating its args.yaml leaves it out
    MEASURED = auto()  # no option but a digest of files or the launcher's choice, which is a setting


IDENTITY, DATA, NO_EFFECT, ONCE, MEASURED = Role


VARIES = "; see --list-datasets"
# What --help shows; --help-all shows every option
MAIN = ["dataset", "data_dir", "list_datasets", "test_domains", "trial_seed", "model", "pretrained", "algorithm"]
MAIN += ["steps", "batch_size", "lr", "config", "output", "experiment", "dry_run", "resume"]


# fmt: off
@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The data set, the held-out domains, and the loading of images."""

    dataset: str = option("rotated_digits", role=IDENTITY | DATA, metavar="NAME",
        help="data set, or folder for your own images (default: %(default)s; see --list-datasets)")
    data_dir: str | None = option(None, role=NO_EFFECT | DATA, metavar="DIR",
        help="folder of the images")
    test_domains: Sequence[int | str] | None = option(None, "--test-envs", role=IDENTITY | DATA,
        type=position_or_name, nargs="+", metavar="DOMAIN",  # `make_plan` turns names into positions
        help="domains to hold out: names, positions (@0 if names are numbers), or none (default: those of the data "
        "set, else the first)")
    trial_seed: int = option(0, role=IDENTITY | DATA, type=int,
        help="repetition, with splits of its own (default: 0)")
    holdout_fraction: float = option(0.2, role=DATA, type=float,
        help="share of each domain's images for validation (default: %(default)s)")
    split_by_photograph: bool | None = option(None, role=DATA, action=argparse.BooleanOptionalAction,
        help="keep all versions of a photograph in the same split, if domains share photographs (default: on for "
        "emoji_styles, else off)")
    group_column: str | None = option(None, role=DATA, metavar="COLUMN|PATTERN",
        help="keep images of one patient, plot or scene in the same split: a column of metadata.csv, or a regular "
        r"expression over paths with a capture group, such as '(P\d+)_' (default: off)")
    columns: Mapping[str, str] = option({}, role=DATA, type=key_value, nargs="*", metavar="NAME=COLUMN",
        help="place_folder: your names of columns of metadata.csv, such as path=file label=diagnosis; names=NA,None "
        "lists words that are names, though they often stand for missing values")
    metadata_columns: Sequence[str] | None = option(None, role=DATA, nargs="+", metavar="COLUMN",
        help="MoGE: numeric columns of metadata.csv to route by, beside coordinates (default: none)")
    class_balanced: bool = option(False,
        help="draw all classes of a domain equally often (default: off)")
    val_augment: bool = option(False,
        help="augment validation images too, as DomainBed does (default: off)")
    skip_unreadable: bool = option(False, role=DATA,
        help="read all images first, and leave out damaged ones (default: stop at the first)")
    in_chans: int = option(RGB, role=DATA, type=positive_int,
        help="number of bands (default: %(default)s); values other than 3 read TIFF or PNG files, divide integers by "
        "their type's maximum, and augment by crop and mirror only")
    bands: Sequence[str] | None = option(None, role=DATA, nargs="+", metavar="BAND",
        help="names of the bands, in place of --in-chans: B02, landsat:B4, red, or nanometers such as 665")
    aa: str | None = option(None, metavar="POLICY",
        help="timm augmentation to add, such as rand-m9-mstd0.5 (default: off)")
    reprob: float = option(0.0, type=fraction, metavar="P",
        help="probability of timm's random erasing (default: off)")
    mean: Sequence[float] | None = option(None, type=float, nargs="+", metavar="VALUE",
        help="mean of each band, from 0 to 1 (default: the model's for 3 bands, else measured)")
    std: Sequence[float] | None = option(None, type=positive, nargs="+", metavar="VALUE",
        help="standard deviation of each band (default: as for --mean)")
    workers: int = option(2, "-j", role=NO_EFFECT, type=non_negative_int,
        help="processes that load images; 0 for none (default: %(default)s)")
    validation_batch_size: int = option(64, type=positive_int,
        help="images per batch in evaluation, on each process (default: %(default)s)")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The network and its initial weights."""

    model: str = option("gmoe_small_patch16", role=IDENTITY, metavar="NAME",
        help="any timm model (default: %(default)s)")
    pretrained: bool = option(False, help="start from published weights (default: off)")
    initial_checkpoint: str | None = option(None, type=weights_file, metavar="FILE|RUN",
        help="start from these weights; experts become copies of dense layers, and classes keep their rows by name")
    band_init: str = option("mean", choices=BAND_INITS,
        help="--bands: loaded kernels of bands other than red, green and blue: their mean, or zero (default: "
        "%(default)s)")
    num_classes: int | None = option(None, role=IDENTITY, type=positive_int,
        help="size of the classifier (default: classes of the data)")
    head: str | None = option(None, type=text_file, metavar="text:FILE",
        help="classify by text embeddings from a file, see examples/text_head.py (default: a linear classifier)")
    img_size: int | None = option(None, type=positive_int, metavar="PIXELS",
        help="side of the input image (default: the data set's, else the model's)")
    drop_path: float | None = option(None, type=fraction, metavar="RATE",
        help="rate of stochastic depth (default: 0.1, for ResNets 0)")
    freeze: str | None = option(None, type=frozen_part, metavar=f"{{{','.join(FREEZABLE)},trunk}}",
        shorthand=("--train-routers-only", "all-but-routers"),
        help="part to keep fixed; backbone trains a new classifier only, trunk the blocks from the first mixture on, "
        "trunk:N those from block N on (default: nothing)")
    cache_trunk: str | None = option(None, nargs="?", const="float16", choices=("float16", "float32"),
        help="with --freeze trunk or backbone: compute outputs of the frozen blocks once for all images, without "
        "augmentation, and keep them in OUTPUT/trunk-cache (default: off; without a value float16)")
    freeze_bn: bool = option(True,
        help="keep the statistics of batch normalization fixed, as the papers do (default: on)")
    expert_mode: str = option("routed", choices=("routed", "shared"),
        help="MoGE: use all experts, or the shared one only (default: %(default)s)")
    router: str | None = option(None, metavar="NAME",
        help="router of the experts: cosine, linear, random, self, or your own by --import (default: the model's)")
    coverage_radius: float | str | None = option(None, type=kilometers_or_auto, metavar="KM|auto",
        help="MoGE: beyond this distance from the training locations, use the shared expert in evaluation; auto takes "
        "the distance from validation images (default: off)")
    model_kwargs: Mapping[str, object] = option({}, type=key_value, nargs="*", metavar="KEY=VALUE",
        help="further model arguments, such as num_experts=4 'moe_layers=(8,10)'")


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """The training method: losses, weight averaging and hyper-parameters."""

    algorithm: str = option("ERM", role=IDENTITY, metavar="NAME",
        help=f"training method: {', '.join(ALGORITHMS)} (default: %(default)s)")
    averaging: str | None = option(None, role=IDENTITY, metavar="NAME",
        help=f"average of weights over steps: {', '.join(AVERAGING)} (default: off)")
    aux_coef: float | None = option(None, role=IDENTITY, type=non_negative,
        help="weight of the routers' auxiliary loss (default: 0.01, or drawn by --hparams-seed)")
    aux_form: str = option("vmoe", choices=tuple(BALANCING_LOSSES),
        help="auxiliary loss of the GMoE paper (vmoe) or of its released code (tutel; default: %(default)s)")
    z_coef: float = option(0.0, type=non_negative,
        help="weight of the routers' z-loss, such as 0.001 (default: %(default)s)")
    image_coef: float = option(0.0, type=non_negative,
        help="weight of the balance of experts within each image, such as 0.0001 (default: %(default)s)")
    domain_coef: float = option(0.0, type=non_negative,
        help="weight of the balance of experts within each domain, such as 0.01 (default: %(default)s)")
    cka_coef: float | None = option(None, role=IDENTITY, type=non_negative,
        help="MoGE: weight of the diversity loss (default: 0.01, or drawn)")
    cka_tokens: int = option(256, type=positive_int,
        help="MoGE: tokens per layer and step for the diversity loss (default: %(default)s)")
    supcon_coef: float | None = option(None, role=IDENTITY, type=non_negative,
        help="MoGE: weight of the invariance loss (default: 0.1, or drawn)")
    supcon_temperature: float | None = option(None, role=IDENTITY, type=float,
        help="MoGE: temperature of the invariance loss (default: 0.1, or drawn)")
    label_smoothing: float = option(0.0, type=fraction,
        help="ERM: label smoothing (default: %(default)s)")
    class_weights: str | None = option(None, choices=("balanced",),
        help="ERM: balanced gives rare classes more weight in the loss (default: equal weights)")
    hparams: Mapping[str, float] = option({}, type=json_object, metavar="JSON",
        help="hyper-parameters under DomainBed's names, such as '{\"irm_lambda\": 10}'")
    hparams_seed: int = option(0, role=IDENTITY, type=int,
        help="random draw of hyper-parameters; 0 takes the defaults (default: 0)")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The length of training, the optimizer, and the computation."""

    steps: int | None = option(None, type=positive_int, help=f"training steps (default: 5001{VARIES})")
    epochs: float | None = option(None, role=NO_EFFECT, type=positive,  # see `run_identity.settings`
        help="length in passes over the smallest training domain, instead of --steps")
    eval_freq: int | None = option(None, "--checkpoint-freq", type=positive_int,
        help=f"steps between evaluations (default: 300{VARIES})")
    eval_train: bool | None = option(None, role=NO_EFFECT, action=argparse.BooleanOptionalAction,
        help="also score the training images, which is slow (default: on for DomainBed's data sets, else off)")
    metric: str = option("accuracy", choices=tuple(METRICS),
        help="score that selects the step and that tables report, such as balanced_accuracy for rare classes (default: "
        "%(default)s)")
    early_stop: int | None = option(None, type=positive_int,
        help="stop after N evaluations without a better validation score (default: off)")
    batch_size: int | None = option(None, "-b", role=IDENTITY, type=positive_int,
        help=f"images per domain and step, over all processes (default: 32{VARIES})")
    grad_accum_steps: int = option(1, type=positive_int,
        help="parts of a batch that are computed in turn, to save memory (default: %(default)s)")
    linear_steps: int = option(0, type=non_negative_int, metavar="N",
        help="train only the classifier in the first N steps (default: 0)")
    linear_lr: float | None = option(None, type=non_negative, metavar="LR",
        help="learning rate of these steps (default: that of --lr)")
    linear_routers: bool = option(False, help="train routers too in these steps (default: off)")
    opt: str = option("adam", metavar="NAME", help="timm optimizer (default: %(default)s)")
    momentum: float = option(0.9, type=fraction, help="momentum of optimizers that have it (default: %(default)s)")
    lr: float | None = option(None, role=IDENTITY, type=non_negative, help=f"learning rate (default: 5e-5{VARIES})")
    weight_decay: float | None = option(None, role=IDENTITY, type=non_negative,
        help=f"weight decay; with --layer-decay, biases and norms have none (default: 0{VARIES})")
    layer_decay: float | None = option(None, type=fraction_to_1, metavar="RATIO",
        help="factor of the learning rate from each layer to the one below, such as 0.75 (default: 1)")
    sched: str | None = option(None, choices=SCHEDULES, help="schedule of the learning rate (default: constant)")
    warmup_steps: int = option(0, type=non_negative_int, help="steps of rising learning rate (default: %(default)s)")
    min_lr: float = option(0.0, type=non_negative,
        help="learning rate at the end of the schedule (default: %(default)s)")
    amp_dtype: str | None = option(None, choices=("auto", "bfloat16", "float16"),
        help="mixed precision; auto: bfloat16 on a GPU that has it (default: off, or that of accelerate launch)")
    grad_checkpointing: bool = option(False,
        help="recompute activations, to save memory (default: off)")
    channels_last: bool = option(False,
        help="memory format in which ResNets are faster (default: off)")
    compile: bool = option(False, help="compile the model by torch.compile (default: off)")
    cpu_threads: int | None = option(None, role=NO_EFFECT, type=positive_int,
        help="CPU threads of each process (default: OMP_NUM_THREADS, else an equal share of the cores)")
    process_timeout: float = option(10.0, role=NO_EFFECT, type=positive, metavar="MINUTES",
        help="stop if a process waits this long for another; must exceed the longest evaluation (default: "
        "%(default)s)")
    seed: int | None = option(None, role=IDENTITY, type=seed_number,
        help="random seed (default: derived from data set, method, domains and --trial-seed)")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The run folder, checkpoints and logs."""

    config: str | None = option(None, "-c", role=ONCE, metavar="YAML",
        help="file of option values, or name of a recipe")
    output: str = option("output", role=NO_EFFECT, metavar="DIR",
        help="folder of all runs (default: %(default)s)")
    experiment: str | None = option(None, role=NO_EFFECT, type=folder_name, metavar="NAME",
        help="name of the run (default: time, data set, model)")
    row: str | None = option(None, role=NO_EFFECT, metavar="NAME",
        help="name of the run's row in tables (default: its method, model and settings)")
    dry_run: bool = option(False, role=ONCE,
        help="check data and model, describe the run, and stop")
    check_images: bool = option(True, role=ONCE,
        help="open every image in a dry run, to find damaged ones (default: on)")
    resume: str | None = option(None, role=ONCE, nargs="?", const="auto", metavar="auto|DIR",
        help="run folder to continue; auto takes --experiment's run, or the newest unfinished one")
    save_freq: int | None = option(None, role=NO_EFFECT, type=positive_int,
        help="steps between checkpoints, beside those at evaluations (default: none)")
    save_rules: Sequence[str] | None = option(None, role=NO_EFFECT, nargs="+", choices=FURTHER_RULES, metavar="RULE",
        help=f"save networks of further selection rules in RUN/best_RULE/: {', '.join(FURTHER_RULES)} (default: none)")
    calibrate: bool = option(True, role=NO_EFFECT,
        help="fit a temperature at the end, by one more pass over images (default: on)")
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


@dataclass(frozen=True, kw_only=True)
class RunOptions(OutputOptions, TrainingOptions, MethodOptions, ModelOptions, DataOptions):  # fields of the last first
    """All options of a run, as parsed."""

    filled_in: Sequence[str] = ()  # names of the options that `make_plan` has filled in

    @property
    def image_bands(self) -> Bands:
        """The bands of the images, with the full names that `make_plan` has filled in."""
        return Bands.of(self.bands or self.in_chans)


@dataclass(frozen=True, kw_only=True)
class FilledOptions(RunOptions):
    """All options of a run, with those filled in that were not given; see `make_plan`."""

    test_domains: Sequence[int]
    split_by_photograph: bool
    num_classes: int
    img_size: int | None
    steps: int
    eval_freq: int
    eval_train: bool
    batch_size: int
    lr: float
    weight_decay: float
    aux_coef: float
    cka_coef: float
    supcon_coef: float
    supcon_temperature: float
    seed: int
    experiment: str


FILLED_IN = frozenset(FilledOptions.__annotations__)
_DECLARED = declared(RunOptions)
DEFAULTS: Arguments = vars(RunOptions())
# Entries of args.yaml and of DomainBed's records that are not options
_FURTHER: Mapping[str, Role] = {
    **dict.fromkeys(("filled_in", "format", "versions"), ONCE),
    # `data` is their digest
    **dict.fromkeys(("domains", "domain_facts", "domain_digests", "split_sizes", "reported_split"), ONCE),
    **dict.fromkeys(("most_frequent_class", "most_frequent", "classes_present", "group_squares"), ONCE),
    **dict.fromkeys(("data", "weights_sha256", "mixed_precision"), MEASURED),
    "processes": NO_EFFECT | MEASURED,  # but for `run_identity.depends_on_processes`
    **dict.fromkeys(("average_method", "average_of"), IDENTITY | ONCE),  # see tools/average.py
    **dict.fromkeys(("output_dir", "save_model_every_checkpoint", "skip_model_save"), NO_EFFECT),
}
_ROLES = {**{name: declaration.role for name, declaration in _DECLARED.items()}, **_FURTHER}
_OTHER_NAMES = {other: name for name, declaration in _DECLARED.items() for other in declaration.long_names()}


_KINDS = {item.name: option_kind(item.type) for item in fields(RunOptions)}
_KINDS["hparams"] = dict | str | None  # DomainBed's records have JSON or nothing there


def mistyped(args: Arguments) -> str | None:
    """Describes the first recorded option whose value is of another type than the option's; None without one."""
    for name, value in args.items():
        kind = _KINDS.get(name)
        if kind and not fits(value, kind) and not (value is None and DEFAULTS[name] is None):
            return f"{name}={value!r:.60}: must be {described(kind)}"
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


class _ListDatasets(argparse.Action):
    """Prints the data sets with their defaults."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from tabulate import tabulate  # of the extra train

        rows = []
        for name, row in BENCHMARKS.items():
            rates = [f"{row.hparams[rate]:g}" for rate in ("lr", "weight_decay")]
            cells = (row.steps, row.checkpoint_freq, row.hparams["batch_size"], *rates, row.image_size or "model's")
            rows.append([name, "yes" if row.takes_data_dir else "no", len(row.domains) or "-", *cells])
        headers = ("data set", "folder", "domains", "steps", "every", "batch", "lr", "decay", "size")
        table = tabulate(rows, headers, tablefmt="plain", disable_numparse=True)
        notes = "folder: needs --data-dir; every: steps between evaluations; size: side of the input in pixels\n"
        notes += "hub:OWNER/NAME is a data set of the Hugging Face Hub"
        parser._print_message(f"{table}\n{notes}\n", sys.stdout)
        parser.exit()


def run_parser(description: str | None = None) -> ToolParser:
    """Builds the command line of tools/finetune.py."""
    parser = tool_parser("finetune.py", description, main=MAIN)
    for title, table in GROUPS.items():
        add_options(parser, title, table)
        if table is DataOptions:
            words = "print all data sets with their defaults, and exit"
            parser.add_argument("--list-datasets", action=_ListDatasets, nargs=0, default=argparse.SUPPRESS, help=words)
    return parser
