"""The benchmark compares what it says it compares; its times are not tested."""

import json
import os
import re
import subprocess
import sys

import pytest
import timm
from PIL import Image

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.load_tool import TOOLS, load_tool

SCRIPT = TOOLS / "benchmark.py"
SPEED = TOOLS.parent / "docs" / "speed.md"
QUICK = ["--rounds", "2", "--warmup", "0", "--img-size", "32", "--threads", "1"]
TOKENS, WIDTH, HIDDEN, PROJECTION, EXPERTS = 5, 192, 768, 256, 6


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark")


def run(tool, tmp_path, *words):
    tool.main([*QUICK, "--output", str(tmp_path / "rows.json"), *words])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    return rows, {row["against"]: row for row in rows}


@pytest.mark.slow
def test_the_equivalent_computes_as_much_as_the_experts_and_the_twin_is_the_dense_model(tool, tmp_path, capsys):
    rows, by = run(tool, tmp_path, "--model", "gmoe_tiny_patch16", "--mode", "inference", "train", "--batch-size", "2")
    assert [row["mode"] for row in rows] == ["inference"] * 3 + ["train"] * 3
    own, twin, equivalent = (by[name] for name in ("gmoe_tiny_patch16", "dense twin", "FLOP-equivalent"))
    router = 2 * TOKENS * (WIDTH * PROJECTION + PROJECTION * EXPERTS)
    assert own["gmacs"] * 1e9 == pytest.approx(equivalent["gmacs"] * 1e9 + router)
    assert equivalent["gmacs"] * 1e9 == pytest.approx(twin["gmacs"] * 1e9 + 2 * TOKENS * 2 * WIDTH * HIDDEN)
    dense = timm.create_model("deit_tiny_patch16_224", img_size=32)
    assert twin["parameters"] == sum(parameter.numel() for parameter in dense.parameters())
    assert own["ratio"][1] > 0
    assert "FLOP-equivalent" in capsys.readouterr().out


@pytest.mark.slow
def test_metadata_models_are_measured_routed_and_against_the_shared_expert_too(tool, tmp_path):
    _, by = run(tool, tmp_path, "--model", "moge_tiny", "--top-k", "2", "--batch-size", "1")
    wider = by["FLOP-equivalent"]["gmacs"] - by["dense twin"]["gmacs"]
    # two blocks, two routed experts beside the shared one
    assert wider * 1e9 == pytest.approx(2 * 2 * TOKENS * 2 * WIDTH * HIDDEN)
    assert by["moge_tiny"]["gmacs"] > by["FLOP-equivalent"]["gmacs"]


@pytest.mark.slow
def test_the_layer_alone_over_a_grid_and_its_picture(tool, tmp_path):
    grid = ["--num-experts", "2", "4", "--batch-size", "1", "3", "--mode", "train"]
    rows, _ = run(
        tool, tmp_path, "--model", "gmoe_tiny_patch16", "--layer", *grid, "--plot", str(tmp_path / "cost.png")
    )
    assert len(rows) == 2 * 2 * 3
    assert {(row["options"]["num_experts"], row["batch_size"]) for row in rows} == {(2, 1), (2, 3), (4, 1), (4, 3)}
    dense = [row for row in rows if row["against"] == "dense twin"]
    assert {row["parameters"] for row in dense} == {2 * WIDTH * HIDDEN + WIDTH + HIDDEN}
    with Image.open(tmp_path / "cost.png") as picture:
        picture.verify()


@pytest.mark.slow
def test_types_programs_and_dispatches_are_varied_and_said_in_the_table(tool, tmp_path):
    words = ["--model", "gmoe_tiny_patch16", "--layer", "--batch-size", "1", "--table", str(tmp_path / "table.md")]
    varied = ["--dtype", "float32", "bfloat16", "--dispatch", "sorted", "grouped", "loop", "--program", "eager"]
    rows, _ = run(tool, tmp_path, *words, *varied)
    own = [row for row in rows if row["against"] == row["model"]]
    assert [(row["dtype"], row["dispatch"]) for row in own] == [
        (dtype, dispatch) for dtype in ("float32", "bfloat16") for dispatch in ("sorted", "grouped", "loop")
    ]
    assert all(row["taken"] == [row["dispatch"]] for row in own)
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
    words = ["--model", "gmoe_tiny_patch16", "--layer", "--batch-size", "1", "--program", "compiled"]
    _, by = run(tool, tmp_path, *words)
    assert by["gmoe_tiny_patch16"]["program"] == "compiled"
    assert by["gmoe_tiny_patch16"]["taken"] == []  # its program is no dispatch of an eager forward


@pytest.mark.parametrize("backbone", ["test_vit", "test_convnext2"])
def test_a_mixture_on_a_backbone_is_measured_against_that_backbone(tool, tmp_path, backbone):
    words = ["--model", "gmoe", "--backbone", backbone, "--batch-size", "1", "--rounds", "2", "--warmup", "0"]
    tool.main([*words, "--threads", "1", "--output", str(tmp_path / "rows.json")])
    by = {row["against"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    dense = timm.create_model(backbone)
    twin, equivalent = by["dense twin"], by["FLOP-equivalent"]
    assert twin["parameters"] == sum(parameter.numel() for parameter in dense.parameters())
    assert twin["gmacs"] < equivalent["gmacs"] < by["gmoe"]["gmacs"] < 1.3 * equivalent["gmacs"]


def test_the_command_for_a_gpu_is_one_that_the_tool_takes(tool):
    (line,) = re.findall(r"^python tools/benchmark\.py (--device cuda .*)$", SPEED.read_text(), flags=re.MULTILINE)
    args = tool.build_parser().parse_args(line.replace("cuda", "cpu").split())  # here may be no GPU
    assert len(tool.settings_of(args)) == 2 * 2 * 2 * 2
    assert args.table.name == "gpu.md"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backbone", "test_vit"], "backbone='test_vit': goes with --model gmoe alone"),
        (["--model", "gmoe_tiny"], "did you mean"),
        (["--model", "gmoe_tiny_patch16", "test_vit"], "'test_vit': has no mixture layers"),
        (["--against", "nosuch"], "'nosuch': no such model"),
        (["--top-k", "1", "7"], "top_k=7: choose 1 to num_experts=6"),
    ],
)
def test_a_model_that_cannot_be_is_named_before_anything_is_measured(tool, words, message, capsys):
    with pytest.raises(SystemExit, match=message):
        tool.main(words)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_peak_memory_holds_at_least_parameters_gradients_and_both_moments(tmp_path):
    words = ["--model", "gmoe_tiny_patch16", "--mode", "train", "--batch-size", "1", "--memory"]
    command = [sys.executable, str(SCRIPT), *QUICK, *words, "--output", str(tmp_path / "rows.json")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run(command, check=True, capture_output=True, env=environment)
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        held = 4 * 4 * row["parameters"] / 2**20
        # activations of one small image, the libraries' own buffers and gradients on their way add less than half
        assert held < row["peak_mib"] < 1.5 * held + 50
