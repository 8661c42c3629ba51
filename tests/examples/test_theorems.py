"""The synthetic data of GMoE's two theorems, and a short run of each experiment."""

import json

import pytest
import torch
from torch import nn

from tests.load_tool import load_example

SIZE = 4000
fit, theorem1, theorem2 = (load_example(f"theorems/{name}") for name in ("fit", "theorem1", "theorem2"))


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).mean()


def test_weights_equal_those_of_adam_on_the_same_batches():
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 3), torch.randn(20, 2)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    order, same = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for _ in fit.fit(model, inputs, targets, squares, epochs=3, generator=order, batch_size=8, lr=0.01):
        fit.predict(model, inputs)  # leaves the model in evaluation mode, which the next epoch undoes
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01, fused=False)
    for _ in range(3):
        permutation = torch.randperm(20, generator=same)
        for batch in (permutation[:8], permutation[8:16], permutation[16:]):
            optimizer.zero_grad()
            squares(reference(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    torch.testing.assert_close(model.weight, reference.weight, rtol=1e-4, atol=1e-6)


def labels_of(x: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads both features off the samples: which pixel of the first patch is 1, and which pattern is in a patch."""
    matches = (x[:, 1:, None] == codes).all(-1)  # (N, P - 1, K), to the last bit
    assert (matches.sum((1, 2)) == 1).all()  # exactly one patch of 2..P holds a pattern
    ones = x[:, 0] == 1.0
    assert (ones.sum(1) == 1).all()
    return ones.long().argmax(1), matches.any(1).long().argmax(1)


def codes_of(seed: int) -> torch.Tensor:
    return theorem1.orthonormal_codes(torch.Generator().manual_seed(seed))


def test_the_patterns_are_an_orthonormal_basis_that_depends_on_the_seed():
    torch.testing.assert_close(codes_of(0) @ codes_of(0).T, torch.eye(4), rtol=0, atol=1e-6)
    assert not torch.allclose(codes_of(0), codes_of(1))


def test_noise_flips_both_features_independently_and_to_every_other_label_alike():
    sets = theorem1.make_sets(20_000, SIZE, 0.9, 0.7, seed=1)
    x, y = sets["train"]
    pixel, patch = labels_of(x, codes_of(1))
    assert torch.bincount(y, minlength=4).float().div(len(y)).sub(0.25).abs().max() < 0.016  # 5 standard deviations
    assert (pixel == y).float().mean() == pytest.approx(0.9, abs=0.011)
    assert (patch == y).float().mean() == pytest.approx(0.7, abs=0.017)
    assert ((pixel == y) & (patch == y)).float().mean() == pytest.approx(0.63, abs=0.018)
    shifts = torch.bincount(((patch - y) % 4)[patch != y], minlength=4).float()
    assert shifts[1:].div(shifts.sum()).sub(1 / 3).abs().max() < 0.035
    for name, shifts in {"pixel_spurious": (1, 0), "patch_spurious": (0, 1)}.items():  # the true feature has no noise
        x, y = sets[name]
        for labels, shift in zip(labels_of(x, codes_of(1)), shifts, strict=True):
            assert torch.equal(labels, (y + shift) % 4)


def test_the_patch_network_ignores_the_order_of_patches_and_the_mlp_does_not():
    x, order = torch.randn(6, 10, 4), torch.randperm(10)
    network, mlp = theorem1.NETWORKS["FCN"](), theorem1.NETWORKS["MLP"]()
    torch.testing.assert_close(network(x), network(x[:, order]))
    assert not torch.allclose(mlp(x), mlp(x[:, order]))
    assert [tuple(p.shape) for p in mlp.parameters() if p.dim() == 2] == [(100, 40), (100, 100), (4, 100)]


@pytest.mark.slow
def test_the_aligned_network_keeps_more_than_50_points_over_the_misaligned_one_both_ways(tmp_path):
    theorem1.main(["noiseless", "--output", str(tmp_path), "--seeds", "0", "--quick"])
    runs = {run["panel"]: run for run in json.loads((tmp_path / "theorem1_noiseless.json").read_text())}
    assert {name: len(run["curves"]["validation"]) for name, run in runs.items()} == {"MLP": 10, "FCN": 10}
    final = {name: run["final"] for name, run in runs.items()}
    assert final["MLP"]["patch_spurious"] - final["FCN"]["patch_spurious"] > 50
    assert final["FCN"]["pixel_spurious"] - final["MLP"]["pixel_spurious"] > 50
    assert (tmp_path / "theorem1_noiseless.png").stat().st_size > 10_000


@pytest.fixture
def functions():
    return theorem2.Branches(3, torch.Generator().manual_seed(0))


def test_the_interval_of_the_condition_chooses_the_function(functions):
    data = functions.draw(500, torch.Generator().manual_seed(1))
    for inputs, target, branch in zip(*(part[:60] for part in data), strict=True):
        condition, z = inputs[0].item(), inputs[2:]
        assert branch == (0 if condition < -1 / 3 else 1 if condition < 1 / 3 else 2)
        expected = functions.second[branch] @ torch.tanh(functions.first[branch] @ z)
        torch.testing.assert_close(target, expected)
    assert torch.equal(data.inputs[:, 1], torch.ones(500))
    assert torch.bincount(data.branches).min() > 120


def test_targets_have_unit_variance_and_held_out_samples_the_same_functions(functions):
    data, held_out = theorem2.make_sets(3, 4000, seed=0)
    assert data.targets.std().item() == pytest.approx(1, abs=1e-5)
    ratio = functions.apply(held_out.inputs[:, 2:], held_out.branches) / held_out.targets
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=1e-4)
    zero = torch.zeros(4000, theorem2.FEATURES)
    assert theorem2.squared_error(zero, data.targets).item() == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_the_quick_form_shows_the_same_order_as_the_whole(tmp_path):
    theorem2.main(["--output", str(tmp_path), "--quick"])
    one, four, eight = json.loads((tmp_path / "theorem2.json").read_text())
    assert one["error"] > four["error"] + 0.15
    for row in (four, eight):
        assert row["error"] < row["dense_error"] - 0.08
        assert row["nmi"] > 0.5
