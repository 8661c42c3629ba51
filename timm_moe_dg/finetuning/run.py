"""A run in progress: its evaluations, checkpoints and end."""

import logging
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..algorithms import Minibatches, StepContext
from ..cli.tool import command
from ..cli.values import LOCAL
from ..data import Domain, StepSampler
from ..errors import MoeDgError
from ..models import DomainHeadsVisionTransformer
from ..networks.averages import load_predictor
from ..networks.build import save_network
from ..networks.calibration import calibrate
from ..protocols.evaluation import (
    Batches,
    Gather,
    class_scores_by_domain,
    domain_accuracies,
    out_losses,
    predict,
    role_scores,
    unseen_domains,
)
from ..protocols.records import Record
from ..protocols.run_identity import method_of
from ..protocols.selection import one_answer_of, summary, validation_score
from ..storage.run_folder import RunState, save_calibration, summary_row
from .messages import domain_table, logging_disabled, start_trackers, tracker_errors_logged
from .model import Model
from .plan import RunPlan, steps_per_epoch
from .processes import Interruption
from .resume import ResumePoint, can_be_extended
from .training_data import build_loaders, step_sampler

_logger = logging.getLogger(__name__)


class StepMeter:
    """Means of losses and of the time per step since the last evaluation, without waiting for the device."""

    def __init__(self) -> None:
        self.restart()

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """Counts one step with its scalar losses."""
        self._steps += 1
        for name, value in losses.items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)).to(value.device) + value

    def take(self) -> tuple[dict[str, Tensor], float]:
        """Returns the mean of each loss and the seconds per step."""
        means = {name: total / self._steps for name, total in self._sums.items()}
        return means, (time.perf_counter() - self._start) / self._steps

    def total(self) -> Tensor:
        """Sum of the loss, finite only if every step's loss was."""
        return self._sums["loss"]

    def restart(self) -> None:
        """Starts anew. Call it when training goes on after an evaluation."""
        self.load_state_dict({"steps": 0, "sums": {}, "seconds": 0.0})

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {"steps": self._steps, "sums": self._sums, "seconds": time.perf_counter() - self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""
        self._steps: int = state["steps"]
        self._sums: dict[str, Tensor] = dict(state["sums"])
        self._start: float = time.perf_counter() - state["seconds"]


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

    @property
    def shared(self) -> dict[str, Any]:
        """Parts whose state in a checkpoint is the same in every process, by name."""
        model = self.model
        parts = {"network": model.network, "optimizer": model.training.optimizer, "scaler": self.accelerator.scaler}
        return {name: part for name, part in {**parts, "averaging": model.averaging}.items() if part is not None}

    @property
    def per_process(self) -> dict[str, Any]:
        """Parts whose state in a checkpoint may differ between processes, by name."""
        return {"algorithm": self.model.algorithm, "meter": self.meter}

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
        scores = [validation_score(record, self.plan.validated) for record in self.plan.folder.records]
        stalled = bool(scores) and len(scores) - scores.index(max(scores)) > patience
        # Only the main process has all records
        return any(gather_object([stalled and self.accelerator.is_main_process]))

    def save_checkpoint(self, step: int) -> None:
        """Writes a checkpoint, once the run has a folder with its first evaluation."""
        folder, main = self.plan.folder, self.accelerator.is_main_process
        shared = {name: part.state_dict() for name, part in self.shared.items()}
        states = {name: part.state_dict() for name, part in self.per_process.items()}
        # To the CPU, or the main process's accelerator would receive the tensors of all others
        per_process = gather_object([send_to_device(states, "cpu")])
        if main and folder.records:
            content = {"step": step, "identity": self.resume_point.identity}
            folder.checkpoints.save(step, {**content, "shared": shared, "per_process": per_process})

    def restore(self, checkpoint: RunState) -> None:
        """Restores the state and the records of a checkpoint."""
        folder = self.plan.folder
        folder.read_back(checkpoint["step"])
        # All processes read the records before the main one rewrites the file
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            folder.cut_back()
        for name, part in self.shared.items():
            part.load_state_dict(checkpoint["shared"][name])
        for name, part in self.per_process.items():
            part.load_state_dict(checkpoint["per_process"][self.accelerator.process_index][name])
        _logger.info(f"resumed {folder.path} after step {checkpoint['step']}")

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
        remarks = filter(None, [summary(folder.selected), one_answer_of(folder.selected)])
        _logger.info(f"selected step {folder.selected.step}: {'; '.join(remarks)}")
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
            gather = self.accelerator.gather_for_metrics
            return score(model, batches, self.plan.domains, self.plan.options.metric, gather)

    def _record_evaluation(self, record: Record, network: nn.Module) -> None:
        """Writes and shows an evaluation, on the main process."""
        folder, model = self.plan.folder, self.model
        if self.accelerator.is_main_process:
            folder.add(record, lambda best: save_network(network, best, model.classes, model.data_config))
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


def start(plan: RunPlan, accelerator: Accelerator, model: Model, resume_point: ResumePoint) -> FineTuning:
    """Builds the loaders of a run and, if the run is resumed, restores the checkpoint."""
    share = {"process": accelerator.process_index, "num_processes": accelerator.num_processes}
    sampler = step_sampler(plan, first_step=resume_point.first_step, **share)
    batches, evaluation = build_loaders(
        plan,
        model.data_config,
        sampler,
        tokens=model.tokens,
        with_metadata=model.with_metadata,
        with_domains=isinstance(model.network, DomainHeadsVisionTransformer),
        pin_memory=accelerator.device.type != "cpu",
    )
    run = FineTuning(
        plan=plan,
        accelerator=accelerator,
        model=model,
        resume_point=resume_point,
        sampler=sampler,
        batches=batches,
        evaluation=accelerator.prepare(evaluation),
        meter=StepMeter(),
    )
    if resume_point.checkpoint is not None:
        run.restore(resume_point.checkpoint)
    return run


def score(
    model: nn.Module, batches: Batches, domains: Sequence[Domain], metric: str, gather: Gather = tuple
) -> dict[str, Any]:
    """Scores a model on every domain, by the names of `Record`; see `protocols.evaluation.predict`."""
    predictions = predict(model, batches, gather)
    in_acc, out_acc = domain_accuracies(predictions, len(domains))
    losses = out_losses(predictions, len(domains))
    roles, metrics = role_scores(predictions, domains, metric), class_scores_by_domain(predictions, len(domains))
    return {"in_acc": in_acc, "out_acc": out_acc, "out_loss": losses, "roles": roles, "metrics": metrics}


def calibrate_run(plan: RunPlan, device: torch.device, watched: Callable[[DataLoader], Any] = iter) -> None:
    """Calibrates the selected network of a run, or logs why it cannot."""
    folder = plan.folder.path / "best"
    options = plan.options
    tested = [index for index in range(len(plan.domains)) if index not in plan.training]
    data = (plan.domains, plan.splits, plan.training, unseen_domains(plan.domains, tested))
    settings: dict[str, Any] = {"method": method_of(plan.folder.args), "metadata_columns": options.metadata_columns}
    settings |= {"batch_size": options.validation_batch_size, "workers": options.workers}
    try:
        with logging_disabled(logging.INFO):  # a second description of the network
            network = load_predictor(f"{LOCAL}{folder}").to(device)
            calibration = calibrate(network, *data, **settings, watched=watched)
    except (MoeDgError, torch.OutOfMemoryError) as error:  # the run itself is complete
        _logger.warning(f"no temperature was fitted: {error}")
        return
    save_calibration(calibration, folder)
