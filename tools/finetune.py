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

The output folder holds args.yaml (`-c args.yaml` repeats the run, and with --trial-seed 1 the experiment: what followed
from data set and seeds follows anew), results.jsonl with DomainBed's keys, summary.csv, learning_curves.png,
checkpoints/ while the run is unfinished, and two folders that timm loads with
timm.create_model("local-dir:.../best", pretrained=True): best/, the network that training-domain validation selects,
and best_oracle/, that of the last evaluation, which test-domain validation looks at.

A run that was ended, by a signal or by a power failure, goes on where its newest checkpoint was written:

    accelerate launch tools/finetune.py --resume output/NAME

On SIGTERM it writes one at the end of the running step and exits with status 143.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

# Read when torch loads its OpenMP runtime. By default idle threads spin for long, and where another program has a core
# that slows a step tenfold; this is what the runtime itself uses once it knows of too few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device, set_seed
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from timm_moe_dg.algorithms import (
    ALGORITHMS,
    AVERAGING,
    Algorithm,
    Averaging,
    Setup,
    StepContext,
    get_algorithm,
    get_averaging,
)
from timm_moe_dg.analysis.curves import draw_learning_curves
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.data import seed_hash
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.divergence import DivergenceCheck, with_weights
from timm_moe_dg.finetuning.interruption import EXIT_CODE, Interrupted, Interruption
from timm_moe_dg.finetuning.launch import available_cpus, check_launch, set_up_logging
from timm_moe_dg.finetuning.loaders import build_loaders
from timm_moe_dg.finetuning.optimization import build_optimizer, build_schedule
from timm_moe_dg.finetuning.options import PRECISIONS, add_options
from timm_moe_dg.finetuning.plan import Plan, make_plan
from timm_moe_dg.finetuning.progress import StepMeter, domain_table, summary
from timm_moe_dg.finetuning.resume import is_finished, parse_resumable
from timm_moe_dg.finetuning.trackers import TRACKERS, Trackers
from timm_moe_dg.losses import force_tokens
from timm_moe_dg.networks.build import build_network, checkpoint_activations, data_config, save_network
from timm_moe_dg.networks.freeze import FREEZABLE, freeze_batch_norm
from timm_moe_dg.networks.trained import takes_metadata
from timm_moe_dg.protocols import Record, domain_accuracies, out_losses, predict, role_scores
from timm_moe_dg.protocols.run_identity import check_unchanged
from timm_moe_dg.storage.checkpoint import TrainingState
from timm_moe_dg.storage.run_folder import summary_row

SHOWN_EVERY = 10  # steps; showing the loss waits for the device


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="finetune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-c", "--config", metavar="YAML", help="file of option values; the command line overrides it")
    add_options(parser, ALGORITHMS, AVERAGING)
    return parser


def start(args: argparse.Namespace) -> Accelerator:
    """Joins the other processes and says what the run has to work with."""
    accelerator = Accelerator(mixed_precision=PRECISIONS.get(args.amp_dtype))
    check_launch(accelerator)
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
    dropout = plan.hparams.get("resnet_dropout")  # DomainBed's name for that of any featurizer
    network: Any = build_network(
        args.model,
        args.num_classes,
        pretrained=args.pretrained,
        initial_checkpoint=args.initial_checkpoint,
        img_size=args.img_size,
        drop_path=args.drop_path,
        model_kwargs={**({"drop_rate": dropout} if dropout else {}), **args.model_kwargs},
    )
    if args.freeze:
        FREEZABLE[args.freeze](network)
    routes = hasattr(network, "set_expert_mode") and takes_metadata(network, plan.domains)
    if args.expert_mode != "routed" and not routes:
        raise ArgumentError.of("expert_mode", args.expert_mode, f"{args.model} has no metadata-routed experts")
    if hasattr(network, "set_expert_mode"):  # without metadata the shared expert answers alone, and is saved as such
        network.set_expert_mode(args.expert_mode if routes else "shared")
    force_tokens(network, args.cka_tokens if args.cka_coef else 0)
    if args.grad_checkpointing:
        checkpoint_activations(network)
    if args.freeze_bn:
        freeze_batch_norm(network)
    return network


@dataclass(frozen=True)
class Run:
    """What the loop works with."""

    accelerator: Accelerator
    plan: Plan
    network: nn.Module
    training: StepContext
    algorithm: Algorithm
    schedule: Scheduler | None
    averaging: Averaging | None
    batches: DataLoader
    evaluation: DataLoader
    meter: StepMeter
    state: TrainingState
    identity: Mapping[str, Any]
    first_step: int
    trackers: Trackers
    save: Callable[[nn.Module, Path], None]


def assemble(args: argparse.Namespace, plan: Plan, accelerator: Accelerator) -> Run:
    """Builds everything, and puts it where the newest checkpoint left it if the run is resumed."""
    checkpoint = plan.folder.newest_checkpoint()
    launched = {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
    facts = plan.identity(**launched)
    if checkpoint is not None:
        check_unchanged(checkpoint["identity"], facts)
    first_step = 0 if checkpoint is None else checkpoint["step"] + 1
    logged = [name for name in TRACKERS if vars(args)[f"log_{name}"] and accelerator.is_main_process]
    trackers = Trackers(logged, plan.folder.path, vars(args), first_step)

    set_seed(args.seed)
    network = prepare_network(args, plan).to(accelerator.device)
    config = data_config(network, args.img_size)
    batches, evaluation = build_loaders(
        args,
        plan,
        config,
        with_metadata=takes_metadata(network, plan.domains),
        first_step=first_step,
        process=accelerator.process_index,
        num_processes=accelerator.num_processes,
        pin_memory=accelerator.device.type != "cpu",
    )
    # Before the algorithm, whose hooks on the network are none of the copy's business
    averaging = get_averaging(args.averaging)(network, plan.hparams) if args.averaging else None
    coefs = {name: vars(args)[name] for name in ("aux_coef", "cka_coef", "supcon_coef", "supcon_temperature")}
    setup = Setup(network, len(plan.training), args.num_classes, plan.hparams, **coefs)
    algorithm = get_algorithm(args.algorithm)(setup).to(accelerator.device)
    optimizer, schedule = optimization(args, network, algorithm)
    if args.compile:
        network.compile()
    model, optimizer, evaluation = accelerator.prepare(network, optimizer, evaluation)

    mean = partial(accelerator.reduce, reduction="mean")
    training = StepContext(model, optimizer, accelerator.backward, mean, args.grad_accum_steps, accelerator.autocast)
    meter = StepMeter(images_per_step=args.batch_size * len(plan.training))
    shared = {"network": network, "optimizer": optimizer, "scaler": accelerator.scaler, "averaging": averaging}
    state = TrainingState(
        shared={name: part for name, part in shared.items() if part is not None},
        own={"algorithm": algorithm, "meter": meter},
        gather=lambda own: gather_object(send_to_device(own, "cpu")),  # others' accelerators are no place for it
        process=accelerator.process_index,
    )
    if checkpoint is not None:
        restore(checkpoint, state, plan, accelerator)
    return Run(
        accelerator=accelerator,
        plan=plan,
        network=network,
        training=training,
        algorithm=algorithm,
        schedule=schedule,
        averaging=averaging,
        batches=batches,
        evaluation=evaluation,
        meter=meter,
        state=state,
        identity=facts,
        first_step=first_step,
        trackers=trackers,
        save=partial(save_network, classes=plan.classes, config=config),
    )


def optimization(
    args: argparse.Namespace, network: nn.Module, algorithm: Algorithm
) -> tuple[torch.optim.Optimizer, Scheduler | None]:
    """Builds the optimizer of the network's and the algorithm's parameters, and its schedule."""
    rates = {"lr": args.lr, "weight_decay": args.weight_decay}
    further = algorithm.parameter_groups(**rates)
    options = {"momentum": args.momentum, "layer_decay": args.layer_decay}
    optimizer = build_optimizer(network, args.opt, **rates, **options, further=further)
    lengths = {"steps": args.steps, "warmup_steps": args.warmup_steps}
    return optimizer, build_schedule(optimizer, args.sched, **lengths, min_lr=args.min_lr)


def restore(checkpoint: Mapping[str, Any], state: TrainingState, plan: Plan, accelerator: Accelerator) -> None:
    """Puts everything back to where a checkpoint was written, the records too."""
    state.restore(checkpoint)
    plan.folder.read_until(checkpoint["step"])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        plan.folder.cut_back()
    accelerator.print(f"resumed {plan.folder.path} after step {checkpoint['step']}")


def measure(run: Run, model: nn.Module, stop: Interruption) -> dict[str, Any]:
    """Scores a model on every domain; all processes take part."""
    accelerator, domains = run.accelerator, run.plan.domains
    with accelerator.autocast():
        predictions = predict(model, stop.breaking(run.evaluation), accelerator.gather_for_metrics)
    in_acc, out_acc = domain_accuracies(predictions, len(domains))
    losses = out_losses(predictions, len(domains))
    return {"in_acc": in_acc, "out_acc": out_acc, "out_loss": losses, "roles": role_scores(predictions, domains)}


def evaluate(run: Run, step: int, stop: Interruption) -> None:
    """Evaluates and records the network of a step, or the average of weights that stands for it."""
    accelerator, plan = run.accelerator, run.plan
    losses, step_time = run.meter.take()
    losses = send_to_device(losses, accelerator.device)  # a checkpoint's are on the CPU
    average = run.averaging.during() if run.averaging else None
    steps_per_epoch = min(len(split.inside) for split in plan.splits) / plan.hparams["batch_size"]
    record = Record(
        step=step,
        epoch=step / steps_per_epoch,
        losses={name: accelerator.reduce(value, "mean").item() for name, value in losses.items()},
        step_time=step_time,
        mem_gb=0.0 if accelerator.device.type == "cpu" else torch.accelerator.max_memory_allocated() / 2**30,
        args=plan.record_args,
        hparams=plan.hparams,
        **measure(run, average or run.training.model, stop),
    )
    report(run, record, average or run.network)
    conclude(run, record)


def conclude(run: Run, record: Record) -> None:
    """Goes on to training after an evaluation."""
    if run.averaging:
        run.averaging.evaluated(record.step, fmean(record.out_loss[domain] for domain in run.plan.training))
    run.meter.restart()


def report(run: Run, record: Record, network: nn.Module) -> None:
    """Writes an evaluation and shows it, on the main process."""
    if run.accelerator.is_main_process:
        run.plan.folder.add(record, partial(run.save, network))
        tqdm.write(domain_table(record, run.plan.names))
        run.trackers.log({name: value for name, value in summary_row(record).items() if name != "step"}, record.step)


def save_checkpoint(run: Run, step: int) -> None:
    """Writes what the run can be resumed from, once its first evaluation has shown that it can be recorded."""
    state = run.state.collect()
    if run.accelerator.is_main_process and run.plan.folder.records:
        run.plan.folder.checkpoints.save(step, {"step": step, "identity": run.identity, **state})


def train(args: argparse.Namespace, run: Run, stop: Interruption) -> None:
    """Takes the steps that are left. A checkpoint precedes each evaluation, so that neither is lost with the other."""
    accelerator, checkpoints = run.accelerator, run.plan.folder.checkpoints
    check = DivergenceCheck(run.first_step, [run.plan.names[index] for index in run.plan.training])
    on_cpu = accelerator.device.type == "cpu"
    steps = range(run.first_step, args.steps)
    bar = tqdm(
        steps, args.model, args.steps, initial=run.first_step, unit="step", disable=not accelerator.is_main_process
    )
    catch_up(args, run, stop)
    for step, minibatches in zip(bar, run.batches, strict=False):
        set_seed(seed_hash(args.seed, step, accelerator.process_index))  # what a step draws is a function of the step
        minibatches = send_to_device(minibatches, accelerator.device, non_blocking=True)
        losses = run.algorithm.update(run.training, minibatches)
        if run.schedule:
            run.schedule.step_update(step + 1)
        if run.averaging:
            run.averaging.update(run.network, step)
        run.meter.add(losses)

        shown, evaluated, stopping = step % SHOWN_EVERY == 0, is_evaluated(args, step), stop.agreed()
        if shown or on_cpu:
            check(step, run.meter.total(), checkpoints.describe())
        if shown:
            bar.set_postfix({"loss": losses["loss"].item(), "images/s": round(run.meter.rate())})
        if evaluated or stopping or (args.save_freq and step % args.save_freq == 0):
            total = accelerator.reduce(with_weights(run.meter.total(), run.network))
            check(step, total, checkpoints.describe())
            save_checkpoint(run, step)
        if stopping:
            raise Interrupted
        if evaluated:
            evaluate(run, step, stop)


def is_evaluated(args: argparse.Namespace, step: int) -> bool:
    """Whether an evaluation follows a step."""
    return step % args.checkpoint_freq == 0 or step == args.steps - 1


def catch_up(args: argparse.Namespace, run: Run, stop: Interruption) -> None:
    """Does what was left to do after the step that a resumed run goes on from."""
    last = run.first_step - 1
    if last >= 0 and is_evaluated(args, last):
        found = [record for record in run.plan.folder.records if record.step == last]
        if found:
            conclude(run, found[0])
        else:
            evaluate(run, last, stop)


def finish(run: Run, stop: Interruption) -> None:
    """Evaluates the average that stands for the run, if there is one, and says what the run found."""
    final = run.averaging.final() if run.averaging else None
    scores = {} if final is None else measure(run, final, stop)
    if run.accelerator.is_main_process:
        folder = run.plan.folder
        if final is not None:
            report(run, replace(folder.records[-1], **scores, averaged=True), final)
        draw_learning_curves(folder.records, run.plan.names, folder.path)
        folder.finish()
        run.trackers.finish()
        print(f"selected step {folder.selected.step}: {summary(folder.selected)}")
        print(f"model: timm.create_model('local-dir:{folder.path}/best', pretrained=True)")


def finetune(args: argparse.Namespace) -> None:
    """Runs the whole of it: checks and data, then the model, then the loop."""
    if is_finished(args):
        print(f"{Path(args.output, args.experiment)} is finished: nothing to do")
        return
    set_up_logging()
    plan = make_plan(args, get_algorithm(args.algorithm), get_averaging(args.averaging) if args.averaging else None)
    accelerator = start(args)
    run = assemble(args, plan, accelerator)
    try:
        with Interruption(accelerator.num_processes) as stop:
            train(args, run, stop)
            finish(run, stop)
    except Interrupted:
        saved = f"{plan.folder.checkpoints.describe()}; go on with --resume {plan.folder.path}"
        accelerator.print(f"asked to end; checkpoint: {saved}" if plan.folder.records else "asked to end at the start")
        raise SystemExit(EXIT_CODE) from None
    finally:
        accelerator.end_training()


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    finetune(parse_resumable(build_parser(), argv))


if __name__ == "__main__":
    main()
