"""Fine-tunes any timm model for domain generalization: some domains are trained on, the others only tested.

On a laptop, offline, in minutes, on real handwritten digits as six rotations:

    accelerate launch tools/finetune.py --dataset rotated_digits --model gmoe_tiny_patch16

On the same digits placed on the globe, where labels change their meaning from continent to continent:

    accelerate launch tools/finetune.py --dataset geo_digits --model moge_tiny --model-kwargs patch_size=8 depth=4 \
        embed_dim=96 moe_layers=(2,3) router_noise=0.0 metadata_drop=0.0

On a folder DATA/DOMAIN/CLASS/IMAGE, from published weights, with the second and third domain held out:

    accelerate launch tools/finetune.py --dataset folder --data-dir DATA --model gmoe_small_patch16 --pretrained \
        --test-domains 1 2

Two processes on CPU (`--cpu --num_processes 2` would start one, and is refused):

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 tools/finetune.py ...

The output folder holds args.yaml (`-c args.yaml --experiment NAME` repeats the run), results.jsonl with DomainBed's
keys, summary.csv, and best/, the model that training-domain validation selects, as a folder that timm loads:
timm.create_model("local-dir:.../best", pretrained=True).
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

# Read when torch loads its OpenMP runtime. By default idle threads spin for long, and where another program has a core
# that slows a step tenfold; this is what the runtime itself uses once it knows of too few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from timm.models import safe_model_name
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from timm_moe_dg.algorithms import ALGORITHMS, Algorithm, Setup, Training, get_algorithm
from timm_moe_dg.data import (
    BENCHMARKS,
    Benchmark,
    Domain,
    EvaluationImages,
    Split,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    evaluation_only,
    evaluation_transform,
    get_benchmark,
    seed_hash,
    split_domains,
    training_domains,
    training_loader,
    training_transform,
)
from timm_moe_dg.errors import ArgumentError, MoeDgError
from timm_moe_dg.losses import force_tokens
from timm_moe_dg.protocols import (
    Record,
    RunFolder,
    domain_accuracies,
    draw_hparams,
    freeze_backbone,
    predict,
    resolve_hparams,
    role_scores,
)
from timm_moe_dg.protocols.command_line import explain, json_object, key_value, parse_arguments, positive_int
from timm_moe_dg.protocols.freeze import FREEZABLE
from timm_moe_dg.protocols.launch import available_cpus, check_world_size
from timm_moe_dg.protocols.network import build_network, data_config, save_network
from timm_moe_dg.protocols.report import StepMeter, domain_table, summary

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line: timm's names where timm has them, DomainBed's for the protocol."""
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-c", "--config", metavar="YAML", help="file of option values; the command line overrides it")
    _add_data_options(parser.add_argument_group("data and protocol"))
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))
    group = parser.add_argument_group("output")
    group.add_argument("--output", default="output", metavar="DIR", help="folder of all runs (default: %(default)s)")
    group.add_argument("--experiment", metavar="NAME", help="sub-folder of this run (default: time, data set, model)")
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset", default="rotated_digits", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)} (%(default)s)")
    add("--data-dir", metavar="DIR", help="folder of the images, for data sets that do not come with a package")
    held_out = "positions of the domains to hold out, in their order (default: those set apart by the data, or 0)"
    add("--test-domains", "--test-envs", type=int, nargs="+", metavar="I", help=held_out)
    add("--trial-seed", type=int, default=0, metavar="N", help="repetition; decides the splits (default: 0)")
    add("--holdout-fraction", type=float, default=0.2, help="share of a domain for validation (default: %(default)s)")
    add("-j", "--workers", type=int, default=2, metavar="N", help="loader processes; 0 for none (default: %(default)s)")
    per_process = "images per evaluation batch and process (default: %(default)s)"
    add("--validation-batch-size", type=positive_int, default=64, metavar="N", help=per_process)


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    any_model = "any timm model, such as gmoe_tiny_patch16 or its dense twin deit_tiny_patch16_224 (%(default)s)"
    add("--model", default="gmoe_small_patch16", metavar="NAME", help=any_model)
    add("--pretrained", action=argparse.BooleanOptionalAction, default=False, help="start from published weights")
    add("--initial-checkpoint", metavar="FILE", help="start from this file; a dense one is upcycled")
    add("--num-classes", type=positive_int, metavar="N", help="size of the classifier (default: classes in the data)")
    add("--img-size", type=positive_int, metavar="PIXELS", help="side of the input (default: data set's, else model's)")
    add("--drop-path", type=float, metavar="RATE", help="stochastic depth (default: 0.1 for models that have it)")
    frozen = "draw a new classifier and train nothing else (default: train everything)"
    add("--freeze", choices=FREEZABLE, help=frozen)
    mode = "MoGE: which experts answer, in training and evaluation (default: %(default)s)"
    add("--expert-mode", choices=("routed", "shared"), default="routed", help=mode)
    pairs = "further model arguments, such as num_experts=4 moe_layers=(8,10)"
    add("--model-kwargs", type=key_value, nargs="*", default=[], metavar="KEY=VALUE", help=pairs)


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--algorithm", default="ERM", metavar="NAME", help=f"one of {', '.join(ALGORITHMS)} (default: %(default)s)")
    add("--aux-coef", type=float, default=0.01, help="weight of the routers' auxiliary loss (default: %(default)s)")
    add("--cka-coef", type=float, default=0.01, help="MoGE: weight of the diversity loss (default: %(default)s)")
    tokens = "MoGE: tokens per layer and step that visit all experts for the diversity loss (default: %(default)s)"
    add("--cka-tokens", type=positive_int, default=256, metavar="N", help=tokens)
    add("--supcon-coef", type=float, default=0.1, help="MoGE: weight of the invariance loss (default: %(default)s)")
    add("--supcon-temperature", type=float, default=0.1, help="MoGE: temperature of that loss (default: %(default)s)")
    add("--steps", type=positive_int, metavar="N", help="training steps (default: data set's)")
    add("--checkpoint-freq", type=positive_int, metavar="N", help="steps between evaluations (default: data set's)")
    add("--opt", default="adam", metavar="NAME", help="timm optimizer, at a constant rate (default: %(default)s)")
    add("--lr", type=float, help="learning rate (default: data set's)")
    add("--weight-decay", type=float, help="of all parameters alike (default: data set's)")
    per_step = "images per training domain and step, over all processes (default: data set's)"
    add("-b", "--batch-size", type=positive_int, metavar="N", help=per_step)
    table = "hyper-parameters as DomainBed gives them; the three options above win over it"
    add("--hparams", type=json_object, default={}, metavar="JSON", help=table)
    add("--hparams-seed", type=int, default=0, metavar="N", help="draw hyper-parameters; 0 for defaults (default: 0)")
    add("--seed", type=int, metavar="N", help="of the run (default: derived from data set, algorithm, domains, seeds)")
    add("--amp-dtype", choices=PRECISIONS, help="automatic mixed precision (default: off, or as accelerate is told)")
    add("--cpu-threads", type=positive_int, metavar="N", help="per process, on CPU (default: all cores, shared)")


@dataclass(frozen=True)
class Plan:
    """Everything about a run that is settled, and checked, before there is a model."""

    benchmark: Benchmark
    hparams: Mapping[str, float]
    domains: Sequence[Domain]
    training: Sequence[int]
    splits: Sequence[Split]
    method: type[Algorithm]
    folder: RunFolder
    record_args: Mapping[str, Any]


def make_plan(args: argparse.Namespace) -> Plan:
    """Reads the data, checks the command line against it, and fills in, in place, what was left to the benchmark."""
    benchmark = get_benchmark(args.dataset)
    method = get_algorithm(args.algorithm)
    hparams = settle_hparams(args, {**benchmark.hparams, **method.HPARAMS}, benchmark.search_space)
    domains = benchmark.read(args.data_dir)
    if args.test_domains is None:
        args.test_domains = evaluation_only(domains) or [0]
    settle_options(args, benchmark)
    args.num_classes = args.num_classes or len(domains[0].classes)
    if args.num_classes < len(domains[0].classes):
        raise ArgumentError.of("num_classes", args.num_classes, f"the data has {len(domains[0].classes)} classes")
    training = training_domains([domain.name for domain in domains], args.test_domains, evaluation_only(domains))
    splits = split_domains(domains, training, trial_seed=args.trial_seed, holdout_fraction=args.holdout_fraction)
    folder = RunFolder(Path(args.output, args.experiment), vars(args))
    record_args = {**vars(args), "test_envs": args.test_domains}
    return Plan(benchmark, hparams, domains, training, splits, method, folder, record_args)


def settle_hparams(args: argparse.Namespace, defaults: Mapping[str, float], search_space: str) -> dict[str, float]:
    """Merges defaults, random draw, --hparams and the options that name a hyper-parameter; the last of them wins."""
    seeds = {"hparams_seed": args.hparams_seed, "trial_seed": args.trial_seed}
    drawn = draw_hparams(search_space, **seeds) if args.hparams_seed else {}
    direct = {name: vars(args)[name] for name in defaults if vars(args).get(name) is not None}
    hparams = resolve_hparams(defaults, drawn, {**args.hparams, **direct})
    args.lr, args.weight_decay, args.batch_size = (hparams[name] for name in ("lr", "weight_decay", "batch_size"))
    return hparams


def settle_options(args: argparse.Namespace, benchmark: Benchmark) -> None:
    """Fills in the options whose default depends on others."""
    if args.opt not in list_optimizers():
        raise ArgumentError.of("opt", args.opt, f"choose from {', '.join(map(str, list_optimizers()))}")
    args.model_kwargs = dict(args.model_kwargs)
    args.steps = args.steps or benchmark.steps
    args.checkpoint_freq = args.checkpoint_freq or benchmark.checkpoint_freq
    args.img_size = args.img_size or benchmark.image_size
    if args.seed is None:
        args.seed = seed_hash(args.dataset, args.algorithm, args.test_domains, args.hparams_seed, args.trial_seed)
    if args.experiment is None:
        args.experiment = f"{datetime.now():%Y%m%d-%H%M%S}-{args.dataset}-{safe_model_name(args.model)}"


def start(args: argparse.Namespace) -> Accelerator:
    """Joins the other processes and says what the run has to work with."""
    accelerator = Accelerator(mixed_precision=PRECISIONS.get(args.amp_dtype))
    check_world_size(os.environ, accelerator.num_processes)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("timm_moe_dg").setLevel(logging.INFO if accelerator.is_main_process else logging.WARNING)
    if accelerator.device.type == "cpu":
        share = available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(args.cpu_threads or max(1, share))
    accelerator.print(
        f"processes {accelerator.num_processes}, device {accelerator.device}, threads {torch.get_num_threads()}, "
        f"mixed precision {accelerator.mixed_precision}, seed {args.seed}"
    )
    return accelerator


def prepare_network(args: argparse.Namespace, plan: Plan) -> nn.Module:
    """Builds the network and sets what is asked of it beyond its architecture."""
    network: Any = build_network(
        args.model,
        args.num_classes,
        pretrained=args.pretrained,
        initial_checkpoint=args.initial_checkpoint,
        img_size=args.img_size,
        drop_path=args.drop_path,
        model_kwargs=args.model_kwargs,
    )
    if args.freeze:
        freeze_backbone(network)
    if args.expert_mode != "routed":
        if not takes_metadata(network, plan):
            raise ArgumentError.of("expert_mode", args.expert_mode, f"{args.model} has no metadata-routed experts")
        network.set_expert_mode(args.expert_mode)
    force_tokens(network, args.cka_tokens if args.cka_coef else 0)
    return network


def build_algorithm(args: argparse.Namespace, plan: Plan, network: nn.Module) -> Algorithm:
    """Builds the training method around the network."""
    coefs = {name: vars(args)[name] for name in ("aux_coef", "cka_coef", "supcon_coef", "supcon_temperature")}
    return plan.method(Setup(network, len(plan.training), args.num_classes, plan.hparams, **coefs))


def takes_metadata(network: nn.Module, plan: Plan) -> bool:
    """Whether the network is to be given the images' metadata."""
    return hasattr(network, "metadata_encoder") and all(hasattr(domain, "metadata") for domain in plan.domains)


def build_loaders(
    args: argparse.Namespace, plan: Plan, config: Mapping[str, Any], accelerator: Accelerator, with_metadata: bool
) -> tuple[DataLoader, DataLoader]:
    """Returns the endless training loader, already this process's share, and the evaluation loader of everything."""
    view = {"size": config["input_size"][1:], "mean": config["mean"], "std": config["std"]}
    options = {"workers": args.workers, "pin_memory": accelerator.device.type != "cpu"}
    augmented = training_transform(plan.benchmark.augmentation, **view)
    draws = TrainingDraws(plan.domains, plan.splits, augmented, args.seed, with_metadata)
    processes = {"process": accelerator.process_index, "num_processes": accelerator.num_processes}
    sampler = StepSampler(plan.training, args.batch_size, **processes)
    images = EvaluationImages(plan.domains, plan.splits, evaluation_transform(**view), with_metadata)
    evaluation = evaluation_loader(images, batch_size=args.validation_batch_size, **options)
    return training_loader(draws, sampler, **options), evaluation


def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader, plan: Plan, meter: StepMeter, step: int
) -> Record:
    """Measures every domain and returns the record of this step; all processes take part."""
    losses, step_time = meter.take()
    predictions = predict(model, loader, accelerator.gather_for_metrics)
    in_acc, out_acc = domain_accuracies(predictions, len(plan.domains))
    steps_per_epoch = min(len(split.inside) for split in plan.splits) / plan.hparams["batch_size"]
    on_cpu = accelerator.device.type == "cpu"
    return Record(
        step=step,
        epoch=step / steps_per_epoch,
        losses={name: accelerator.reduce(value, "mean").item() for name, value in losses.items()},
        step_time=step_time,
        mem_gb=0.0 if on_cpu else torch.accelerator.max_memory_allocated() / 2**30,
        in_acc=in_acc,
        out_acc=out_acc,
        args=plan.record_args,
        hparams=plan.hparams,
        roles=role_scores(predictions, plan.domains),
    )


def finetune(args: argparse.Namespace) -> None:
    """Runs the whole of it: checks and data, then the model, then the loop."""
    plan = make_plan(args)
    accelerator = start(args)
    set_seed(args.seed)
    network = prepare_network(args, plan)
    config = data_config(network, args.img_size)
    save = partial(save_network, network, classes=plan.domains[0].classes, config=config)
    batches, evaluation = build_loaders(args, plan, config, accelerator, takes_metadata(network, plan))
    rates = {"lr": args.lr, "weight_decay": args.weight_decay}
    optimizer = create_optimizer_v2(network, args.opt, filter_bias_and_bn=False, **rates)  # one group, as DomainBed
    model, optimizer, evaluation = accelerator.prepare(network, optimizer, evaluation)
    algorithm = build_algorithm(args, plan, network).to(accelerator.device)
    training = Training(model, optimizer, accelerator.backward, partial(accelerator.reduce, reduction="mean"))

    meter = StepMeter()
    bar = tqdm(range(args.steps), desc=args.model, unit="step", disable=not accelerator.is_main_process)
    for step, minibatches in zip(bar, batches, strict=False):
        torch.manual_seed(seed_hash(args.seed, step, accelerator.process_index))  # dropout is a function of the step
        minibatches = send_to_device(minibatches, accelerator.device, non_blocking=True)
        losses = algorithm.update(training, minibatches)
        meter.add(losses)
        if step % 10 == 0:
            bar.set_postfix(loss=losses["loss"].item())
        if step % args.checkpoint_freq == 0 or step == args.steps - 1:
            record = evaluate(accelerator, model, evaluation, plan, meter, step)
            if accelerator.is_main_process:
                plan.folder.add(record, save)
                bar.write(domain_table(record, [domain.name for domain in plan.domains]))
            meter.restart()

    if accelerator.is_main_process:
        plan.folder.finish()
        print(f"selected step {plan.folder.selected.step}: {summary(plan.folder.selected)}")
        print(f"model: timm.create_model('local-dir:{plan.folder.path}/best', pretrained=True)")
    accelerator.end_training()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; a mistake in it ends with one line that names it."""
    try:
        finetune(parse_arguments(build_parser(), sys.argv[1:] if argv is None else argv))
    except MoeDgError as error:
        raise SystemExit(f"finetune.py: {explain(error)}") from error


if __name__ == "__main__":
    main()
