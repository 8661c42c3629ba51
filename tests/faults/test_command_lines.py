"""Odd command lines: each ends with one line that names the option, its value and what to do; nothing is written."""

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.load_tool import TOOLS, load_tool
from timm_moe_dg.finetuning.plan import run_name
from timm_moe_dg.protocols.options import RunOptions

SIZES = {"patch_size": "8", "depth": "2", "embed_dim": "48", "num_heads": "3", "moe_layers": "(1,)"}
FINETUNE = ["--dataset", "folder", "--model", "gmoe_tiny_patch16", "--img-size", "32", "--steps", "1", "--workers", "0"]

# Model arguments -> what the line says
MODEL_KWARGS = [
    ({"num_heads": "5"}, r"cannot be built with .*'num_heads': 5.*divisible by num_heads.*change --model-kwargs"),
    ({"patch_size": "0"}, r"cannot be built with .*'patch_size': 0.*ZeroDivisionError"),
    ({"class_token": "False"}, r"cannot be built with .*'class_token': False.*needs the class token"),
    ({"in_chans": "1"}, r"in_chans=1: images are read as RGB, 3 channels; leave it out"),
    ({"top_k": "1.5"}, r"top_k=1\.5: choose 1 to num_experts=6"),
    ({"drop_path_rate": "2"}, r"drop_path_rate=2: give a rate from 0 to below 1"),
    ({"num_experts": "2.5"}, r"model_kwargs=.*'num_experts': 2\.5"),
]

# Tool, words -> what the line says; {best} and {data} are folders, {file} is a file
ROWS = [
    ("predict", "--model local-dir:{best} {data} --output new --force", r"force=True: parts are never replaced"),
    ("predict", "--model local-dir:{best} {data} --shard 1/2", r"output=None: one process writes a table; several"),
    ("predict", "--model local-dir:{best} {file}/x.csv", r"no such file, or no image below or matching it"),
    ("finetune", "--dataset folder --data-dir {data} --model gmoe_tiny_patch16 --img-size 1", r"img_size=1: .*give 16"),
    ("finetune", "--model a/b", r"model='a/b': Model name 'a/b' has no source prefix"),
    ("finetune", "-c {file}", r"config='.*': cannot be read as YAML \('utf-8' codec can't decode byte"),
    ("finetune", f"--resume {256 * 'x'}", r"File name too long: 'x*/args\.yaml'; check the path"),
    ("sweep", "--datasets folder --data-dir {data} --output {file}", r"output='.*': is a file; give the folder of all"),
    ("sweep", "--datasets rotated_digits --rows {file} --dry-run", r"rows='.*': cannot be read as YAML"),
]


@pytest.fixture
def before(tmp_path, data):
    """What lies in the working folder beforehand."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("kept")
    shutil.copy(data / "a" / "cat" / "a_0.png", tmp_path / "file")


@pytest.mark.parametrize(("changed", "message"), MODEL_KWARGS, ids=lambda value: str(value)[:40])
def test_model_arguments_that_no_network_has(ending, data, changed, message, tmp_path):
    words = [f"{name}={value}" for name, value in (SIZES | changed).items()]
    line = ending("finetune", *FINETUNE, "--data-dir", data, "--model-kwargs", *words)
    assert re.search(message, line), line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("tool", "words", "message"), ROWS, ids=lambda value: str(value)[:60])
def test_a_line_names_the_option_and_nothing_is_written(ending, before, data, best, tool, words, message, tmp_path):
    places = {"data": data, "best": best, "file": tmp_path / "file"}
    line = ending(tool, *(word.format(**places) for word in words.split()))
    assert re.search(message, line), line
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept", "out"]


def test_weights_that_answer_nan_are_refused(ending, best, data, tmp_path):
    shutil.copytree(best, tmp_path / "best")
    config = (tmp_path / "best" / "config.json").read_text()
    (tmp_path / "best" / "config.json").write_text(config.replace("weights_sha256", "of_other_weights"))
    weights = load_file(tmp_path / "best" / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, tmp_path / "best" / "model.safetensors")
    line = ending("predict", "--model", f"local-dir:{tmp_path / 'best'}", data, "-j", 0, "--output", "out.csv")
    assert "1 of its weights are not finite, norm.weight among them" in line
    weights["norm.weight"][:] = torch.finfo(torch.float32).max  # finite, but not what they make of an image
    save_file(weights, tmp_path / "best" / "model.safetensors")
    line = ending("predict", "--model", f"local-dir:{tmp_path / 'best'}", data, "-j", 0, "--output", "out.csv")
    assert re.search(r"its logits of '.*/a/cat/a_0\.png' are NaN; give another checkpoint", line)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_file_names_that_are_not_utf_8_are_escaped_in_every_table(kind, best, data, tmp_path, capsys):
    images = os.fsencode(tmp_path / "raw.tar")
    os.mkdir(images)
    shutil.copy(data / "a" / "cat" / "a_0.png", images + b"/\xff\xe9.png")
    if kind == "tar":
        (tmp_path / "raw.tar").rename(tmp_path / "raw")
        with tarfile.open(tmp_path / "raw.tar", "w") as tar:
            tar.add(os.fsencode(tmp_path / "raw") + b"/\xff\xe9.png", "\udcff\udce9.png")
    words = ["--model", f"local-dir:{best}", str(tmp_path / "raw.tar"), "-j", "0"]
    for output in (["--output", str(tmp_path / "out.csv")], ["--output", str(tmp_path / "parts")], []):
        load_tool("predict").main([*words, *output])
    tables = [pd.read_csv(tmp_path / "out.csv"), pd.read_parquet(tmp_path / "parts")]
    tables.append(pd.read_csv(io.StringIO(capsys.readouterr().out), skiprows=2))
    assert [table.path.tolist() for table in tables] == [[rf"{tmp_path}/raw.tar/\xff\xe9.png"]] * 3


def test_an_evaluation_of_a_file_whose_name_is_not_utf_8_has_a_table_that_pandas_reads(best, data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    folder = tmp_path / "data" / "a" / "cat"
    os.rename(folder / "a_0.png", os.fsencode(folder) + b"/caf\xe9.png")
    words = ["--dataset", "folder", "--data-dir", str(tmp_path / "data"), "-j", "0"]
    load_tool("evaluate").main(["--model", f"local-dir:{best}", *words, "--output", str(tmp_path / "scores")])
    names = pd.read_csv(tmp_path / "scores" / "predictions.csv").file
    assert names.str.endswith(r"caf\xe9.png").sum() == 1


def test_names_of_files_and_classes_are_escaped_in_predictions(best, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    config = json.loads((best / "config.json").read_text()) | {"label_names": ["\x1b[31m", "\u202etac"]}
    shutil.copytree(best, "best")
    Path("best/config.json").write_text(json.dumps(config))
    for name in ("a\x1b[2J\nb.png", "c\u202e.png"):
        Image.new("RGB", (8, 8)).save(name)
    Path("\x1b[0m.png").write_bytes(b"")
    load_tool("predict").main(["--model", "local-dir:best", ".", "-j", "0", "--skip-unreadable"])
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 3
    assert r"a\x1b[2J\nb.png" in captured.out
    assert r"unreadable: 1 of 3 images: ./\x1b[0m.png" in caplog.text
    assert captured.out.replace("\n", "").isprintable()


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_traceback(data, tmp_path, fresh_python):
    sweep = f"{fresh_python} {TOOLS / 'sweep.py'} --datasets folder --data-dir {data} --output {tmp_path / 'runs'}"
    command = f"{sweep} --trial-seeds $(seq -s ' ' 0 400) --dry-run | head -n 1"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, env=with_package())
    assert "Traceback" not in found.stderr
    assert found.stdout.startswith("# folder: ")


def with_package() -> dict[str, str]:
    """The environment, in which this package is found whichever is installed."""
    return {**os.environ, "PYTHONPATH": str(TOOLS.parent)}


def test_a_run_on_data_of_the_hub_has_a_name_without_slashes():
    name = run_name(RunOptions(dataset="hub:owner/name", model="hf-hub:a/b"))
    assert name.endswith("-hub_owner_name-a_b")
    assert "/" not in name
