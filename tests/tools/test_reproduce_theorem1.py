"""The synthetic data of GMoE's appendix B.2 feature by feature, and a tiny run of the tool."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.load_tool import load_tool

DOCS = Path(__file__).parents[2] / "docs"
TOOL = load_tool("reproduce_theorem1")
SIZE = 4000


def labels_of(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads both features off the samples: which pixel of the first patch is 1, and which patch is a pattern."""
    matches = (x[:, 1:, None] == codes).all(-1)  # (N, P - 1, K), to the last bit
    assert (matches.sum((1, 2)) == 1).all()  # exactly one patch of 2..P holds a pattern
    ones = x[:, 0] == 1.0
    assert (ones.sum(1) == 1).all()
    return ones.long().argmax(1), matches.any(1).long().argmax(1)


def codes_of(seed: int) -> torch.Tensor:
    return TOOL.orthonormal_codes(torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(5))
def test_the_patterns_are_an_orthonormal_basis_that_depends_on_the_seed(seed):
    codes = codes_of(seed)
    torch.testing.assert_close(codes @ codes.T, torch.eye(4), rtol=0, atol=1e-6)
    assert not torch.allclose(codes, codes_of(seed + 1))


def test_without_noise_each_set_shows_the_labels_that_its_name_says():
    sets = TOOL.make_sets(SIZE, SIZE, 1.0, 1.0, seed=3)
    shifts = {"train": (0, 0), "validation": (0, 0), "pixel_spurious": (1, 0), "patch_spurious": (0, 1)}
    assert sets.keys() == shifts.keys()
    for name, (x, y) in sets.items():
        pixel, patch = labels_of(x, codes_of(3))
        assert torch.equal(pixel, (y + shifts[name][0]) % 4)
        assert torch.equal(patch, (y + shifts[name][1]) % 4)


def test_labels_positions_and_everything_else_are_uniform_or_normal():
    x, y = TOOL.make_sets(SIZE, 1, 1.0, 1.0, seed=0)["train"]
    assert torch.bincount(y, minlength=4).float().div(SIZE).sub(0.25).abs().max() < 0.035  # 5 standard deviations
    at = (x[:, 1:, None] == codes_of(0)).all(-1).any(-1)
    assert at.float().mean(0).sub(1 / 9).abs().max() < 0.025
    noise = x[:, 1:][~at]
    assert noise.mean().abs() < 0.015
    assert noise.std() == pytest.approx(1.0, abs=0.015)
    others = x[:, 0][x[:, 0] != 1.0]
    assert others.std() == pytest.approx(1.0, abs=0.04)


def test_noise_flips_both_features_independently_and_to_every_other_label_alike():
    sets = TOOL.make_sets(20_000, SIZE, 0.9, 0.7, seed=1)
    x, y = sets["train"]
    pixel, patch = labels_of(x, codes_of(1))
    right, good = pixel == y, patch == y
    assert right.float().mean() == pytest.approx(0.9, abs=0.011)
    assert good.float().mean() == pytest.approx(0.7, abs=0.017)
    assert (right & good).float().mean() == pytest.approx(0.63, abs=0.018)
    shifts = torch.bincount(((patch - y) % 4)[~good], minlength=4).float()
    assert shifts[0] == 0
    assert shifts[1:].div(shifts.sum()).sub(1 / 3).abs().max() < 0.035
    for kind, share in (("", 0.7), ("_clean", 1.0)):
        x, y = sets[f"pixel_spurious{kind}"]
        pixel, patch = labels_of(x, codes_of(1))
        assert torch.equal(pixel, (y + 1) % 4)
        assert (patch == y).float().mean() == pytest.approx(share, abs=0.04)
    x, y = sets["patch_spurious_clean"]
    assert torch.equal(labels_of(x, codes_of(1))[0], y)


def test_held_out_samples_are_others_than_those_trained_on():
    sets = TOOL.make_sets(SIZE, SIZE, 1.0, 1.0, seed=0)
    assert not torch.equal(sets["train"][0], sets["validation"][0])
    assert not torch.equal(sets["pixel_spurious"][1], sets["patch_spurious"][1])


def test_the_patch_network_does_not_see_the_order_of_patches_and_the_mlp_does():
    x, order = torch.randn(6, 10, 4), torch.randperm(10)
    network, mlp = TOOL.NETWORKS["FCN"](), TOOL.NETWORKS["MLP"]()
    torch.testing.assert_close(network(x), network(x[:, order]))
    assert not torch.allclose(mlp(x), mlp(x[:, order]))
    assert [tuple(p.shape) for p in mlp.parameters() if p.dim() == 2] == [(100, 40), (100, 100), (4, 100)]
    first, second = (layer for layer in network.maps if hasattr(layer, "weight"))
    filtered = torch.conv1d(x.transpose(1, 2), first.weight[..., None], first.bias).clamp(min=0)
    expected = torch.conv1d(filtered, second.weight[..., None], second.bias).amax(2)
    torch.testing.assert_close(network(x), expected)


@pytest.mark.slow
def test_the_aligned_network_keeps_more_than_50_points_over_the_misaligned_one_both_ways(tmp_path):
    TOOL.main(["noiseless", "--output", str(tmp_path), "--seeds", "0", "--quick"])
    table = json.loads((tmp_path / "theorem1_noiseless.json").read_text())
    assert {run["network"]: len(run["curves"]["validation"]) for run in table["runs"]} == {"MLP": 10, "FCN": 10}
    final = table["final"]
    assert final["MLP"]["patch_spurious"]["mean"] - final["FCN"]["patch_spurious"]["mean"] > 50
    assert final["FCN"]["pixel_spurious"]["mean"] - final["MLP"]["pixel_spurious"]["mean"] > 50
    for run in table["runs"]:
        for name, values in run["curves"].items():
            assert final[run["network"]][name]["mean"] == values[-1]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "theorem1_noiseless.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_noisy_run_has_nine_pairs_and_repeats_itself(tmp_path):
    for name in ("first", "second"):
        TOOL.main(["noisy", "--output", str(tmp_path / name), "--seeds", "4", "--samples", "300", "--epochs", "1"])
    tables = [json.loads((tmp_path / name / "theorem1_noisy.json").read_text()) for name in ("first", "second")]
    pairs = {(run["p_pixel"], run["p_patch"]) for run in tables[0]["runs"]}
    assert len(pairs) == 9
    assert all(patch >= pixel for pixel, patch in pairs)
    assert tables[0]["final"] == tables[1]["final"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="cannot be made") as caught:
        TOOL.main(["noisy", "--output", str(tmp_path / "file")])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script", ["reproduce_theorem1", "reproduce_theorem2"])
def test_the_documentations_commands_parse(script):
    text = (DOCS / "theorems.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith(f"python tools/{script}")]
    assert lines
    for line in lines:
        load_tool(script).build_parser().parse_args(shlex.split(line, comments=True)[2:])
