"""The images of examples/fashion_shift, and its tables."""

import numpy as np
import pytest
from PIL import Image

from tests.data.files import write_release
from tests.load_tool import load_example, load_tool

make_data, experts = map(load_example, ("fashion_shift/make_data", "experts"))


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
    assert still[2] == still[3]  # equal experts answer alike
    assert last.startswith("p: ")
    assert moved[0] > 0.01
    assert moved[1] > 0.01
    assert mean[0] == pytest.approx(moved[0] / 2, abs=1e-3)
