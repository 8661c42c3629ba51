"""Which run is resumed, that it is still the same, and that one process at a time writes to its folder."""

import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import ones

from tests.finetuning.plans import image_folder
from tests.invented import make_record
from timm_moe_dg.comparisons.jobs import Job
from timm_moe_dg.errors import ArgumentError, FolderInUseError, ProcessLostError
from timm_moe_dg.finetuning import resume
from timm_moe_dg.finetuning.messages import RunLog
from timm_moe_dg.finetuning.plan import RunPlan, make_plan
from timm_moe_dg.finetuning.resume import lock_folder, nothing_to_do, parse_resumable, run_to_resume
from timm_moe_dg.finetuning.run import FineTuning
from timm_moe_dg.protocols.options import RunOptions, run_parser
from timm_moe_dg.storage.files import is_owned, lock_file, owned


def begun(output, name, age, done=False):
    run = output / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "args.yaml").write_text("{}")
    if done:
        (run / "done").write_text("done")
    os.utime(run / "checkpoints", (1e9 - age, 1e9 - age))
    return run


def test_auto_finds_the_newest_unfinished_run_that_no_process_is_at(tmp_path):
    old, newest = begun(tmp_path, "old", 50), begun(tmp_path, "new", 20)
    begun(tmp_path, "finished", 10, done=True)
    assert run_to_resume("auto", tmp_path, None) == newest
    with owned(newest):
        assert run_to_resume("auto", tmp_path, None) == old
    assert run_to_resume("auto", tmp_path, "old") == run_to_resume(str(old), tmp_path, None) == old
    assert run_to_resume("auto", tmp_path, "fresh") is None


def test_runs_that_are_not_there_are_refused(tmp_path):
    begun(tmp_path, "finished", 10, done=True)
    for resumed in ("auto", str(tmp_path / "fresh")):
        with pytest.raises(ArgumentError, match=f"^resume='{resumed}'"):
            run_to_resume(resumed, tmp_path, None)


def test_an_average_of_runs_is_not_resumed(tmp_path):
    run = begun(tmp_path, "soup", 10, done=True)
    (run / "args.yaml").write_text("average_method: uniform\naverage_sha256: [a]\n")
    with pytest.raises(ArgumentError, match=r"average_method='uniform': finetune\.py has no such option"):
        parse_resumable(run_parser(), ["--resume", str(run), "--steps", "9"])


def test_the_lock_of_a_run_killed_at_its_last_file_is_removed_by_the_next_command(tmp_path):
    def resume(run):
        return nothing_to_do(parse_resumable(run_parser(), ["--resume", str(run)]))

    def state(run):
        return Job("a", (), run, run.with_suffix(".log")).state()

    for look in (resume, state):
        run = begun(tmp_path, look.__name__, 10, done=True)
        for path in (run, run.with_suffix(".log")):
            lock_file(path).touch()
            lock_file(path).with_suffix(".owner").write_text("process 1")
        assert "finished" in look(run)
        assert not lock_file(run).exists()
        assert not lock_file(run).with_suffix(".owner").exists()
    assert {path.name for path in tmp_path.iterdir() if "state" in path.name} == {"state"}


@pytest.fixture
def data(tmp_path):
    """Three domains of two classes."""
    image_folder(tmp_path / "data", *(f"{'abc'[n % 3]}/{'xy'[n % 2]}/{n}.bmp" for n in range(60)))
    return tmp_path / "data"


@pytest.fixture
def plan(tmp_path, data):
    """Plans a run, the first time with an evaluation in its folder."""
    base = ["--dataset", "folder", "--data-dir", str(data), "--output", str(tmp_path / "runs"), "--experiment", "r"]

    def make(*words):
        return make_plan(parse_resumable(run_parser(), [*base, *map(str, words)]))

    first = make()
    first.folder.add(make_record(args=dict(first.record_args)), lambda folder: folder.mkdir(exist_ok=True))
    return make


CHANGES = {
    "renamed": (lambda a: (a / "x" / "0.bmp").rename(a / "x" / "1000.bmp"), "'a' differs in the names of images"),
    "another domain": (lambda a: shutil.copytree(a, a.with_name("d")), "the domains are a, b, c, d and were a, b, c"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_is_not_resumed_on_other_data(plan, data, tmp_path, change):
    act, words = CHANGES[change]
    assert plan("--resume").folder.path == tmp_path / "runs" / "r"
    act(data / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    with pytest.raises(ArgumentError) as caught:
        plan("--resume")
    start = f"data_dir={str(data)!r}: the run to resume was started on other data: "
    assert str(caught.value).startswith(start)
    assert words in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_a_run_is_resumed_on_its_data_wherever_they_lie(plan, data, tmp_path):
    moved = shutil.move(data, tmp_path / "elsewhere")
    assert plan("--resume", "--data-dir", moved).identity() == plan("--resume", "--data-dir", moved).identity()
    other = shutil.copytree(moved, tmp_path / "of equal counts")
    (other / "c" / "x" / "2.bmp").rename(other / "c" / "x" / "3.bmp")
    with pytest.raises(ArgumentError, match=r"^data_dir='.*of equal counts': .*domain 'c' differs in the names"):
        plan("--resume", "--data-dir", other)


@pytest.mark.parametrize("kind", ["initial_checkpoint", "model"])
def test_a_run_is_not_resumed_from_other_initial_weights_under_the_same_name(data, tmp_path, kind):
    file = tmp_path / "start" / "model.safetensors"
    file.parent.mkdir()
    words = ["--initial-checkpoint", file] if kind == "initial_checkpoint" else []
    words = words or ["--model", f"local-dir:{file.parent}", "--pretrained"]
    base = ["--dataset", "folder", "--data-dir", data, "--output", tmp_path / "runs", "--experiment", "r", *words]
    plan = partial(parse_resumable, run_parser(), [*map(str, base), "--resume"])
    save_file({"weight": ones(2)}, file)
    first = make_plan(plan())
    first.folder.add(make_record(args=dict(first.record_args)), lambda folder: folder.mkdir(exist_ok=True))
    make_plan(plan())
    save_file({"weight": 2 * ones(2)}, file)
    with pytest.raises(ArgumentError, match=rf"^{kind}='.*start.*': .* from other weights under this name; restore"):
        make_plan(plan())


def test_code_and_precision_are_named_by_the_user_and_not_by_a_run_folder(tmp_path, monkeypatch):
    run = begun(tmp_path, "a", 0)
    for path in (run / "args.yaml", tmp_path / "own.yaml"):
        path.write_text("algorithm: own_methods:Method")
    words = ["--resume", str(run)]
    with pytest.raises(
        ArgumentError, match=r"^algorithm='own_methods:Method': .*args\.yaml names code; .*add --algorithm"
    ):
        parse_resumable(run_parser(), words)
    for further in (["--algorithm", "own_methods:Method"], ["-c", str(tmp_path / "own.yaml")]):
        assert parse_resumable(run_parser(), [*words, *further]).algorithm == "own_methods:Method"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args, checkpoints = {"mixed_precision": "bf16"}, SimpleNamespace(describe=lambda: "step-1.pt")
    folder = SimpleNamespace(path=run, records=[1], checkpoints=checkpoints, args=args)
    plan = SimpleNamespace(folder=folder, options=SimpleNamespace(algorithm="own_methods:Method"))
    line = FineTuning.interrupted(SimpleNamespace(plan=plan), RunLog([]).go_on(plan, num_processes=1))
    assert "accelerate launch --mixed_precision bf16 " in line
    assert line.endswith(f"--resume {run} --algorithm own_methods:Method")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One process, without accelerate."""
    monkeypatch.setattr(resume, "broadcast_object_list", lambda names: names)
    return SimpleNamespace(is_main_process=True)


@pytest.fixture
def planned(data):
    def plan(output: Path, experiment: str | None = None, **options: Any) -> RunPlan:
        of_data = {"dataset": "folder", "data_dir": str(data)}
        return make_plan(RunOptions(**of_data, output=str(output), experiment=experiment, steps=3, **options))

    return plan


def test_a_run_owns_its_folder_and_nothing_is_left_of_one_that_wrote_nothing(tmp_path, planned, processes):
    with lock_folder(planned(tmp_path / "runs", "a"), processes) as locked_plan:
        assert is_owned(locked_plan.folder.path)
    assert not (tmp_path / "runs").exists()


def test_a_given_name_that_is_taken_is_refused(tmp_path, planned, processes):
    plan = planned(tmp_path, "a")
    with owned(tmp_path / "a"), pytest.raises(FolderInUseError, match="is in use by"), lock_folder(plan, processes):
        pass
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("filled after the plan was made")
    with pytest.raises(ArgumentError, match="holds files of another run"), lock_folder(plan, processes):
        pass


def test_where_the_main_process_is_refused_the_others_end(tmp_path, planned, monkeypatch):
    monkeypatch.setattr(resume, "broadcast_object_list", lambda names: names)  # what the main process sent: no name
    with (
        pytest.raises(ProcessLostError, match="see its own message"),
        lock_folder(planned(tmp_path, "a"), SimpleNamespace(is_main_process=False)),
    ):
        pass
