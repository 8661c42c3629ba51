"""The images of examples/fashion_shift, and its tables."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.data.files import write_release
from tests.load_tool import load_tool
from timm_moe_dg.layers import MoeMlp

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "fashion_shift")]
make_data, experts = (importlib.import_module(name) for name in ("make_data", "experts"))


def test_test_images_are_dealt_to_four_domains_and_training_images_kept(tmp_path, monkeypatch):
    images, _ = write_release(tmp_path / "release", train=40, test=20)
    monkeypatch.setattr(make_data, "TRAINING_IMAGES", 40)
    make_data.main(str(tmp_path / "release"), str(tmp_path / "data"))
    upright = {int(path.stem): path for path in (tmp_path / "data" / "pretraining").rglob("*.png")}
    assert sorted(upright) == list(range(40))
    for number, path in upright.items():
        assert np.array_equal(np.asarray(Image.open(path)), np.repeat(images[number, ..., None], 3, 2))
    domains = sorted((tmp_path / "data" / "shift").iterdir())
    assert [domain.name for domain in domains] == ["colored", "noisy", "rotated_30", "rotated_60"]
    numbers = [[int(path.stem) for path in domain.rglob("*.png")] for domain in domains]
    assert [len(part) for part in numbers] == [5, 5, 5, 5]
    assert sorted(number for part in numbers for number in part) == list(range(40, 60))


@pytest.mark.slow
def test_experts_that_did_not_move_are_measured_as_equal(tmp_path, capsys):
    size = ["patch_size=8", "embed_dim=24", "depth=2", "num_heads=2"]
    common = ["--workers", "0", "--cpu-threads", "1", "-b", "4", "--steps", "2", "--output", str(tmp_path)]
    common += ["--model-kwargs"]
    finetune = load_tool("finetune").main
    finetune([*common, *size, "--model", "deit_tiny_patch16_224", "--experiment", "start"])
    start = ["--initial-checkpoint", str(tmp_path / "start" / "best" / "model.safetensors"), "--experiment"]
    mixture = [*common, *size, "moe_layers=(1,)", "num_experts=3", "--model", "gmoe_tiny_patch16", *start]
    finetune([*mixture, "still", "--lr", "0"])
    finetune([*mixture, "moved", "--lr", "0.01"])
    capsys.readouterr()
    experts.main([str(tmp_path / name) for name in ("still", "moved")])
    *lines, last = capsys.readouterr().out.splitlines()[1:]
    still, moved, mean = ([*map(float, line.split())] for line in lines)
    assert still[:2] == [0, 0]
    assert set(still[2:]) == {still[2]}  # equal experts answer alike, however tokens are routed
    assert last.startswith("p: ")
    assert moved[0] > 0.01
    assert moved[1] > 0.01
    assert mean[0] == pytest.approx(moved[0] / 2, abs=1e-3)


class Scorer(nn.Module):
    """A mixture of three experts, of which expert e answers class e."""

    def __init__(self):
        super().__init__()
        self.moe = MoeMlp(3, num_experts=3, top_k=2, router="linear")
        for parameter in self.moe.experts.parameters():
            nn.init.zeros_(parameter)
        self.moe.experts.fc2.bias.copy_(torch.eye(3))

    def forward(self, x):
        return self.moe(x)


@torch.no_grad()
def test_changes_of_the_routing_reach_the_experts():
    model = Scorer().eval()
    x = torch.randn(60, 3)
    plain = model(x)
    with experts.rerouted(model, experts.permuted):
        shuffled = model(x)
    assert not torch.equal(shuffled, plain)
    assert torch.equal(shuffled.sort(0).values, plain.sort(0).values)
    share = experts.one_expert(lambda: (model(x).argmax(1) == 1).double().mean().item(), model)
    assert share == pytest.approx(1 / 3)  # one of three experts answers class 1, and always
    assert torch.equal(model(x), plain)
