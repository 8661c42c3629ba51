"""Ctrl-C, finished runs that take more steps, and faults that end a run in one line, never with a wrong `done`."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

from tests.load_tool import TOOLS, load_tool, run_tool
from timm_moe_dg.algorithms import Algorithm
from timm_moe_dg.cli.arguments import from_parsed, parse_arguments
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.protocols.planner import plan_runs
from timm_moe_dg.protocols.records import read_records

pytestmark = pytest.mark.slow  # whole runs, programs and processes

SIZE = ["--model-kwargs", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=3", "patch_size=8"]
RUN = ["--model", "gmoe_tiny_patch16", *SIZE, "--drop-path", "0.2", "--eval-freq", "3", "-b", "2", "--cpu-threads", "1"]
QUICK = ["--workers", "0", "--lr", "0.01"]
SWEEP = ["--datasets", "rotated_digits", "--trial-seeds", "0", "--domains", "0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run of 8 steps, and one of 5 that is asked for 8 when it is finished."""
    output = tmp_path_factory.mktemp("runs")
    common = [*RUN, *QUICK, "--save-rules", "oracle", "--output", output, "--experiment"]
    run_tool("finetune", *common, "whole", "--steps", 8)
    run_tool("finetune", *common, "extended", "--steps", 5)
    assert (output / "extended" / "done").exists()
    assert [path.name for path in (output / "extended" / "checkpoints").glob("*.pt")] == ["step-000004.pt"]
    run_tool("finetune", "--resume", output / "extended", "--steps", 8)
    return output


def test_an_extended_run_is_the_longer_one_bit_for_bit(runs):
    whole, extended = (read_records(runs / name / "results.jsonl") for name in ("whole", "extended"))
    assert [record.step for record in whole] == [0, 3, 6, 7]
    assert [record.step for record in extended] == [0, 3, 4, 6, 7]  # it was evaluated where it ended first
    extended = {record.step: record for record in extended}
    for record in whole:
        other = extended[record.step]
        assert (other.in_acc, other.out_acc, other.out_loss) == (record.in_acc, record.out_acc, record.out_loss)
        assert other.args["steps"] == 8
        if record.step != 6:  # whose losses are means since the record before
            assert other.losses == record.losses
    weights = [(runs / name / "best_oracle" / "model.safetensors").read_bytes() for name in ("whole", "extended")]
    assert weights[0] == weights[1]
    assert yaml.safe_load((runs / "extended" / "args.yaml").read_text())["steps"] == 8
    assert (runs / "extended" / "done").exists()


def test_a_finished_run_takes_no_other_options(runs, capsys, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    run_tool("finetune", "--resume", runs / "whole", "--steps", 4, "--lr", 0.5)
    said = f"{runs / 'whole'} is finished: nothing to do\n"
    assert capsys.readouterr().out == said
    with pytest.raises(SystemExit, match=r"ArgumentError: lr=0.5: the run to resume was started with 0.01"):
        run_tool("finetune", "--resume", runs / "whole", "--steps", 20, "--lr", 0.5)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before
    words = [*RUN, *QUICK, "--steps", 2, "--sched", "cosine", "--output", tmp_path, "--experiment", "a"]
    run_tool("finetune", *words)
    checkpoints = tmp_path / "a" / "checkpoints"
    assert not checkpoints.exists()
    checkpoints.mkdir()  # as a kill after `done` leaves them
    (checkpoints / "step-000001.pt").touch()
    run_tool("finetune", *words, "--resume", "auto")
    assert capsys.readouterr().out.endswith("is finished: nothing to do\n")
    assert not checkpoints.exists()
    run_tool("finetune", "--resume", tmp_path / "a", "--steps", 9)
    reason = "its schedule (cosine) goes with the 2 steps that it was begun with"
    assert f"nothing to do ({reason})" in capsys.readouterr().out


def test_a_finished_run_without_a_checkpoint_is_not_begun_anew(runs, capsys):
    kept = runs / "whole" / "checkpoints"
    kept.rename(runs / "moved")
    run_tool("finetune", "--resume", runs / "whole", "--steps", 20)
    (runs / "moved").rename(kept)
    assert "nothing to do (its last checkpoint is not there)" in capsys.readouterr().out


def test_ctrl_c_of_a_terminal_ends_the_run_and_its_workers_quietly_and_says_how_to_go_on(tmp_path):
    words = [sys.executable, str(TOOLS / "finetune.py"), *RUN, "--workers", "1", "--steps", "5000"]
    words += ["--save-freq", "1"]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS.parent), "OMP_NUM_THREADS": "1"}
    command = [*words, "--output", str(tmp_path), "--experiment", "my run"]
    with subprocess.Popen(
        command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not list(tmp_path.glob("my run/checkpoints/*.pt")) and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        text, _ = process.communicate(timeout=60)  # until the run and its workers have closed the pipe too
    assert process.returncode == 130, text
    (last,) = filter(str.strip, text.partition("Ctrl-C again ends at once\n")[2].splitlines())
    assert "step-0" in last
    words = shlex.split(last.partition("go on with: ")[2])
    assert words == ["python", "tools/finetune.py", "--resume", str(tmp_path / "my run")]


def test_what_changes_the_training_has_a_part_in_it_and_survives_reloading(tmp_path):
    words = [*RUN, *QUICK, "--steps", "2", "--aa", "rand-m9-mstd0.5", "--reprob", "0.3", "--label-smoothing", "0.1"]
    words += ["--class-weights", "balanced", "--mean", "0.1", "0.2", "0.3", "--std", "0.4", "0.5", "0.6"]
    for name, further in (("a", []), ("b", []), ("c", ["--reprob", "0.9"])):
        run_tool("finetune", *words, *further, "--output", tmp_path, "--experiment", name)
    a, b, c = (read_records(tmp_path / name / "results.jsonl")[-1] for name in "abc")
    assert (a.losses, a.out_loss) == (b.losses, b.out_loss)
    assert a.losses != c.losses
    config = json.loads((tmp_path / "a" / "best" / "config.json").read_text())
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]


def refused(tool, *words):
    with pytest.raises(SystemExit) as caught:
        run_tool(tool, *words)
    assert isinstance(caught.value.code, str)
    assert "\n" not in caught.value.code
    return caught.value.code


def test_full_memory_is_answered_with_options_that_take_less(tmp_path, monkeypatch):
    def limited(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Algorithm, "forward_domains", limited)
    line = refused("finetune", *RUN, *QUICK, "--steps", 5, "--output", tmp_path, "--experiment", "a")
    assert re.search(r"ArgumentError: batch_size=2: .* --grad-accum-steps .*\(CUDA out of memory", line)


DAMAGED = [b"\xff\xfe\x00binary", b"", b"[" * 20_000, b"format: 99"]


@pytest.mark.parametrize("content", DAMAGED, ids=["no text", "empty", "deep", "other format"])
def test_a_damaged_args_yaml_is_named_by_its_file(runs, tmp_path, content):
    run = shutil.copytree(runs / "whole", tmp_path / "a")
    (run / "args.yaml").write_bytes(content)
    options = from_parsed(SweepOptions, vars(parse_arguments(load_tool("sweep").build_parser(), SWEEP)))
    (planned,) = plan_runs(read_sweep(options, {}))
    shutil.copytree(run, run.parent / planned.name)
    for user, words in (
        ("finetune", ["--resume", run]),
        ("evaluate", ["--model", f"local-dir:{run / 'best'}"]),
        ("sweep", ["--status", *SWEEP, "--output", run.parent]),
    ):
        assert "args.yaml': " in refused(user, *words)
