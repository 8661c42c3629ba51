"""Files that somebody else may have written: each kind of damage ends with one line that names file and field."""

import io
import json
import os
import re
import shutil
import signal

import pytest
import torch

from tests.hub.published import write_run
from timm_moe_dg.cli.arguments import read_yaml
from timm_moe_dg.data.readers.csv_tables import read_csv
from timm_moe_dg.errors import ArgumentError, CheckpointError, MoeDgError, RecordError
from timm_moe_dg.hub.folder import fill_from_run
from timm_moe_dg.networks.build import build_network
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.storage.run_folder import read_checkpoint

CONFIGS = [
    ({"architecture": 5}, r"architecture=5: must be a model's name"),
    ({"model_args": [1, 2]}, r"model_args=\[1, 2\]: must be a table"),
    ({"pretrained_cfg": None}, r"pretrained_cfg=None: must be a table"),
    *(
        ({"pretrained_cfg": settings}, "pretrained_cfg=.*: must be a table, with lists of numbers")
        for settings in ({"mean": "x"}, {"std": [0.5, "x", 0.5]}, {"mean": {"a": 1}}, {"input_size": "224"})
    ),
    ({"physical_values": "yes"}, r"physical_values='yes': must be true or false"),
    ({"label_names": "cd"}, r"label_names='cd': must be a list of class names"),
    ({"label_names": [["a"], ["b"]]}, r"label_names=.*: must be a list of class names"),
    ({"label_names": {"a": "x", "b": "y"}}, r"label_names=.*: must be a list of class names, or a table"),
    ({"expert_mode": 5}, r"expert_mode=5: must be 'routed' or 'shared'"),
]
TEXTS = [
    (b"", "cannot be read as JSON"),
    (b"[]", "holds no JSON object"),
    (bytes(range(256)), "cannot be read as JSON .*utf-8"),
    (b"[" * 100_000, "cannot be read as JSON .*recursion"),
]


@pytest.fixture
def copy(best, tmp_path):
    """A checkpoint's folder to damage."""
    return shutil.copytree(best, tmp_path / "best")


@pytest.mark.parametrize(("changed", "message"), CONFIGS)
def test_fields_of_a_configuration_have_their_types(copy, changed, message):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=rf"best/config\.json': {message}"):
        load_trained(f"local-dir:{copy}")


@pytest.mark.parametrize(("content", "message"), TEXTS)
def test_a_configuration_is_a_json_object(copy, content, message):
    (copy / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"best/config\.json': {message}"):
        load_trained(f"local-dir:{copy}")


CHECKPOINTS = [
    {"head.weight": 5},
    {"model_dict": [1]},
    {"head.weight": "x", "patch_embed.proj.weight": "y"},
    {"head.weight": torch.tensor(5.0)},
    {1: torch.zeros(2)},
    [1, 2],
    None,
]


@pytest.mark.parametrize("content", [*CHECKPOINTS, b"", b"hello " * 50, b'{"head.weight": 5}'], ids=str)
def test_a_checkpoint_holds_tensors_by_name(tmp_path, content):
    path = tmp_path / "weights.pt"
    path.write_bytes(content if isinstance(content, bytes) else saved(content))
    with pytest.raises(CheckpointError, match=r"cannot start gmoe_tiny_patch16|cannot load this checkpoint"):
        build_network("gmoe_tiny_patch16", 2, initial_checkpoint=path, model_kwargs={"depth": 2, "moe_layers": (1,)})


def test_records_that_are_no_files_are_no_runs(tmp_path):
    (tmp_path / "folder" / "results.jsonl").mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / "results.jsonl")  # to open it would wait for a writer
    for name in ("folder", "pipe"):
        (tmp_path / name / "done").touch()
    assert find_runs([tmp_path]) == ([], [])


@pytest.fixture
def pipe(tmp_path):
    """A named pipe, on which a reader would wait for a writer; an alarm ends the wait."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("a named pipe was opened"))
    signal.alarm(20)
    os.mkfifo(tmp_path / "pipe")
    yield tmp_path / "pipe"
    signal.alarm(0)


PIPES = {
    "config.json": lambda folder: load_trained(f"local-dir:{folder}"),
    "model.safetensors": lambda folder: load_trained(f"local-dir:{folder}"),
    "weights.pt": lambda folder: build_network("gmoe_tiny_patch16", 2, initial_checkpoint=folder / "weights.pt"),
    "step-1.pt": lambda folder: read_checkpoint(folder / "step-1.pt"),
    "results.jsonl": lambda folder: read_records(folder / "results.jsonl"),
    "metadata.csv": lambda folder: read_csv(folder / "metadata.csv", []),
    "options.yaml": lambda folder: read_yaml(str(folder / "options.yaml"), "config"),
}


@pytest.mark.parametrize("name", PIPES)
def test_named_pipes_are_refused(copy, pipe, name):
    (copy / name).unlink(missing_ok=True)
    pipe.rename(copy / name)
    with pytest.raises(MoeDgError, match=rf"{re.escape(name)}.*not a regular file"):
        PIPES[name](copy)


def test_a_folder_of_runs_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(RecordError, match=r"cannot be listed \(Permission denied\); make it readable"):
        find_runs([tmp_path])


@pytest.mark.parametrize("place", ["learning_curves.png", "figures/map.png", "report.html", "best/config.json", "best"])
def test_what_a_link_leads_to_is_not_published(tmp_path, place):
    run, secret = write_run(tmp_path / "run"), tmp_path / "secret"
    linked = run / place
    linked.parent.mkdir(exist_ok=True)
    if linked.exists():
        linked.rename(secret)
    else:
        secret.write_text("secret")
    linked.symlink_to(secret)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArgumentError, match=rf"{re.escape(place)} is a link, and its target would be published"):
        fill_from_run(tmp_path / "folder", run, with_report=True)
    assert not list((tmp_path / "folder").iterdir())


def saved(content: object) -> bytes:
    """What torch.save writes."""
    stored = io.BytesIO()
    torch.save(content, stored)
    return stored.getvalue()
