"""The loader benchmark reads the same files with both loaders; its times are not tested."""

import json

import pytest
import torch
from PIL import Image

from tests.load_tool import load_tool


@pytest.fixture(scope="module")
def tool():
    return load_tool("benchmark_loader")


@pytest.fixture
def args(tool):
    return tool.build_parser().parse_args(["--batch-size", "4", "--batches", "1", "--rounds", "1"])


@pytest.fixture
def folder(tool, tmp_path):
    for domain in ("a", "b"):
        tool.write_images(tmp_path / "files" / domain / "only", (64, 48), 6)
    return tmp_path / "files"


def test_generated_files_have_the_size_and_differ(folder):
    files = list((folder / "a" / "only").iterdir())
    assert {Image.open(file).size for file in files} == {(64, 48)}
    assert len({file.read_bytes() for file in files}) == 6


def test_both_loaders_give_the_same_kind_of_batch_of_the_same_files(tool, args, folder):
    domain = tool.pooled(folder)
    assert len(domain) == 12
    (images, _), *_ = next(iter(tool.our_loader(domain, args)))
    others, _ = next(iter(tool.domainbed_loader(tool.DomainBedImages(domain.paths), args)))
    assert images.shape == others.shape == (4, 3, 224, 224)
    assert images.dtype == others.dtype == torch.float32
    theirs = tool.DomainBedImages(domain.paths)
    assert all(theirs.image(index).tobytes() == domain.image(index).tobytes() for index in range(12))


def test_figures_of_a_run(tool, folder, tmp_path, capsys):
    words = ["--data-dir", folder, "--batch-size", "2", "--batches", "1", "--rounds", "1", "--model", "test_vit3"]
    output = tmp_path / "rows.json"
    tool.main([*map(str, words), "--output", str(output)])
    (row,) = json.loads(output.read_text())["rows"]
    assert row["files"] == str(folder)
    assert row["ratio"][1] == pytest.approx(row["ours"] / row["domainbed"])
    assert set(row["milliseconds"]) == {"ours", "domainbed"}
    assert 0 <= row["step"]["waiting"] < 1
    assert "images/s" in capsys.readouterr().out
