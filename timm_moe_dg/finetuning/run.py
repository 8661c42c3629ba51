"""A run in progress: where it begins, and what it does besides taking steps: evaluate, record, save, end."""

import logging
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import TypedDict, cast

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..algorithms import Minibatches, StepContext
from ..data import StepSampler
from ..protocols import Record, domain_accuracies, out_losses, predict, role_scores, validation_accuracy
from ..protocols.options import Arguments
from ..protocols.records import RoleScores
from ..protocols.run_identity import check_unchanged
from ..storage.checkpoint import RunState, TrainingState
from ..storage.summary_table import summary_row
from .assembly import Model
from .loaders import build_loaders, step_sampler
from .plan import RunPlan, wanted_trackers
from .progress import StepMeter, Trackers, domain_table, summary
from .resume import can_be_extended
from .stopping import Interruption, check_weights

LOST = "the selected one is lost; the same run under another --experiment makes it again"
_COMMAND = "accelerate launch tools/finetune.py --resume"
_logger = logging.getLogger(__name__)


class Scores(TypedDict):
    """What an evaluation measures, as `Record` has it."""

    in_acc: tuple[float, ...]
    out_acc: tuple[float, ...]
    out_loss: tuple[float, ...]
    roles: dict[str, RoleScores]


@dataclass(frozen=True)
class Beginning:
    """Where a process takes a run up.

    Attributes:
        identity: All that the numbers of the run follow from.
        checkpoint: What it goes on from; None for a start.
        first_step: The first that is taken.
    """

    identity: Arguments
    checkpoint: RunState | None
    first_step: int


def find_beginning(plan: RunPlan, accelerator: Accelerator) -> Beginning:
    """Reads the newest checkpoint, if there is one, and makes sure that it is of this very run.

    Raises:
        ArgumentError: Something that has a part in the numbers has changed.
        FormatError: The checkpoint is of another format.
    """
    checkpoint = plan.folder.newest_checkpoint()
    launched = {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
    identity = plan.identity(**launched)
    if checkpoint is not None:
        # Steps may have been added since, which args.yaml, that is compared as a whole, then says
        check_unchanged({**checkpoint["identity"], "steps": identity["steps"]}, identity)
    return Beginning(identity, checkpoint, 0 if checkpoint is None else checkpoint["step"] + 1)


@dataclass(frozen=True)
class FineTuning:
    """A run in progress; use `start`.

    Attributes:
        plan: What it is made of.
        accelerator: The processes.
        model: What is trained.
        beginning: Where this process took the run up.
        sampler: What each step draws.
        batches: One list of minibatches per step, this process's share.
        evaluation: Batches of every image.
        meter: Losses and time since the last evaluation.
        state: What checkpoints hold.
        trackers: Beside the run folder.
    """

    plan: RunPlan
    accelerator: Accelerator
    model: Model
    beginning: Beginning
    sampler: StepSampler
    batches: Iterable[Minibatches]
    evaluation: DataLoader
    meter: StepMeter
    state: TrainingState
    trackers: Trackers

    def context(self, step: int) -> StepContext:
        """What a step is taken with, and which domains it has."""
        return replace(self.model.training, domains=self.sampler.drawn_at(step))

    def is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows a step."""
        return step % self.plan.options.eval_freq == 0 or step == self.plan.options.steps - 1

    def has_stalled(self) -> bool:
        """Whether --early-stop ends the run here; all processes have to ask, and get the same answer."""
        patience = self.plan.options.early_stop
        if patience is None:
            return False
        accuracies = [validation_accuracy(record) for record in self.plan.folder.records]
        stalled = bool(accuracies) and len(accuracies) - accuracies.index(max(accuracies)) > patience
        # The main process has the records
        return any(gather_object([stalled and self.accelerator.is_main_process]))

    def is_saved(self, step: int) -> bool:
        """Whether --save-freq asks for a checkpoint after a step."""
        freq = self.plan.options.save_freq
        return freq is not None and step % freq == 0

    def save_checkpoint(self, step: int) -> None:
        """Writes what the run can be resumed from, once its first evaluation has shown that it can be recorded."""
        folder = self.plan.folder
        if step:  # the first is evaluated without a checkpoint
            check_weights(self.model.network, step, folder.checkpoints.describe())
        state = self.state.collect()
        if self.accelerator.is_main_process and folder.records:
            folder.save_checkpoint({"step": step, "identity": self.beginning.identity, **state})

    def evaluate(self, step: int, stop: Interruption) -> None:
        """Evaluates and records the network of a step, or the average of weights that stands for it."""
        accelerator, plan = self.accelerator, self.plan
        losses, step_time = self.meter.take()
        losses = send_to_device(losses, accelerator.device)  # a checkpoint's are on the CPU
        average = self.average()
        steps_per_epoch = min(len(split.inside) for split in plan.splits) / plan.hparams["batch_size"]
        record = Record(
            step=step,
            epoch=step / steps_per_epoch,
            losses={name: accelerator.reduce(value, "mean").item() for name, value in losses.items()},
            step_time=step_time,
            mem_gb=0.0 if accelerator.device.type == "cpu" else torch.accelerator.max_memory_allocated() / 2**30,
            args=plan.record_args,
            hparams=plan.hparams,
            **self._measure(average or self.model.training.model, stop),
        )
        self._report(record, average or self.model.network)
        self._conclude(record)

    def average(self) -> nn.Module | None:
        """The average of weights that stands for the network while it is trained, if there is one."""
        return self.model.averaging.during() if self.model.averaging else None

    def evaluate_average(self, stop: Interruption) -> None:
        """Evaluates and records the average that stands for the run at its end, if there is one."""
        final = self.model.averaging.final() if self.model.averaging else None
        if final is not None:
            scores = self._measure(final, stop)
            if self.accelerator.is_main_process:
                self._report(replace(self.plan.folder.records[-1], **scores, averaged=True), final)

    def catch_up(self, stop: Interruption) -> None:
        """Does what was left to do after the step that a resumed run goes on from."""
        last = self.beginning.first_step - 1
        found = [record for record in self.plan.folder.records if record.step == last]
        if found:
            self._conclude(found[0])
        elif last >= 0 and self.is_evaluated(last):
            self.evaluate(last, stop)

    def close(self) -> None:
        """Marks the run as finished, on the main process, and says what it found."""
        folder = self.plan.folder
        folder.finish(can_go_on=can_be_extended(vars(self.plan.options)))
        self.trackers.finish()
        self.accelerator.print(f"selected step {folder.selected.step}: {summary(folder.selected)}")
        model = f"timm.create_model('local-dir:{folder.path}/best', pretrained=True)"
        self.accelerator.print(f"model: {LOST if 'best' in folder.missing else model}")
        self.accelerator.print(f"report: python tools/report.py {shlex.quote(str(folder.path))}")

    def interrupted(self) -> str:
        """Says where a run that was asked to end goes on."""
        folder = self.plan.folder
        if not folder.records:
            return "asked to end at the start"
        command = f"{_COMMAND} {shlex.quote(str(folder.path))}"
        return f"asked to end; checkpoint: {folder.checkpoints.describe()}; go on with: {command}"

    def _measure(self, model: nn.Module, stop: Interruption) -> Scores:
        """Scores a model on every domain; all processes take part."""
        domains = self.plan.domains
        with self.accelerator.autocast():
            predictions = predict(model, stop.until_stopped(self.evaluation), self.accelerator.gather_for_metrics)
        in_acc, out_acc = domain_accuracies(predictions, len(domains))
        losses = out_losses(predictions, len(domains))
        return {"in_acc": in_acc, "out_acc": out_acc, "out_loss": losses, "roles": role_scores(predictions, domains)}

    def _report(self, record: Record, network: nn.Module) -> None:
        """Writes an evaluation and shows it, on the main process."""
        if self.accelerator.is_main_process:
            self.plan.folder.add(record, partial(self.model.save, network))
            tqdm.write(domain_table(record, self.plan.names))
            row = {name: value for name, value in summary_row(record).items() if name != "step"}
            self.trackers.log(row, record.step)

    def _conclude(self, record: Record) -> None:
        """Goes on to training after an evaluation."""
        if self.model.averaging:
            loss = fmean(record.out_loss[domain] for domain in self.plan.training)
            self.model.averaging.evaluated(record.step, loss)
        self.meter.restart()


def start(plan: RunPlan, accelerator: Accelerator, model: Model, beginning: Beginning) -> FineTuning:
    """Feeds a model, and puts everything where the newest checkpoint left it if the run is resumed."""
    share = {"process": accelerator.process_index, "num_processes": accelerator.num_processes}
    sampler = step_sampler(plan, first_step=beginning.first_step, **share)
    batches, evaluation = build_loaders(
        plan,
        model.data_config,
        sampler,
        with_metadata=model.with_metadata,
        pin_memory=accelerator.device.type != "cpu",
    )
    meter = StepMeter(images_per_step=plan.options.batch_size * plan.step_domains)
    trackers = wanted_trackers(plan.options) if accelerator.is_main_process else []
    run = FineTuning(
        plan=plan,
        accelerator=accelerator,
        model=model,
        beginning=beginning,
        sampler=sampler,
        batches=batches,
        evaluation=accelerator.prepare(evaluation),
        meter=meter,
        state=training_state(model, meter, accelerator),
        trackers=Trackers(trackers, plan.folder.path, plan.folder.args, beginning.first_step),
    )
    if beginning.checkpoint is not None:
        restore(run, beginning.checkpoint)
    return run


def training_state(model: Model, meter: StepMeter, accelerator: Accelerator) -> TrainingState:
    """Collects all that the next step depends on besides options and data."""
    shared = {
        "network": model.network,
        "optimizer": model.training.optimizer,
        "scaler": accelerator.scaler,
        "averaging": model.averaging,
    }
    return TrainingState(
        shared={name: part for name, part in shared.items() if part is not None},
        own={"algorithm": model.algorithm, "meter": meter},
        gather=lambda own: gather_object(send_to_device(own, "cpu")),  # others' accelerators are no place for it
        process=accelerator.process_index,
    )


def restore(run: FineTuning, checkpoint: RunState) -> None:
    """Puts everything back to where a checkpoint was written, the records too."""
    folder = run.plan.folder
    folder.read_back(checkpoint)
    run.accelerator.wait_for_everyone()
    if run.accelerator.is_main_process:
        folder.cut_back()
        make_again(run)
    run.state.restore(checkpoint)
    run.accelerator.print(f"resumed {folder.path} after step {checkpoint['step']}")


def make_again(run: FineTuning) -> None:
    """Makes the networks that are lost from checkpoints of their steps, and says so, or that there is none.

    The run's state is afterwards that of any checkpoint.
    """
    folder = run.plan.folder
    for name, step in folder.lost_networks().items():
        checkpoint = cast(RunState | None, folder.checkpoints.at(step))  # what was written
        if checkpoint is None:
            _logger.warning(
                f"{folder.path / name}: the network of step {step} is lost, and no checkpoint of it is left"
            )
            continue
        run.state.restore(checkpoint)
        folder.put(name, partial(run.model.save, run.average() or run.model.network))
        _logger.warning(f"{folder.path / name}: was lost or changed; made again from the checkpoint of step {step}")
