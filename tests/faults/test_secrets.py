"""Secrets of the environment are in nothing that a tool writes or prints: each is a canary that is looked for."""

import os
import sys

import pytest

from tests.load_tool import TOOLS, load_tool

pytestmark = pytest.mark.slow  # whole runs, one of them a program that a sweep starts

SECRETS = {
    name: f"hf_canary{number}Canary{number}canary"
    for number, name in enumerate(
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "KAGGLE_KEY", "MY_PASSWORD")
    )
}
SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2", "patch_size=8"]
MODEL = ["gmoe_tiny_patch16", *SIZE, "--img-size", "32"]
RUN = [*MODEL, "-b", "2", "--steps", "3", "--eval-freq", "1", "--cpu-threads", "1"]
FOLDER = ["--data-dir", "{data}", "--workers", "0"]
SWEEP = ["--datasets", "folder", "--data-dir", "{data}", "--models", MODEL[0], "--trial-seeds", "0", "--domains", "0"]
TRAIN = ["--dataset", "folder", *FOLDER, "--output", "runs"]
BEST = ["--model", "local-dir:runs/a/best", "--workers", "0"]
# Tool and words, in an order in which each finds what it reads; {data} is a folder. And how it ends: None for well
ROWS = [
    ("finetune", [*TRAIN, "--model", *RUN, "--experiment", "a", "--log-tensorboard"], None),
    ("finetune", [*TRAIN, "--model", *RUN, "--experiment", "b", "--lr", "1e30"], "DivergenceError"),
    ("sweep", [*SWEEP, "--output", "sweep", "--", *RUN[1:], "--workers", "0"], None),
    ("predict", [*BEST, "{data}", "--output", "answers.csv"], None),
    ("report", ["runs/a"], None),
    ("push_to_hub", ["runs/a", "--repo-id", "owner/name", "--dry-run", "--output", "card"], None),
]
WRITTEN = {"args.yaml", "results.jsonl", "log.txt", "README.md", "report.html", "answers.csv"}


def test_no_secret_is_in_anything_that_is_written_or_printed(data, tmp_path, monkeypatch, capfd, caplog, fresh_python):
    monkeypatch.setattr(sys, "executable", fresh_python)  # of the run that the sweep starts
    monkeypatch.chdir(tmp_path)
    for name, value in {**SECRETS, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(TOOLS.parent)}.items():
        monkeypatch.setenv(name, value)
    for tool, words, ending in ROWS:
        assert run(tool, *(word.format(data=data) for word in words), ending=ending)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.name for path in files} >= WRITTEN
    assert [path for path, content in files.items() if holds_a_secret(content + os.fsencode(path))] == []
    printed = "".join([*capfd.readouterr(), caplog.text])
    assert "validation" in printed
    assert not holds_a_secret(printed.encode())


def run(tool, *words, ending):
    """Whether a tool ends as it is to."""
    try:
        load_tool(tool).main(words)
    except SystemExit as ended:
        return ending is not None and ending in str(ended.code) and not holds_a_secret(str(ended.code).encode())
    return ending is None


def holds_a_secret(content):
    return any(secret.encode() in content for secret in SECRETS.values())
