"""A disk that is really full: a small tmpfs, where root may mount one. One line, nothing damaged, and on it goes.

`tests/storage` shows the same of every single write, by limits on files and errors put in the way.
"""

import json
import re
import subprocess
from contextlib import suppress

import pytest
from safetensors.torch import load_file

from tests.load_tool import load_tool
from timm_moe_dg.storage.run_folder import read_checkpoint

pytestmark = pytest.mark.slow  # whole runs

SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2", "patch_size=8"]
MODEL = ["--model", "gmoe_tiny_patch16", *SIZE, "-b", "2", "--lr", "0.001", "--cpu-threads", "1", "--workers", "0"]
RUN = [*MODEL, "--steps", "5", "--eval-freq", "2", "--save-freq", "1", "--sched", "cosine"]
MEGABYTES = 16


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of a few megabytes."""
    folder = tmp_path_factory.mktemp("disk")
    words = ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no program mount")
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def whole(disk):
    """A run with room enough, which every other finds on the disk, and how many bytes of files it is."""
    load_tool("finetune").main([*RUN, "--output", str(disk), "--experiment", "whole"])
    return disk / "whole", sum(map(len, files(disk / "whole").values()))


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(path, room):
    """Writes zeros until nothing fits any more, and takes so many bytes back."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - room)


def outcome(run):
    """What is to be the same: every record but for its times, and every network."""
    rows = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name not in ("step_time", "args")} for row in rows]
    weights = {path.parent.name: path.read_bytes() for path in run.glob("best*/model.safetensors")}
    return kept, weights


# Room in bytes, as shares of a finished run: not for a network, and for networks and not for a checkpoint
@pytest.mark.parametrize("share", [0.3, 1.8])
def test_a_full_disk_ends_a_run_in_one_line_and_it_goes_on_when_there_is_room(disk, whole, share):
    finished, size = whole
    before = files(finished)
    words = [*RUN, "--output", str(disk), "--experiment", f"share{share}", "--resume", "auto"]
    run, filler = disk / f"share{share}", disk / "filler"
    fill(filler, int(share * size))
    with pytest.raises(SystemExit) as caught:
        load_tool("finetune").main(words)
    assert re.search(r"output=.* cannot be written .*No space left on device", caught.value.code)
    assert "\n" not in caught.value.code
    assert not (run / "done").exists()
    for path in run.glob("checkpoints/*.pt"):
        read_checkpoint(path)
    for path in run.glob("best*/model.safetensors"):
        load_file(path)
    filler.unlink()
    load_tool("finetune").main(words)
    assert (run / "done").exists()
    assert outcome(run) == outcome(finished)
    assert files(finished) == before
