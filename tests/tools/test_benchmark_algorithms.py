"""The benchmark takes the steps that it says it takes; its times are not tested."""

import json
from itertools import product

import pytest
import torch

from tests.load_tool import load_tool
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING

QUICK = ["--model", "test_vit", "--img-size", "32", "--batch-size", "2", "--rounds", "2", "--warmup", "0"]


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark_algorithms")


@pytest.mark.slow
def test_every_method_is_measured_relative_to_erm(tool, tmp_path, capsys):
    words = [*QUICK, "--no-memory", "--threads", "1", "--output", str(tmp_path / "rows.json")]
    tool.main(words)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == list(ALGORITHMS)
    assert rows[0]["ratio"] == [1.0, 1.0, 1.0]
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line.startswith("| ")]) == 1 + len(ALGORITHMS)


def test_penalties_have_their_full_weight_and_turns_are_timed_together(tool, monkeypatch):
    args = tool.build_parser().parse_args([*QUICK, "--no-memory"])
    assert tool.turns("DANN") == 2
    assert tool.turns("IRM") == 1
    step = tool.make_step("IRM", tool.make_network("test_vit", args), args)
    (algorithm,) = (cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "annealed"))
    assert algorithm.annealed
    steps = dict.fromkeys(("IRM", "DANN"), 0)
    monkeypatch.setattr(tool, "make_step", lambda name, *_: lambda: steps.update({name: steps[name] + 1}))
    times = tool.measure_times([tool.Entry("test_vit", name) for name in steps], args)
    assert {entry.algorithm: len(found) for entry, found in times.items()} == {"IRM": 2, "DANN": 2}
    assert steps == {"IRM": 2, "DANN": 4}


@pytest.mark.slow
def test_several_models_averaged_weights_and_inference(tool, tmp_path):
    words = ["--model", "test_vit", "test_vit2", *QUICK[2:], "--algorithm", "ERM", "--averaging", "swad", "moving"]
    words += ["--mode", "train", "inference", "--no-memory", "--output", str(tmp_path / "rows.json")]
    tool.main(words)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    methods = ["ERM", "ERM + swad", "ERM + moving"]
    expected = [
        (*pair, mode) for mode in ("train", "inference") for pair in product(("test_vit", "test_vit2"), methods)
    ]
    assert [(row["model"], row["algorithm"], row["mode"]) for row in rows] == expected
    bases = [row for row in rows if row["ratio"] == [1.0, 1.0, 1.0]]
    assert [(row["model"], row["mode"]) for row in bases] == [("test_vit", "train"), ("test_vit", "inference")]


def test_averages_follow_training_and_inference_leaves_weights_alone(tool, monkeypatch):
    args = tool.build_parser().parse_args([*QUICK, "--no-memory"])
    seen = []
    monkeypatch.setattr(AVERAGING["swad"], "update", lambda self, network, step: seen.append(step))
    step = tool.make_step("ERM + swad", tool.make_network("test_vit", args), args)
    for _ in range(3):
        step()
    assert seen == [0, 1, 2]
    network = tool.make_network("test_vit", args)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    tool.make_step("ERM", network, args, "inference")()
    assert not network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_an_unknown_method_is_refused_before_anything_is_measured(tool):
    with pytest.raises(SystemExit, match="algorithm='Sagnet': choose from ERM"):
        tool.main([*QUICK, "--algorithm", "Sagnet"])
