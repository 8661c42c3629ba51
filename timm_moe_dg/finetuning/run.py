"""A run in progress: its folder, the point where it starts or resumes, evaluations, checkpoints and its end."""

import logging
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object, send_to_device
from torch import nn
from torch.utils.data import DataLoader

from ..algorithms import Minibatches, StepContext
from ..cli.tool import command
from ..data import Domain, StepSampler
from ..errors import ArgumentError, ProcessLostError
from ..models import DomainHeadsVisionTransformer
from ..protocols.evaluation import Batches, Gather, domain_accuracies, in_scores, out_losses, predict, role_scores
from ..protocols.options import Arguments
from ..protocols.records import Record
from ..protocols.run_identity import check_unchanged
from ..protocols.selection import selection_remark, summary, validation_accuracy
from ..storage.checkpoint import RunState, TrainingState
from ..storage.ownership import owned
from ..storage.run_folder import summary_row
from .assembly import Model
from .loaders import build_loaders, step_sampler
from .plan import RunPlan, run_names, steps_per_epoch
from .progress import StepMeter, domain_table, start_trackers, tracker_errors_logged
from .resume import can_be_extended
from .sharding import divided, is_sharded, whole
from .stopping import Interruption, check_weights

_logger = logging.getLogger(__name__)


@contextmanager
def lock_folder(plan: RunPlan, accelerator: Accelerator) -> Iterator[RunPlan]:
    """Holds the lock of the run folder, on the main process, until the context is left. All processes enter it.

    A made-up name that was taken since gets a number in the plan that is yielded. If the main process raises an error,
    the others exit.
    """
    if plan.options.dry_run:  # writes nothing
        yield plan
        return
    with ExitStack() as stack:
        name: list[str | None] = [None]
        try:
            if accelerator.is_main_process:
                name = [_lock_free_name(plan, stack)]
        finally:
            broadcast_object_list(name)
        if name[0] is None:
            raise ProcessLostError("the main process did not start the run; see its own message")
        yield plan.named(name[0])  # examines the folder again, which may have been filled since


def _lock_free_name(plan: RunPlan, stack: ExitStack) -> str:
    """Locks the folder of the first name that is free, and returns that name."""
    options = plan.options
    for name in run_names(options):
        try:
            with ExitStack() as attempt:
                attempt.enter_context(owned(Path(options.output, name)))
                plan.named(name)
                stack.enter_context(attempt.pop_all())
            return name
        except ArgumentError:  # taken
            if "experiment" not in options.filled_in:
                raise
    raise AssertionError("made-up names do not end")


@dataclass(frozen=True)
class ResumePoint:
    """The point where a process starts or resumes a run."""

    identity: Arguments  # everything that determines the run's numbers
    checkpoint: RunState | None
    first_step: int


def find_resume_point(plan: RunPlan, accelerator: Accelerator) -> ResumePoint:
    """Reads the newest checkpoint, if there is one, and checks that it belongs to this run."""
    checkpoint = plan.folder.newest_checkpoint()
    launched = {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
    identity = plan.identity(**launched, **({"use_fsdp": True} if is_sharded() else {}))
    if checkpoint is not None:
        # A run that is extended has more steps. args.yaml is compared as a whole and says so if that is not allowed.
        check_unchanged({**checkpoint["identity"], "steps": identity["steps"]}, identity)
    return ResumePoint(identity, checkpoint, 0 if checkpoint is None else checkpoint["step"] + 1)


@dataclass(frozen=True)
class FineTuning:
    """A run in progress; use `start`."""

    plan: RunPlan
    accelerator: Accelerator
    model: Model
    resume_point: ResumePoint
    sampler: StepSampler
    batches: Iterable[Minibatches]  # one list of minibatches for each step, this process's share
    evaluation: DataLoader
    meter: StepMeter
    state: TrainingState  # the content of checkpoints

    def context(self, step: int) -> StepContext:
        """Everything that a step is taken with, and its domains."""
        return replace(self.model.training, domains=self.sampler.domain_indices(step))

    def is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        return step % self.plan.options.eval_freq == 0 or step == self.plan.options.steps - 1

    def has_stalled(self) -> bool:
        """Whether --early-stop ends the run here. Every process has to call it, and all get the same answer."""
        patience = self.plan.options.early_stop
        if patience is None:
            return False
        accuracies = [validation_accuracy(record, self.plan.validated) for record in self.plan.folder.records]
        stalled = bool(accuracies) and len(accuracies) - accuracies.index(max(accuracies)) > patience
        # Only the main process has all records
        return any(gather_object([stalled and self.accelerator.is_main_process]))

    def save_checkpoint(self, step: int) -> None:
        """Writes a checkpoint, once the run has a folder with its first evaluation."""
        folder = self.plan.folder
        if step:  # the first evaluation has no checkpoint before it
            check_weights(self.model.network, step, folder.checkpoints.describe())
        state = self.state.collect()
        if self.accelerator.is_main_process and folder.records:
            folder.checkpoints.save(step, {"step": step, "identity": self.resume_point.identity, **state})

    def evaluate(self, step: int, stop: Interruption) -> None:
        """Evaluates and records the network of a step, or the average of weights that stands for it."""
        accelerator, plan = self.accelerator, self.plan
        losses, step_time = self.meter.take()
        losses = send_to_device(losses, accelerator.device)  # those of a checkpoint are on the CPU
        average = self.model.averaging.during() if self.model.averaging else None
        record = Record(
            step=step,
            epoch=step / steps_per_epoch(plan.splits, plan.training, plan.options.batch_size),
            losses={name: accelerator.reduce(value, "mean").item() for name, value in losses.items()},
            step_time=step_time,
            mem_gb=0.0 if accelerator.device.type == "cpu" else torch.accelerator.max_memory_allocated() / 2**30,
            args=plan.record_args,
            hparams=plan.hparams,
            **self._measure(average or self.model.training.model, stop),
        )
        self._record_evaluation(record, average or self.model.network)
        self._return_to_training(record)

    def evaluate_average(self, stop: Interruption) -> None:
        """Evaluates and records the average of weights that stands for the run at its end, if there is one."""
        final = self.model.averaging.final() if self.model.averaging else None
        if final is not None:
            scores = self._measure(final, stop)
            if self.accelerator.is_main_process:
                self._record_evaluation(replace(self.plan.folder.records[-1], **scores, averaged=True), final)

    def finish_interrupted_step(self, stop: Interruption) -> None:
        """Completes the step after which a run resumes: its checkpoint was written before its evaluation."""
        last = self.resume_point.first_step - 1
        record = next((record for record in self.plan.folder.records if record.step == last), None)
        if record is not None:
            self._return_to_training(record)
        elif last >= 0 and self.is_evaluated(last):
            self.evaluate(last, stop)

    def close(self) -> None:
        """Marks the run as finished and logs its result, on the main process."""
        folder = self.plan.folder
        folder.finish(can_go_on=can_be_extended(vars(self.plan.options)))
        _logger.info(f"selected step {folder.selected.step}: {summary(folder.selected)}")
        if remark := selection_remark(folder.records):
            _logger.info(f"selection: {remark}")
        _logger.info(f"model: timm.create_model('local-dir:{folder.path}/best', pretrained=True)")
        _logger.info(f"report: {command('report')} {shlex.quote(str(folder.path))}")

    def interrupted(self, again: str) -> str:
        """Describes where a run that was asked to end goes on, with the command or call that does so."""
        if not self.plan.folder.records:
            return "asked to end at the start"
        return f"asked to end; checkpoint: {self.plan.folder.checkpoints.describe()}; go on with: {again}"

    def _measure(self, model: nn.Module, stop: Interruption) -> dict[str, Any]:
        """Scores a model on every domain. All processes take part."""
        if model is not self.model.training.model:  # an average, with the batch statistics of its own process
            for buffer in model.buffers():
                buffer.copy_(broadcast(buffer.contiguous()))
        with self.accelerator.autocast():
            batches = stop.until_stopped(self.evaluation)
            return score(model, batches, self.plan.domains, self.accelerator.gather_for_metrics)

    def _record_evaluation(self, record: Record, network: nn.Module) -> None:
        """Writes and shows an evaluation, on the main process."""
        folder = self.plan.folder
        if self.model.sharding:
            network = self.model.sharding.whole_network(network, main=self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            folder.add(record, partial(self.model.save, network))
            _logger.info(domain_table(record, self.plan.names))
            row = {name: value for name, value in summary_row(record).items() if name != "step"}
            with tracker_errors_logged():
                if not self.accelerator.trackers:
                    # Only now is there a folder to write to
                    start_trackers(self.accelerator, folder.path, folder.args, self.resume_point.first_step)
                self.accelerator.log(row, step=record.step)

    def _return_to_training(self, record: Record) -> None:
        """Returns to training after an evaluation."""
        if self.model.averaging:
            losses = {domain: record.out_loss[domain] for domain in self.plan.validated}
            self.model.averaging.evaluated(record.step, fmean(losses.values()) if losses else nan)
        self.meter.restart()


def score(model: nn.Module, batches: Batches, domains: Sequence[Domain], gather: Gather = tuple) -> dict[str, Any]:
    """Scores a model on every domain, by the names of `Record`; see `protocols.evaluation.predict`."""
    predictions = predict(model, batches, gather)
    in_acc, out_acc = domain_accuracies(predictions, len(domains))
    losses = out_losses(predictions, len(domains))
    roles, metrics = role_scores(predictions, domains), in_scores(predictions, len(domains))
    return {"in_acc": in_acc, "out_acc": out_acc, "out_loss": losses, "roles": roles, "metrics": metrics}


def start(plan: RunPlan, accelerator: Accelerator, model: Model, resume_point: ResumePoint) -> FineTuning:
    """Builds the loaders of a run and, if the run is resumed, restores the checkpoint."""
    share = {"process": accelerator.process_index, "num_processes": accelerator.num_processes}
    sampler = step_sampler(plan, first_step=resume_point.first_step, **share)
    batches, evaluation = build_loaders(
        plan,
        model.data_config,
        sampler,
        with_metadata=model.with_metadata,
        with_domains=isinstance(model.network, DomainHeadsVisionTransformer),
        pin_memory=accelerator.device.type != "cpu",
    )
    meter = StepMeter(images_per_step=plan.options.batch_size * plan.step_domains)
    run = FineTuning(
        plan=plan,
        accelerator=accelerator,
        model=model,
        resume_point=resume_point,
        sampler=sampler,
        batches=batches,
        evaluation=accelerator.prepare(evaluation),
        meter=meter,
        state=_training_state(model, meter, accelerator),
    )
    if resume_point.checkpoint is not None:
        _restore(run, resume_point.checkpoint)
    return run


def _training_state(model: Model, meter: StepMeter, accelerator: Accelerator) -> TrainingState:
    shared = {
        "network": model.network,
        "optimizer": model.training.optimizer,
        "scaler": accelerator.scaler,
        "averaging": model.averaging,
    }
    state = TrainingState(
        shared={name: part for name, part in shared.items() if part is not None},
        per_process={"algorithm": model.algorithm, "meter": meter},
        # To the CPU, or the main process's accelerator would receive the tensors of all others
        gather=lambda states: gather_object(send_to_device(states, "cpu")),
        process=accelerator.process_index,
    )
    if model.sharding:
        state = replace(state, whole=partial(whole, main=accelerator.is_main_process), divided=divided)
    return state


def _restore(run: FineTuning, checkpoint: RunState) -> None:
    """Restores the state and the records of a checkpoint."""
    folder = run.plan.folder
    folder.read_back(checkpoint["step"])
    # All processes read the records before the main one rewrites the file
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        folder.cut_back()
    run.state.restore(checkpoint)
    _logger.info(f"resumed {folder.path} after step {checkpoint['step']}")
