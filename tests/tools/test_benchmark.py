"""tools/benchmark.py compares what it claims to compare; its times are not tested."""

import json
import os
import re
import subprocess
import sys
from itertools import product

import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING

SPEED = TOOLS.parent / "docs" / "results" / "speed.md"
QUICK = ["--rounds", "2", "--warmup", "0", "--cpu-threads", "1"]
LAYER = ["--models", "gmoe", "--backbone", "test_vit", "--layer"]
METHODS = ["--models", "test_vit", "--img-size", "32", "--batch-size", "2", "--no-memory"]
TOKENS, WIDTH, HIDDEN, PROJECTION, EXPERTS = 5, 192, 768, 256, 6


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark")


def run(tool, tmp_path, command, *words):
    tool.main([command, *QUICK, "--output", str(tmp_path / "rows.json"), *words])
    return json.loads((tmp_path / "rows.json").read_text())["rows"]


def by_label(rows):
    return {row["against"]: row for row in rows}


@pytest.mark.slow
def test_the_equivalent_computes_as_much_as_the_experts_and_the_twin_is_the_dense_model(tmp_path):
    words = ["--models", "gmoe_tiny_patch16", "--img-size", "32", "--batch-size", "2", "--mode", "train"]
    # A process of its own: those that measure memory import the tool as their main module
    output = ["--memory", "--output", str(tmp_path / "rows.json")]
    command = [sys.executable, str(TOOLS / "benchmark.py"), "models", *QUICK, *words, *output]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for row in rows:
        # parameters, gradients and both of Adam's moments
        held = 4 * 4 * row["parameters"] / 2**20
        # activations of one small image, the libraries' own buffers and gradients on their way add less than half
        assert held < row["peak_mib"] < 1.5 * held + 50
    rows = by_label(rows)
    mixture, twin, equivalent = (rows[name] for name in ("gmoe_tiny_patch16", "dense twin", "FLOP-equivalent"))
    router = 2 * TOKENS * (WIDTH * PROJECTION + PROJECTION * EXPERTS)
    assert mixture["gmacs"] * 1e9 == pytest.approx(equivalent["gmacs"] * 1e9 + router)
    assert equivalent["gmacs"] * 1e9 == pytest.approx(twin["gmacs"] * 1e9 + 2 * TOKENS * 2 * WIDTH * HIDDEN)
    dense = timm.create_model("deit_tiny_patch16_224", img_size=32)
    assert twin["parameters"] == sum(parameter.numel() for parameter in dense.parameters())
    assert mixture["ratio"][1] > 0
    assert "FLOP-equivalent" in done.stdout


@pytest.mark.slow
def test_metadata_models_are_measured_routed_and_against_the_shared_expert_too(tool, tmp_path):
    words = ["--models", "moge_tiny", "--img-size", "32", "--top-k", "2", "--batch-size", "1"]
    rows = run(tool, tmp_path, "models", *words, "--mode", "inference", "train")
    assert [row["mode"] for row in rows] == ["inference"] * 3 + ["train"] * 3
    mixture, twin, equivalent = (row["gmacs"] * 1e9 for row in rows[:3])
    # two blocks, two routed experts beside the shared one
    assert equivalent - twin == pytest.approx(2 * 2 * TOKENS * 2 * WIDTH * HIDDEN)
    assert mixture > equivalent


def test_the_layer_alone_over_a_grid(tool, tmp_path):
    grid = ["--num-experts", "2", "4", "--batch-size", "1", "3", "--mode", "train"]
    rows = run(tool, tmp_path, "models", *LAYER, *grid)
    assert len(rows) == 2 * 2 * 3
    assert {(row["options"]["num_experts"], row["batch_size"]) for row in rows} == {(2, 1), (2, 3), (4, 1), (4, 3)}
    dense = [row for row in rows if row["against"] == "dense twin"]
    mlp = timm.create_model("test_vit").blocks[0].mlp
    assert {row["parameters"] for row in dense} == {sum(parameter.numel() for parameter in mlp.parameters())}


def test_types_and_implementations_are_varied_and_stand_in_the_table(tool, tmp_path):
    dtypes, implementations = ("float32", "bfloat16"), ("sorted", "grouped", "loop")
    varied = ["--amp-dtype", *dtypes, "--implementation", *implementations, "--batch-size", "1"]
    rows = run(tool, tmp_path, "models", *LAYER, *varied, "--table", str(tmp_path / "table.md"))
    mixtures = [row for row in rows if row["against"] == row["model"]]
    assert [(row["dtype"], row["implementation"]) for row in mixtures] == [*product(dtypes, implementations)]
    assert all(row["taken"] == [row["implementation"]] for row in mixtures)
    where, _, heading, _, *lines = (tmp_path / "table.md").read_text().splitlines()
    assert where.startswith("torch ")
    assert "1 threads" in where
    assert len(lines) == len(rows)
    assert {line.count("|") for line in (heading, *lines)} == {12}
    for row, line in zip(rows, lines, strict=True):
        assert all(str(row[name]) in line for name in tool.CONDITIONS)
        assert f"{row['seconds'] * 1e3:.2f}" in line


@pytest.mark.slow
def test_compiled_programs_are_measured(tool, tmp_path):
    rows = by_label(run(tool, tmp_path, "models", *LAYER, "--batch-size", "1", "--program", "compiled"))
    assert rows["gmoe"]["program"] == "compiled"
    assert rows["gmoe"]["taken"] == []  # a compiled program has no implementation of an eager forward


@pytest.mark.parametrize("backbone", ["test_vit", "test_convnext2"])
def test_a_mixture_on_a_backbone_is_measured_against_that_backbone(tool, tmp_path, backbone):
    words = ["--models", "gmoe", "--backbone", backbone, "--batch-size", "1"]
    rows = by_label(run(tool, tmp_path, "models", *words))
    dense = timm.create_model(backbone)
    twin, equivalent = rows["dense twin"], rows["FLOP-equivalent"]
    assert twin["parameters"] == sum(parameter.numel() for parameter in dense.parameters())
    assert twin["gmacs"] < equivalent["gmacs"] < rows["gmoe"]["gmacs"] < 1.3 * equivalent["gmacs"]


def test_the_command_for_a_gpu_has_a_setting_for_each_combination(tool):
    (line,) = re.findall(r"^timm-moe-dg benchmark (models --device cuda .*)$", SPEED.read_text(), re.MULTILINE)
    args = tool.build_parser().parse_args(line.replace("cuda", "cpu").split())  # here may be no GPU
    assert len(tool.settings_of(args)) == 2 * 2 * 2 * 2
    assert args.table.name == "gpu.md"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["models", "--backbone", "test_vit"], "backbone='test_vit': goes with --models gmoe alone"),
        (["models", "--models", "gmoe_tiny"], "did you mean"),
        (["models", "--models", "gmoe_tiny_patch16", "test_vit"], "'test_vit': has no mixture layers"),
        (["models", "--against", "nosuch"], "'nosuch': no such model"),
        (["models", "--top-k", "1", "7"], "top_k=7: choose 1 to num_experts=6"),
        (["methods", "--algorithms", "Sagnet"], "algorithm='Sagnet': choose from ERM"),
    ],
)
def test_a_mistake_is_named_before_anything_is_measured(tool, words, message, capsys):
    with pytest.raises(SystemExit, match=message):
        tool.main(words)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_every_method_is_measured_relative_to_erm_for_every_model_and_mode(tool, tmp_path, capsys):
    rows = run(tool, tmp_path, "methods", *METHODS)
    assert [row["algorithm"] for row in rows] == list(ALGORITHMS)
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out.splitlines()
    assert len([line for line in printed if line.startswith("| ")]) == 1 + len(ALGORITHMS)
    words = ["--models", "test_vit", "test_vit2", *METHODS[2:], "--algorithms", "ERM", "--averaging", "swad", "moving"]
    several = run(tool, tmp_path, "methods", *words, "--mode", "train", "inference")
    expected = product(("train", "inference"), ("test_vit", "test_vit2"), ("ERM", "ERM + swad", "ERM + moving"))
    assert [(row["mode"], row["model"], row["algorithm"]) for row in several] == list(expected)
    bases = [row for row in (*rows, *several) if row["ratio"] == [1.0, 1.0, 1.0]]
    assert bases == [rows[0], several[0], several[6]]


def test_the_papers_costs_stand_beside_steps_of_as_many_images(tool, monkeypatch, capsys):
    entries = [("resnet50.tv_in1k", "ERM + swad"), ("vit_tiny_patch16_224", "ERM"), ("gmoe_small_patch16", "ERM")]
    rows = [{**tool.Entry(model, name)._asdict(), "seconds": 1.0, "ratio": (1, 1, 1), "peak_mib": 2.0,
             "papers": tool.stated_costs("train", name, model)} for model, name in entries]  # fmt: skip
    monkeypatch.setattr(tool, "measure_methods", lambda args, mode: rows)
    tool.main(["methods", "--num-domains", "5", "--batch-size", "32"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[-1] for line in lines if line.startswith("| ")] == [
        "papers |",
        "1.21 s, 14.32 GB (GMoE, Table 16); 0.67 s, 13.23 GB (SF-MoE, Table 4) |",
        " |",
        "0.98 s, 12.28 GB (GMoE, Table 16) |",
    ]
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert tool.stated_costs("inference", "ERM", "gmoe_small_patch16") == "0.30 s, 1.05 GB (GMoE, Table 16)"
    assert not tool.is_papers_step(tool.build_parser().parse_args(["methods"]))


@pytest.fixture
def args(tool):
    return tool.build_parser().parse_args(["methods", *METHODS, *QUICK])


def test_penalties_have_their_full_weight_and_all_steps_of_a_method_are_timed_together(tool, args, monkeypatch):
    step = tool.method_step(tool.Entry("test_vit", "IRM"), tool.make_network("test_vit", args), args)
    (algorithm,) = (cell.cell_contents for cell in step.__closure__ if hasattr(cell.cell_contents, "annealed"))
    assert algorithm.annealed
    entries = [tool.Entry("test_vit", "IRM"), tool.Entry("test_vit", "DANN")]
    steps = dict.fromkeys(entries, 0)
    monkeypatch.setattr(tool, "method_step", lambda entry, *_: lambda: steps.update({entry: steps[entry] + 1}))
    times = tool.time_methods(entries, args)
    assert [len(times[entry]) for entry in entries] == [2, 2]
    assert [steps[entry] for entry in entries] == [2, 4]


def test_averages_follow_training_and_inference_leaves_weights_alone(tool, args, monkeypatch):
    averaged_steps = []
    monkeypatch.setattr(AVERAGING["swad"], "update", lambda self, network, step: averaged_steps.append(step))
    step = tool.method_step(tool.Entry("test_vit", "ERM + swad"), tool.make_network("test_vit", args), args)
    for _ in range(3):
        step()
    assert averaged_steps == [0, 1, 2]
    network = tool.make_network("test_vit", args)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    tool.method_step(tool.Entry("test_vit", "ERM", "inference"), network, args)()
    assert not network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
