"""The coverage tool: what it counts of one small family, and that it goes on where it stopped."""

import json
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import GluMlp, Mlp

from tests.load_tool import load_tool


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_forms_are_told_apart():
    tool = load_tool("upcycling_coverage")
    assert tool.form_of(Mlp(4, 8)) != tool.form_of(GluMlp(4, 8))


def test_an_architecture_is_surveyed_without_storage():
    row = load_tool("upcycling_coverage").survey("test_vit")
    assert row["forms"]
    assert "test_vit" in row.values()


def test_perturbing_leaves_no_parameter_at_zero_and_no_two_alike():
    tool = load_tool("upcycling_coverage")
    model = timm.create_model("test_vit", num_classes=3)
    tool.perturb(model)
    assert all(parameter.abs().sum() > 0 for parameter in model.parameters())
    images = torch.randn(2, 3, 160, 160)
    assert not torch.equal(tool.logits(model, images)[0], tool.logits(model, images)[1])


@pytest.mark.slow
def test_one_family_is_compared_written_and_not_done_again(tmp_path, capsys):
    tool = load_tool("upcycling_coverage")
    tool.main(["--output", str(tmp_path), "--only", "edgenext"])
    files = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert files
    first = capsys.readouterr().out
    tool.main(["--output", str(tmp_path), "--only", "edgenext"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == files
    assert first.splitlines()[-1] in capsys.readouterr().out
