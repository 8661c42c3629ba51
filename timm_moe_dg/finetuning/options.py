"""The options of fine-tuning: timm's names where timm has them, DomainBed's for the protocol."""

import argparse
from collections.abc import Iterable

from ..cli.arguments import json_object, key_value, non_negative, positive_int, ratio, share, whole_number
from ..data import BENCHMARKS
from ..networks.freeze import FREEZABLE
from .optimization import SCHEDULES
from .resume import AUTO

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}  # PyTorch's names -> accelerate's
_switch = argparse.BooleanOptionalAction


def add_options(parser: argparse.ArgumentParser, algorithms: Iterable[str], averagings: Iterable[str]) -> None:
    """Adds all of them.

    Args:
        parser: Of tools/finetune.py.
        algorithms: Names of the algorithms.
        averagings: Names of the ways of averaging weights.
    """
    add_data_options(parser)
    add_model_options(parser)
    add_method_options(parser, algorithms, averagings)
    add_training_options(parser)
    add_output_options(parser)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained on, what is held out, and how images reach the model."""
    add = parser.add_argument_group("data and protocol").add_argument
    add("--dataset", default="rotated_digits", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)} (%(default)s)")
    add("--data-dir", metavar="DIR", help="folder of the images, for data sets that do not come with a package")
    held_out = "positions of the domains to hold out, in their order (default: those set apart by the data, or 0)"
    add("--test-domains", "--test-envs", type=int, nargs="+", metavar="I", help=held_out)
    add("--trial-seed", type=int, default=0, metavar="N", help="repetition; decides the splits (default: 0)")
    add("--holdout-fraction", type=float, default=0.2, help="share of a domain for validation (default: %(default)s)")
    balanced = "draw every class of a domain equally often, instead of every image (default: off)"
    add("--class-balanced", action=_switch, default=False, help=balanced)
    augmented = (
        "augment the out-splits of training domains, as DomainBed does (it does so to in-splits too) (default: off)"
    )
    add("--val-augment", action=_switch, default=False, help=augmented)
    skipped = "read all images first, and leave out and count those that cannot be decoded (default: stop at the first)"
    add("--skip-unreadable", action=_switch, default=False, help=skipped)
    readers = "loader processes; 0 for none (default: %(default)s)"
    add("-j", "--workers", type=whole_number, default=2, metavar="N", help=readers)
    per_process = "images per evaluation batch and process (default: %(default)s)"
    add("--validation-batch-size", type=positive_int, default=64, metavar="N", help=per_process)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is trained, and from which weights."""
    add = parser.add_argument_group("model").add_argument
    any_model = "any timm model, such as gmoe_tiny_patch16 or its dense twin deit_tiny_patch16_224 (%(default)s)"
    add("--model", default="gmoe_small_patch16", metavar="NAME", help=any_model)
    add("--pretrained", action=_switch, default=False, help="start from published weights")
    add("--initial-checkpoint", metavar="FILE", help="start from this file; a dense one is upcycled")
    add("--num-classes", type=positive_int, metavar="N", help="size of the classifier (default: classes in the data)")
    add("--img-size", type=positive_int, metavar="PIXELS", help="side of the input (default: data set's, else model's)")
    add("--drop-path", type=share, metavar="RATE", help="stochastic depth (default: 0.1 for models that have it)")
    frozen = "backbone: draw a new classifier and train nothing else (default: train everything)"
    add("--freeze", choices=FREEZABLE, help=frozen)
    same = "the same as --freeze all-but-routers"
    add("--train-routers-only", action="store_const", const="all-but-routers", dest="freeze", help=same)
    statistics = "keep the running statistics of batch normalisation, as the papers do (default: on)"
    add("--freeze-bn", action=_switch, default=True, help=statistics)
    mode = "MoGE: which experts answer, in training and evaluation (default: %(default)s)"
    add("--expert-mode", choices=("routed", "shared"), default="routed", help=mode)
    pairs = "further model arguments, such as num_experts=4 moe_layers=(8,10)"
    add("--model-kwargs", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=pairs)


def add_method_options(parser: argparse.ArgumentParser, algorithms: Iterable[str], averagings: Iterable[str]) -> None:
    """Adds what a step minimises, and what is made of the weights."""
    add = parser.add_argument_group("method").add_argument
    add("--algorithm", default="ERM", metavar="NAME", help=f"one of {', '.join(algorithms)} (default: %(default)s)")
    averaged = f"average weights over steps: one of {', '.join(averagings)} (default: off)"
    add("--averaging", metavar="NAME", help=averaged)
    auxiliary = "weight of the routers' auxiliary loss (default: %(default)s)"
    add("--aux-coef", type=non_negative, default=0.01, help=auxiliary)
    add("--cka-coef", type=non_negative, default=0.01, help="MoGE: weight of the diversity loss (default: %(default)s)")
    tokens = "MoGE: tokens per layer and step that visit all experts for the diversity loss (default: %(default)s)"
    add("--cka-tokens", type=positive_int, default=256, metavar="N", help=tokens)
    invariance = "MoGE: weight of the invariance loss (default: %(default)s)"
    add("--supcon-coef", type=non_negative, default=0.1, help=invariance)
    add("--supcon-temperature", type=float, default=0.1, help="MoGE: temperature of that loss (default: %(default)s)")
    table = "hyper-parameters as DomainBed gives them; --lr, --weight-decay and --batch-size win over it"
    add("--hparams", type=json_object, default={}, metavar="JSON", help=table)
    add("--hparams-seed", type=int, default=0, metavar="N", help="draw hyper-parameters; 0 for defaults (default: 0)")


def add_training_options(parser: argparse.ArgumentParser) -> None:
    """Adds how long is trained, with which optimizer, and on what."""
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive_int, metavar="N", help="training steps (default: data set's)")
    add("--checkpoint-freq", type=positive_int, metavar="N", help="steps between evaluations (default: data set's)")
    per_step = "images per training domain and step, over all processes (default: data set's)"
    add("-b", "--batch-size", type=positive_int, metavar="N", help=per_step)
    parts = "parts that a step's images are cut into, to save memory (default: %(default)s)"
    add("--grad-accum-steps", type=positive_int, default=1, metavar="N", help=parts)
    add("--opt", default="adam", metavar="NAME", help="timm optimizer (default: %(default)s)")
    add("--momentum", type=share, default=0.9, help="of optimizers that have it (default: %(default)s)")
    add("--lr", type=non_negative, help="learning rate (default: data set's)")
    decayed = "of all parameters alike; with --layer-decay, not of biases and norms (default: data set's)"
    add("--weight-decay", type=non_negative, help=decayed)
    scaled = "rate of a layer over that of the one above it, such as 0.75 (default: the same rate everywhere)"
    add("--layer-decay", type=ratio, metavar="RATIO", help=scaled)
    add("--sched", choices=SCHEDULES, help="timm schedule of the learning rate (default: constant)")
    rising = "steps of rising learning rate (default: %(default)s)"
    add("--warmup-steps", type=whole_number, default=0, metavar="N", help=rising)
    add("--min-lr", type=non_negative, default=0.0, help="where a schedule ends (default: %(default)s)")
    add("--amp-dtype", choices=PRECISIONS, help="automatic mixed precision (default: off, or as accelerate is told)")
    recomputed = "compute activations again in the backward pass, to save memory (default: off)"
    add("--grad-checkpointing", action=_switch, default=False, help=recomputed)
    add("--compile", action=_switch, default=False, help="torch.compile the model, default mode (default: off)")
    add("--cpu-threads", type=positive_int, metavar="N", help="per process, on CPU (default: all cores, shared)")
    derived = "of the run (default: derived from data set, algorithm, domains, seeds)"
    add("--seed", type=whole_number, metavar="N", help=derived)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Adds what is kept, where, and what a run goes on from."""
    add = parser.add_argument_group("output").add_argument
    add("--output", default="output", metavar="DIR", help="folder of all runs (default: %(default)s)")
    add("--experiment", metavar="NAME", help="sub-folder of this run (default: time, data set, model)")
    found = "go on with the run in this folder; auto, or nothing: with --experiment, else the newest unfinished run"
    add("--resume", nargs="?", const=AUTO, metavar="auto|DIR", help=found)
    saved = "steps between checkpoints, beside those at evaluations (default: at evaluations only)"
    add("--save-freq", type=positive_int, metavar="N", help=saved)
    add("--log-tensorboard", action=_switch, default=False, help="write RUN/tensorboard/ (default: off)")
    add("--log-wandb", action=_switch, default=False, help="Weights & Biases; files in RUN/wandb/ (default: off)")
