"""tools/benchmark.py compares what it claims to compare; its times are not tested."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from itertools import product

import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.layers.experts import IMPLEMENTATIONS

SPEED = TOOLS.parent / "docs" / "results" / "speed.md"
QUICK = ["models", "--rounds", "2", "--warmup", "0", "--cpu-threads", "1"]
SMALL = ["--models", "gmoe", "--backbone", "test_vit", "--img-size", "32"]
TOKENS, WIDTH, HIDDEN, PROJECTION, EXPERTS = 5, 192, 768, 256, 6


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark")


@pytest.mark.slow
def test_the_equivalent_computes_as_much_as_the_experts_and_the_twin_is_the_dense_model(tmp_path):
    words = ["--models", "gmoe_tiny_patch16", "--img-size", "32", "--batch-size", "2", "--mode", "train"]
    # A process of its own: those that measure memory import the tool as their main module
    output = ["--memory", "--output", str(tmp_path / "rows.json")]
    command = [sys.executable, str(TOOLS / "benchmark.py"), *QUICK, *words, *output]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    for row in rows:
        # parameters, gradients and both of Adam's moments
        held = 4 * 4 * row["parameters"] / 2**20
        # activations of one small image, the libraries' own buffers and gradients on their way add less than half
        assert held < row["peak_mib"] < 1.5 * held + 50
    rows = {row["against"]: row for row in rows}
    mixture, twin, equivalent = (rows[name] for name in ("gmoe_tiny_patch16", "dense twin", "FLOP-equivalent"))
    router = 2 * TOKENS * (WIDTH * PROJECTION + PROJECTION * EXPERTS)
    assert mixture["gmacs"] * 1e9 == pytest.approx(equivalent["gmacs"] * 1e9 + router)
    assert equivalent["gmacs"] * 1e9 == pytest.approx(twin["gmacs"] * 1e9 + 2 * TOKENS * 2 * WIDTH * HIDDEN)
    dense = timm.create_model("deit_tiny_patch16_224", img_size=32)
    assert twin["parameters"] == sum(parameter.numel() for parameter in dense.parameters())
    assert mixture["ratio"][1] > 0
    assert "FLOP-equivalent" in done.stdout


def test_the_grid_of_settings_is_measured_and_printed(tool, tmp_path, capsys):
    implementations = [name for name in IMPLEMENTATIONS if name != "auto"]
    grid = {"--num-experts": ["2", "4"], "--amp-dtype": ["float32", "bfloat16"], "--implementation": implementations}
    words = [word for option, values in grid.items() for word in (option, *values)]
    words += ["--batch-size", "3", "--mode", "train", "--output", str(tmp_path / "rows.json")]
    tool.main([*QUICK, *SMALL, *words])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    mixtures = [row for row in rows if row["against"] == row["model"]]
    varied = [(str(row["options"]["num_experts"]), row["dtype"], row["implementation"]) for row in mixtures]
    assert varied == list(product(*grid.values()))
    assert all(row["taken"] == [row["implementation"]] for row in mixtures)
    dense = [row for row in rows if row["against"] == "dense twin"]
    twin = timm.create_model("test_vit", img_size=32)
    assert {row["parameters"] for row in dense} == {sum(parameter.numel() for parameter in twin.parameters())}
    where, _, heading, _, *lines = capsys.readouterr().out.splitlines()
    assert where.startswith("torch ")
    assert {line.count("|") for line in (heading, *lines)} == {12}
    for row, line in zip(rows, lines, strict=True):
        assert all(str(row[name]) in line for name in tool.CONDITIONS)
        assert f"{row['seconds'] * 1e3:.2f}" in line


def test_models_of_later_settings_are_compiled_too(tool, monkeypatch):
    monkeypatch.setitem(tool.PROGRAMS, "compiled", partial(torch.compile, backend="eager"))  # alike, and fast
    with torch._dynamo.config.patch(recompile_limit=6, fail_on_recompile_limit_hit=True):
        tool.main([*QUICK, *SMALL, "--program", "compiled", "--mode", "inference", "train", "--batch-size", "1", "2"])


def test_the_command_for_a_gpu_has_a_setting_for_each_combination(tool):
    (line,) = re.findall(r"^timm-moe-dg benchmark (models --device cuda .*)", SPEED.read_text(), re.MULTILINE)
    args = tool.build_parser().parse_args(line.replace("cuda", "cpu").split())  # here may be no GPU
    assert len(tool.settings_of(args)) == len(args.mode) * len(args.dtype) * len(args.program) * len(
        args.implementation
    )
    assert len(args.dtype) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backbone", "test_vit"], "ArgumentError: backbone='test_vit'"),
        (["--models", "gmoe_tiny"], "ArgumentError: model='gmoe_tiny'"),
        (["--models", "gmoe_tiny_patch16", "test_vit"], "ArgumentError: model='test_vit'"),
        (["--top-k", "1", "7"], ".*top_k=7"),
    ],
)
def test_a_mistake_is_named_before_anything_is_measured(tool, words, message, capsys):
    with pytest.raises(SystemExit, match=rf"^benchmark\.py: {message}"):
        tool.main(["models", *words])
    assert capsys.readouterr().out == ""
