"""The training loop, and the steps around it: plan, lock, dry run or run, interruption."""

import logging
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from torch import distributed

from ..analysis.curves import draw_learning_curves
from ..data import check_readable, seed_hash
from ..protocols.options import RunOptions
from .assembly import build_model
from .calibration import calibrate_run
from .launch import join_processes, leave_processes, lost_process_explained
from .loaders import check_loaders
from .log import RunLog
from .memory import take_step
from .plan import RunPlan, describe, make_plan
from .process_state import process_state_kept
from .progress import StepBar, tracker_errors_logged
from .run import FineTuning, find_resume_point, lock_folder, start
from .stopping import DivergenceCheck, Interrupted, Interruption, nan_if_not_finite

LOSS_FREQ = 10  # steps between losses in the progress bar; reading one waits for the device
_logger = logging.getLogger(__name__)


def train(run: FineTuning, stop: Interruption) -> None:
    """Takes the remaining steps. A checkpoint precedes each evaluation, so that neither is lost with the other."""
    options, accelerator, model, meter = run.plan.options, run.accelerator, run.model, run.meter
    first, checkpoints = run.resume_point.first_step, run.plan.folder.checkpoints
    check = DivergenceCheck(first, [run.plan.names[index] for index in run.plan.training])
    steps = range(first, options.steps)
    bar = StepBar(steps, options.model, hidden=not accelerator.is_main_process)
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
            check(step, meter.total(), checkpoints.describe())
        if shows_loss:
            bar.show(step, losses["loss"].item(), meter.rate())
        if evaluates or stopping or (options.save_freq and step % options.save_freq == 0):
            total = accelerator.reduce(nan_if_not_finite(meter.total(), model.network))
            check(step, total, checkpoints.describe())
            run.save_checkpoint(step)
        if stopping:
            raise Interrupted
        if evaluates:
            run.evaluate(step, stop)
            if run.has_stalled():
                _logger.info(f"ending after step {step}: {options.early_stop} evaluations without a better validation")
                break


def finish(run: FineTuning, stop: Interruption) -> None:
    """Evaluates the average of weights that stands for the run, calibrates the selected network, and ends the run."""
    run.evaluate_average(stop)
    if run.accelerator.is_main_process:
        folder = run.plan.folder
        draw_learning_curves(folder.records, run.plan.names, folder.path)
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
    if options.check_images and not options.skip_unreadable and accelerator.is_main_process:  # skipping reads all too
        check_readable(plan.domains, options.workers)
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
