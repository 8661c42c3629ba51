"""The function with branches, the agreement that the tool reports, and a tiny run."""

import json

import pytest
import torch

from tests.load_tool import load_tool

TOOL = load_tool("reproduce_theorem2")


@pytest.fixture
def functions():
    return TOOL.Branches(3, torch.Generator().manual_seed(0))


def test_the_interval_of_the_condition_chooses_the_function(functions):
    data = functions.draw(500, torch.Generator().manual_seed(1))
    for inputs, target, branch in zip(*(part[:60] for part in data), strict=True):
        condition, z = inputs[0].item(), inputs[2:]
        assert branch == (0 if condition < -1 / 3 else 1 if condition < 1 / 3 else 2)
        expected = functions.second[branch] @ torch.tanh(functions.first[branch] @ z)
        torch.testing.assert_close(target, expected)
    assert torch.equal(data.inputs[:, 1], torch.ones(500))
    assert torch.bincount(data.branches).min() > 120


def test_the_branch_decides_and_the_condition_enters_in_no_other_way(functions):
    z = torch.randn(1, TOOL.REST).expand(3, -1)
    outputs = functions.apply(z, torch.arange(3))
    assert torch.pdist(outputs).min() > 0.3


def test_targets_have_unit_variance_and_held_out_samples_the_same_functions():
    data, held_out = TOOL.make_sets(3, 4000, seed=0)
    assert data.targets.std().item() == pytest.approx(1, abs=1e-5)
    assert held_out.targets.std().item() == pytest.approx(1, abs=0.05)
    functions = TOOL.Branches(3, torch.Generator().manual_seed(0))
    direction = functions.apply(held_out.inputs[:, 2:], held_out.branches)
    ratio = direction / held_out.targets
    torch.testing.assert_close(ratio, ratio[0, 0].expand_as(ratio), rtol=1e-3, atol=1e-4)


def test_a_model_that_answers_zero_has_the_error_one():
    data, _ = TOOL.make_sets(3, 4000, seed=0)
    assert TOOL.squared_error(torch.zeros(4000, TOOL.FEATURES), data.targets).item() == pytest.approx(1, abs=0.01)


@pytest.mark.slow
def test_a_short_run_has_every_number_of_experts_for_every_seed(tmp_path):
    options = ["--branches", "2", "--samples", "1000", "--epochs", "2", "--seeds", "0", "1"]
    TOOL.main(["--output", str(tmp_path), *options])
    rows = json.loads((tmp_path / "theorem2.json").read_text())["runs"]
    assert [(row["seed"], row["num_experts"]) for row in rows] == [(s, n) for s in (0, 1) for n in (1, 2, 3, 4)]
    for row in rows:
        assert 0 < row["error"] < 1.1  # hardly trained: the outputs are still close to zero
        assert (row["nmi"] < 1e-9) == (row["experts_used"] == 1)
        assert row["experts_used"] <= row["num_experts"]
    assert TOOL.by_number(rows, "nmi").shape == (2, 4)
    assert TOOL.by_number(rows, "error")[1, 2] == rows[6]["error"]
    pytest.importorskip("matplotlib")
    assert (tmp_path / "theorem2.png").stat().st_size > 10_000
