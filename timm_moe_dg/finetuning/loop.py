"""The training loop, and the steps around it: plan, lock, dry run or run, interruption."""

import logging
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, distributed, nn

from ..algorithms import Minibatches
from ..analysis.plots import plot_learning_curves
from ..analysis.style import optional_picture
from ..data import check_readable, seed_hash
from ..data.inspection import warn_of_copies
from ..errors import ArgumentError, DivergenceError
from ..networks.build import check_name
from ..protocols.options import RunOptions
from .messages import RunLog, describe, step_bar, tracker_errors_logged
from .model import build_model
from .optimization import check_optimizer
from .plan import RunPlan, check_trackers, make_plan, wanted_trackers
from .processes import (
    Interrupted,
    Interruption,
    join_processes,
    leave_processes,
    lost_process_explained,
    process_state_kept,
)
from .resume import find_resume_point, lock_folder
from .run import FineTuning, calibrate_run, start
from .training_data import check_loaders

LOSS_FREQ = 10  # steps between losses in the progress bar; reading one waits for the device
# Two consecutive layers multiply their weights and a norm squares the product. With weights beyond this, float32
# overflows and the network returns NaN, although the weights are finite.
LARGEST = torch.finfo(torch.float32).max ** 0.25
_logger = logging.getLogger(__name__)


def train(run: FineTuning, stop: Interruption) -> None:
    """Takes the remaining steps. A checkpoint precedes each evaluation, so that neither is lost with the other."""
    options, accelerator, model, meter = run.plan.options, run.accelerator, run.model, run.meter
    first, checkpoints = run.resume_point.first_step, run.plan.folder.checkpoints
    domains = [run.plan.names[index] for index in run.plan.training]
    bar = step_bar(range(first, options.steps), options.model, hidden=not accelerator.is_main_process)
    run.finish_interrupted_step(stop)
    if run.has_stalled():
        return
    for step, minibatches in zip(bar, run.batches, strict=False):
        # Random numbers of a step depend on the step alone, so that a resumed run draws the same
        set_seed(seed_hash(options.seed, step, accelerator.process_index))
        minibatches = send_to_device(minibatches, accelerator.device, non_blocking=True)
        if model.probing:
            model.probing.start_step(step)
        losses = take_step(run, step, minibatches)
        if model.schedule:
            model.schedule.step_update(step + 1)
        if model.averaging:
            model.averaging.update(model.network, step)
        meter.add(losses)

        shows_loss, evaluates, stopping = step % LOSS_FREQ == 0, run.is_evaluated(step), stop.should_stop()
        if shows_loss or accelerator.device.type == "cpu":
            check_losses(meter.total(), step, domains, checkpoints.describe())
        if shows_loss:
            bar.set_postfix({"loss": losses["loss"].item()}, refresh=False)
        if evaluates or stopping or (options.save_freq and step % options.save_freq == 0):
            check_losses(accelerator.reduce(meter.total()), step, domains, checkpoints.describe())
            check_weights(model.network, step, checkpoints.describe())
            run.save_checkpoint(step)
        if stopping:
            raise Interrupted
        if evaluates:
            run.evaluate(step, stop)
            if run.has_stalled():
                _logger.info(f"ending after step {step}: {options.early_stop} evaluations without a better validation")
                break


def take_step(run: FineTuning, step: int, minibatches: Minibatches) -> dict[str, Tensor]:
    """Takes a training step and returns its scalars. If the memory is full, raises an `ArgumentError`."""
    try:
        return run.model.algorithm.take_step(run.context(step), minibatches)
    except RuntimeError as error:
        if not should_reduce_batch_size(error):
            raise
        remedy = "give a smaller --batch-size, --grad-accum-steps or --grad-checkpointing"
        reason = f"the memory of {run.accelerator.device} is full; {remedy} ({error})"
        raise ArgumentError.of("batch_size", run.plan.options.batch_size, reason) from error


def finish(run: FineTuning, stop: Interruption) -> None:
    """Evaluates the average of weights that stands for the run, calibrates the selected network, and ends the run."""
    run.evaluate_average(stop)
    if run.accelerator.is_main_process:
        folder = run.plan.folder
        with optional_picture(folder.path / "learning_curves.png") as path:
            plot_learning_curves(folder.records, run.plan.names, path)
        if run.plan.options.calibrate:
            # Of several processes, the others wait for no answer of this one
            alone = run.accelerator.num_processes == 1
            calibrate_run(run.plan, run.accelerator.device, stop.until_stopped if alone else iter)
        run.close()


def finetune(options: RunOptions, log: RunLog) -> Path:
    """Reads and checks the data, locks the run folder, and runs. The state of the process is that of before at the end.

    Returns:
        The run folder. A dry run does not make it.
    """
    with process_state_kept(Path(options.output, options.experiment or "")):
        check_optimizer(options.opt)
        check_name(options.model)
        check_trackers(wanted_trackers(options))
        plan = make_plan(options)
        grouped = distributed.is_initialized()
        accelerator = join_processes(plan.options)
        try:
            with lost_process_explained(plan.options, accelerator), lock_folder(plan, accelerator) as locked_plan:
                _logger.info(describe(locked_plan))
                if options.dry_run:
                    dry_run(locked_plan, accelerator)
                else:
                    run(locked_plan, accelerator, log)
        finally:
            with tracker_errors_logged():
                leave_processes(accelerator, keep_group=grouped)
        return locked_plan.folder.path


def dry_run(plan: RunPlan, accelerator: Accelerator) -> None:
    """Does everything that a run does before its first step, and writes nothing."""
    find_resume_point(plan, accelerator)
    options = plan.options
    if options.check_images and accelerator.is_main_process:
        if not options.skip_unreadable:  # which has read all images
            check_readable(plan.domains, options.workers)
        warn_of_copies(plan.domains, set(range(len(plan.domains))) - set(plan.training))
    set_seed(options.seed)
    model = build_model(plan, accelerator)  # after the images, which need no download
    check_loaders(plan, model.data_config, model.with_metadata)
    _logger.info("the run can start; dry run: nothing was trained")


def run(plan: RunPlan, accelerator: Accelerator, log: RunLog) -> None:
    """Builds the model, and trains from the start or the newest checkpoint to the end, or until a signal comes."""
    resume_point = find_resume_point(plan, accelerator)
    log.folder = plan.folder
    set_seed(plan.options.seed)
    fine_tuning = start(plan, accelerator, build_model(plan, accelerator), resume_point)
    if accelerator.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()  # of earlier runs in this process
    stop = Interruption(accelerator.num_processes, timedelta(minutes=plan.options.process_timeout))
    try:
        with stop:
            train(fine_tuning, stop)
            finish(fine_tuning, stop)
    except Interrupted:
        text = fine_tuning.interrupted(log.go_on(plan, accelerator.num_processes))
    else:
        return
    _logger.info(text)
    raise stop.error(text)  # outside of the except clause, or it would keep the frames of the loop


def check_losses(total: Tensor, step: int, domains: Sequence[str], checkpoint: str) -> None:
    """Checks a sum of losses up to a step, finite only if every step's loss was. Reading it waits for the device.

    `checkpoint` names the last good checkpoint, for the message.
    """
    if not math.isfinite(total.item()):
        raise DivergenceError(
            f"loss={total.item()}: not finite by step {step}, on a batch of {', '.join(domains)}; lower --lr, warm up, "
            f"or train without --amp-dtype float16; last good checkpoint: {checkpoint}"
        )


def check_weights(network: nn.Module, step: int, checkpoint: str) -> None:
    """Checks that no weight is above `LARGEST` or not a number, so that a checkpoint of the network is of use."""
    weights = [parameter.detach() for parameter in network.parameters() if parameter.numel()]
    total = torch.stack([weight.abs().max() for weight in weights]).max().nan_to_num(math.inf)
    if not total.item() <= LARGEST:
        raise DivergenceError(
            f"weights={total.item():.1e}: too large after step {step} to go on with; lower --lr, or warm up; last good "
            f"checkpoint: {checkpoint}"
        )
