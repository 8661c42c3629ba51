"""Files that would do something if they could: a canary is made by whoever obeys one, and nobody may.

Each row of a table is a place and who reads it. The canary is a file in the working folder. Names that are formulas or
markup are `tests/cli/test_text.py`'s, links that would be published are `test_damaged_files.py`'s, and paths that lead
out of a folder `tests/data/readers`'.
"""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.load_tool import load_tool
from tests.storage.toy_runs import run as toy_run
from timm_moe_dg.errors import MoeDgError
from timm_moe_dg.layers.encoders.pretrained import load_satclip
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.storage.run_folder import Checkpoints, read_checkpoint

CANARY = "canary"
PROGRAMS = ("gs", "gswin32c", "gswin64c", "ghostscript", "djpeg", "convert", "xv", "display", "latex", "dvipng", "dot")


class Trap:
    """Makes the canary when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(CANARY),)


def zipped(path, content):
    """A zip archive with the pickle where torch's has it, and a member that leads out of wherever it is unpacked."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content))
        archive.writestr("archive/version", "3\n")
        archive.writestr(f"../{CANARY}", "")


def as_array(path, content):
    with path.open("wb") as file:  # np.save would add an extension
        np.save(file, np.array(content, dtype=object), allow_pickle=True)


PICKLES = {
    "pickle": lambda path, content: path.write_bytes(pickle.dumps(content)),
    "torch": lambda path, content: torch.save(content, path),
    "older torch": lambda path, content: torch.save(content, path, _use_new_zipfile_serialization=False),
    "zip": zipped,
    "array": as_array,
}
COMMAND = f"open({CANARY!r}, 'w')"
TAGS = [
    f"!!python/object/apply:os.mkdir [{CANARY}]",
    f'!!python/object/apply:builtins.exec ["{COMMAND}"]',
    f"steps: !!python/object/apply:os.mkdir [{CANARY}]",
]
JINJA = f"{{{{ cycler.__init__.__globals__.os.mkdir({CANARY!r}) }}}}"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty working folder, and a PATH of programs that each make the canary."""
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in PROGRAMS:
        (programs / name).write_text(f"#!/bin/sh\ntouch {tmp_path / CANARY}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(tool, *words):
    """Runs a tool, which may refuse or not; anything but its one line is a finding. Returns that line."""
    try:
        load_tool(tool).main([*map(str, words)])
        line = ""
    except SystemExit as ended:
        line = str(ended.code)
    assert "\n" not in line
    return line


def refused(read, *arguments):
    """Returns with what words something is refused."""
    with pytest.raises(MoeDgError) as caught:
        read(*arguments)
    return str(caught.value)


def sprung():
    """Whether the canary is there, which is removed."""
    there = Path(CANARY)
    found = there.exists()
    if there.is_dir():
        there.rmdir()
    else:
        there.unlink(missing_ok=True)
    return found


# Who reads weights -> how, from a path that has the given name
READERS = {
    "finetune": ("w.pth", lambda path: run("finetune", "--initial-checkpoint", path, *FINETUNE)),
    "finetune safetensors": ("w.safetensors", lambda path: run("finetune", "--initial-checkpoint", path, *FINETUNE)),
    "satclip": ("encoder.ckpt", lambda path: refused(load_satclip, path)),
}
FINETUNE = ["--model", "gmoe_tiny_patch16", "--model-kwargs", "depth=2", "moe_layers=(1,)", "--workers", 0]


@pytest.mark.parametrize("kind", sorted(PICKLES))
@pytest.mark.parametrize("reader", sorted(READERS))
def test_weights_run_nothing(reader, kind, place):
    name, read = READERS[reader]
    PICKLES[kind](place / name, {"state_dict": Trap(), "hyper_parameters": Trap()})
    line = read(place / name)
    assert not sprung()
    assert (place / name).stem in line  # it was this that was refused


@pytest.mark.parametrize("kind", sorted(PICKLES))
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin"])
def test_a_network_s_folder_runs_nothing(best, place, name, kind):
    folder = shutil.copytree(best, place / "best")
    (folder / "model.safetensors").unlink()
    PICKLES[kind](folder / name, Trap())
    assert str(folder) in refused(load_trained, f"local-dir:{folder}")
    assert not sprung()


@pytest.mark.parametrize("kind", sorted(PICKLES))
def test_a_checkpoint_runs_nothing(place, kind):
    path = Checkpoints(place).save(1, {"a": torch.zeros(1)})
    PICKLES[kind](path, {"format": 2, "state": Trap()})
    assert "is damaged" in refused(read_checkpoint, path)
    assert not sprung()


YAML_READERS = [
    ("finetune", "-c", "options.yaml"),
    ("finetune", "--resume", "runs/a"),
    ("sweep", "-c", "options.yaml", "--dry-run"),
    ("sweep", "--recipe", "options.yaml", "--dry-run"),
]


@pytest.mark.parametrize("text", TAGS)
def test_yaml_runs_nothing(data, place, text):
    (place / "options.yaml").write_text(text + "\n")
    (place / "runs" / "a").mkdir(parents=True)
    shutil.copy(place / "options.yaml", place / "runs" / "a" / "args.yaml")
    for tool, *words in YAML_READERS:
        assert "cannot be read as YAML" in run(tool, *words)
    assert not sprung()


WORDS = [
    ("finetune", "--model-kwargs", f"depth={COMMAND}"),
    ("finetune", "--model", f"$(touch {CANARY})"),
    ("sweep", "--datasets", "rotated_digits", "--models", f"{{'model': {COMMAND}}}", "--dry-run"),
    ("predict", "--model", "none", f"| touch {CANARY}"),
]


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_words_run_nothing(words):
    run(*words)
    assert not sprung()


# Fields of config.json that timm, or another reader of such files, would follow
FIELDS = [
    {"architecture": "os.system"},
    {"architecture": f"../{CANARY}"},
    {"model_args": {"act_layer": "os.mkdir"}},
    {"model_args": {"mlp_layer": {"__class__": "os.mkdir", "args": [CANARY]}}},
    {"pretrained_cfg": {"custom_load": "hf", "hf_hub_filename": "trap.pth", "file": "trap.pth"}},
    {"pretrained_cfg": {"url": "file:trap.pth", "source": "url"}},
    {"auto_map": {"AutoModel": "modeling.Trap"}, "trust_remote_code": True},
    {"label_names": [JINJA, "{% set x = cycler %}"]},
]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_a_configuration_runs_nothing(best, data, place, fields):
    folder = shutil.copytree(best, place / "best")
    torch.save(Trap(), "trap.pth")
    shutil.copy("trap.pth", folder / "trap.pth")
    (folder / "modeling.py").write_text(COMMAND)
    config = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        config[name] = {**config[name], **value} if isinstance(config.get(name), dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    run("predict", "--model", f"local-dir:{folder}", data, "-j", 0, "--output", "out.csv")
    assert not sprung()


# Name -> content that some decoder hands to another program, or reads other files for
IMAGES = {
    "a.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n",
    "b.png": b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/><script>1</script></svg>",
    "c.tif": b"push graphic-context\nviewbox 0 0 8 8\nimage over 0,0 0,0 '|touch canary'\npop graphic-context\n",
    "d.png": pickle.dumps(Trap()),
    "e.webp": b"\x1f\x8b\x08\x00",
}


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_an_image_starts_no_program(best, place, name):
    (place / "images").mkdir()
    Image.new("RGB", (8, 8)).save(place / "images" / "good.png")
    (place / "images" / name).write_bytes(IMAGES[name])
    run("predict", "--model", f"local-dir:{best}", place / "images", "-j", 0, "--output", place / "out.csv")
    assert not sprung()
    assert f"{name},,,unreadable" in (place / "out.csv").read_text()


@pytest.mark.parametrize("linked", ["best", "best_oracle", "checkpoints"])
def test_what_a_link_in_a_run_leads_to_stays(place, linked):
    """Replacing such a folder, or clearing it away, ends at the link; checkpoints may be on another disk."""
    toy_run(place / "a", upto=6)
    outside = place / "outside"
    (place / "a" / linked).rename(outside)
    (outside / "thesis.txt").write_text("years of work")
    (place / "a" / linked).symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    toy_run(place / "a", resume=True)
    # Checkpoints themselves are removed, wherever they are
    foreign = {path: data for path, data in before.items() if not path.name.startswith("step-")}
    assert {path: path.read_bytes() for path in foreign} == foreign
