"""The benchmark takes the steps that it says it takes; its times are not tested."""

import json

import pytest

from tests.load_tool import load_tool
from timm_moe_dg.algorithms import ALGORITHMS

QUICK = ["--model", "test_vit", "--img-size", "32", "--batch-size", "2", "--rounds", "2", "--warmup", "0"]


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark_algorithms")


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
    step = tool.make_step("IRM", tool.make_network(args), args)
    (algorithm,) = (cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "annealed"))
    assert algorithm.annealed
    steps = dict.fromkeys(("IRM", "DANN"), 0)
    monkeypatch.setattr(tool, "make_step", lambda name, *_: lambda: steps.update({name: steps[name] + 1}))
    assert {name: len(times) for name, times in tool.measure_times(list(steps), args).items()} == {"IRM": 2, "DANN": 2}
    assert steps == {"IRM": 2, "DANN": 4}


def test_an_unknown_method_is_refused_before_anything_is_measured(tool):
    with pytest.raises(SystemExit, match="algorithm='Sagnet': choose from ERM"):
        tool.main([*QUICK, "--algorithm", "Sagnet"])
