"""What a run measures, means and keeps in its checkpoints."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn

from tests.invented import make_record
from timm_moe_dg.algorithms import StepContext
from timm_moe_dg.data import StepSampler
from timm_moe_dg.finetuning import run as running
from timm_moe_dg.finetuning.processes import Interruption
from timm_moe_dg.finetuning.run import FineTuning, StepMeter


def fine_tuning(**parts):
    return FineTuning(**dict.fromkeys(FineTuning.__dataclass_fields__) | parts)


def test_meter_means_and_forgets():
    meter = StepMeter()
    for value in (1.0, 2.0, 6.0):
        meter.add({"loss": torch.tensor(value), "aux_loss": torch.tensor(2 * value)})
    means, seconds = meter.take()
    assert {name: value.item() for name, value in means.items()} == {"loss": 3.0, "aux_loss": 6.0}
    assert seconds > 0
    meter.restart()
    meter.add({"loss": torch.tensor(5.0)})
    assert meter.take()[0] == {"loss": torch.tensor(5.0)}


def test_a_step_is_given_the_domains_that_the_sampler_drew():
    sampler = StepSampler(range(5), 2, domains_per_step=2, seed=7)
    run = fine_tuning(sampler=sampler, model=SimpleNamespace(training=StepContext(None, None)))
    drawn = [run.context(step).domains for step in range(9)]
    assert drawn == [sampler.domain_indices(step) for step in range(9)]
    assert len(set(map(tuple, drawn))) > 1


def test_an_average_is_measured_with_the_batch_statistics_that_are_saved(monkeypatch):
    """Those of the main process: in one of two processes they are other ones."""
    average, trained = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    monkeypatch.setattr(running, "broadcast", lambda buffer: torch.full_like(buffer, 7))
    monkeypatch.setattr(running, "score", lambda model, *_: model.running_mean.tolist())
    run = fine_tuning(
        model=SimpleNamespace(training=SimpleNamespace(model=trained)),
        evaluation=[],
        plan=SimpleNamespace(domains=[], options=SimpleNamespace(metric="accuracy")),
        accelerator=SimpleNamespace(autocast=nullcontext, gather_for_metrics=None),
    )
    means = [run._measure(model, Interruption()) for model in (average, trained)]
    assert means == [[7, 7], [0, 0]]


def test_each_process_gets_its_own_state_back(monkeypatch):
    saved = {}
    folder = SimpleNamespace(records=[make_record()], path="a", read_back=print, cut_back=print)
    folder.checkpoints = SimpleNamespace(save=lambda step, state: saved.update(state))

    def process(index):
        torch.manual_seed(index)
        parts = {"network": nn.Linear(2, 2), "algorithm": nn.Linear(2, 2), "averaging": None}
        optimizer = torch.optim.SGD(parts["network"].parameters(), momentum=0.9)
        accelerator = SimpleNamespace(process_index=index, is_main_process=not index, scaler=None)
        accelerator.wait_for_everyone = lambda: None
        return fine_tuning(
            plan=SimpleNamespace(folder=folder, record_args={}),
            accelerator=accelerator,
            model=SimpleNamespace(**parts, training=SimpleNamespace(optimizer=optimizer)),
            resume_point=SimpleNamespace(identity={}),
            meter=StepMeter(),
        )

    first, second = process(0), process(1)
    second.meter.add({"loss": torch.tensor(2.0)})
    others = {name: part.state_dict() for name, part in second.per_process.items()}
    monkeypatch.setattr(running, "gather_object", lambda states: [*states, others])
    first.save_checkpoint(5)
    resumed = process(1)
    nn.init.zeros_(resumed.model.algorithm.weight)
    resumed.restore(saved)
    assert (saved["step"], resumed.meter.total()) == (5, 2.0)
    assert torch.equal(resumed.model.algorithm.weight, second.model.algorithm.weight)
    assert torch.equal(resumed.model.network.weight, first.model.network.weight)
    assert not torch.equal(resumed.model.algorithm.weight, first.model.algorithm.weight)
