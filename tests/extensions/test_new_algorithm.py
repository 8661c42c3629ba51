"""A new algorithm is one file outside the package: it is trained, drawn and logged."""

import json
import sys

import pytest

from tests.load_tool import load_tool
from timm_moe_dg import algorithms
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
MODEL = ["--model", "gmoe_tiny_patch16", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2"]
RUN = [
    *("--dataset", "rotated_digits", *MODEL, "moe_layers=(1,)", "num_experts=2", "--img-size", "16", "--lr", "0.01"),
    *("--steps", "3", "--checkpoint-freq", "2", "--batch-size", "2", "--workers", "0", "--cpu-threads", "1"),
    *("--algorithm", "tilted_risk:Tilted"),
]


@pytest.fixture(scope="module")
def finetune(tmp_path_factory):
    """Runs the tool where the file can be imported, as PYTHONPATH lets a user's shell."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "tilted_risk.py").write_text(FILE)
    tool = load_tool("finetune")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "plot_learning_curves", lambda *_: None)  # slow, and of no interest here
        patch.syspath_prepend(folder)
        yield lambda *words: tool.main([*RUN, *map(str, words)])
    sys.modules.pop("tilted_risk", None)
    algorithms._algorithms.pop("Tilted", None)


def last_record(folder):
    return json.loads((folder / "results.jsonl").read_text().splitlines()[-1])


def test_its_loss_is_trained_and_its_parts_and_hyper_parameters_are_in_the_records(finetune, tmp_path):
    finetune("--output", tmp_path, "--experiment", "a")
    last = last_record(tmp_path / "a")
    assert last["args"]["algorithm"] == "tilted_risk:Tilted"
    assert (last["hparams"]["tilt"], last["hparams"]["tilt_ema"]) == (1.0, 0.5)
    assert last["loss"] > last["worst_risk"] > 0  # log-sum-exp is above the largest of several; the model's loss on top
    assert last["task_loss"] > 0


def test_its_hyper_parameters_are_drawn_and_checked(finetune, tmp_path):
    finetune("--output", tmp_path, "--experiment", "drawn", "--hparams-seed", 3, "--steps", 1)
    drawn = last_record(tmp_path / "drawn")["hparams"]
    assert 0.1 <= drawn["tilt"] <= 10
    assert drawn["tilt"] != 1.0
    for given in ('{"tilt": 0}', '{"tlit": 1}'):
        with pytest.raises(SystemExit, match="ArgumentError: hparams="):
            finetune("--output", tmp_path, "--experiment", "refused", "--hparams", given)
