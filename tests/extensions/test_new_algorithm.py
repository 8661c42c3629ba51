"""A new algorithm is one file outside the package: it is trained, drawn, logged, stopped and resumed."""

import json
import signal
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.load_tool import load_tool
from timm_moe_dg import algorithms
from timm_moe_dg.algorithms import ALGORITHMS
from timm_moe_dg.finetuning import loop

FILE = '''
"""Tilted risk: log-mean-exp of the domains' risks, smoothed over steps."""

import torch
from timm_moe_dg.algorithms import POSITIVE, SHARE, Algorithm, register_algorithm


@register_algorithm
class Tilted(Algorithm):
    MIN_DOMAINS = 2
    ACCUMULATES = False  # each part of a step would move the average
    HPARAMS = {"tilt": 1.0, "tilt_ema": 0.5}
    RANGES = {"tilt": POSITIVE, "tilt_ema": SHARE}
    SEARCH = {"tilt": lambda random: 10 ** random.uniform(-1, 1)}

    def __init__(self, setup):
        super().__init__(setup)
        self.register_buffer("average", torch.zeros(setup.num_domains))

    def objective(self, context, minibatches):
        out = self.forward_domains(context.model, minibatches)
        risks = context.mean_keeping_gradient(out.risks())
        smooth = self.average.lerp(risks, 1 - self.hparams["tilt_ema"])
        self.average.copy_(smooth.detach())
        tilted = (self.hparams["tilt"] * smooth).logsumexp(0) / self.hparams["tilt"]
        return out.scalars(tilted, task_loss=risks.mean(), worst_risk=smooth.max())
'''
STEPS, STOPPED_AFTER = 6, 3
MODEL = ["--model", "gmoe_tiny_patch16", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2"]
RUN = [
    *("--dataset", "rotated_digits", *MODEL, "moe_layers=(1,)", "num_experts=2", "--img-size", "16", "--lr", "0.01"),
    *("--steps", str(STEPS), "--checkpoint-freq", "2", "--batch-size", "2", "--workers", "0", "--cpu-threads", "1"),
    *("--algorithm", "tilted_risk:Tilted"),
]


@pytest.fixture(scope="module")
def finetune(tmp_path_factory):
    """Runs the tool where the file can be imported, as PYTHONPATH lets a user's shell."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "tilted_risk.py").write_text(FILE)
    tool = load_tool("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "draw_learning_curves", lambda *_: None)  # slow, and of no interest here
        patch.syspath_prepend(folder)
        yield lambda *words: tool.main([*RUN, *map(str, words)])
    sys.modules.pop("tilted_risk", None)
    algorithms._algorithms.pop("Tilted", None)


@pytest.fixture(scope="module")
def alone(finetune, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("alone")
    finetune("--output", output, "--experiment", "a")
    return output / "a"


def records(folder):
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for record in found:
        for name in ("step_time", "mem_gb"):
            record.pop(name, None)
    return found


def test_its_loss_is_trained_and_its_parts_and_hyper_parameters_are_in_the_records(alone):
    last = records(alone)[-1]
    assert last["args"]["algorithm"] == "tilted_risk:Tilted"
    assert last["hparams"]["tilt"] == 1.0
    assert last["hparams"]["tilt_ema"] == 0.5
    assert last["loss"] > last["worst_risk"] > 0  # log-sum-exp is above the largest of several; the model's loss on top
    assert last["task_loss"] > 0


def test_its_hyper_parameters_are_drawn_and_checked(finetune, tmp_path):
    finetune("--output", tmp_path, "--experiment", "drawn", "--hparams-seed", 3, "--steps", 1)
    drawn = records(tmp_path / "drawn")[-1]["hparams"]
    assert 0.1 <= drawn["tilt"] <= 10
    assert drawn["tilt"] != 1.0
    with pytest.raises(SystemExit, match="tilt must be greater than 0"):
        finetune("--output", tmp_path, "--experiment", "zero", "--hparams", '{"tilt": 0}')
    with pytest.raises(SystemExit, match=r"no such \['tlit'\]"):
        finetune("--output", tmp_path, "--experiment", "typo", "--hparams", '{"tlit": 1}')


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_with_what_it_carries(finetune, alone, tmp_path, monkeypatch):
    method = ALGORITHMS["Tilted"]
    objective, seen = method.objective, []

    def stopping(self, context, minibatches):
        seen.append(self.average.clone())
        if len(seen) == STOPPED_AFTER:
            signal.raise_signal(signal.SIGTERM)
        return objective(self, context, minibatches)

    monkeypatch.setattr(method, "objective", stopping)
    with pytest.raises(SystemExit):
        finetune("--output", tmp_path, "--experiment", "a")
    finetune("--output", tmp_path, "--experiment", "a", "--resume", "auto")
    assert len(seen) == STEPS
    assert all(average.min() > 0 for average in seen[1:])  # it starts from zeros, once
    stopped, whole = ([{**record, "args": None} for record in records(run)] for run in (tmp_path / "a", alone))
    assert stopped == whole
    one, other = (load_file(run / "best" / "model.safetensors") for run in (tmp_path / "a", alone))
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
