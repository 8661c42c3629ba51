"""Files and folders are complete or unchanged, one process at a time owns a folder, and CSV and JSON text."""

import csv
import json
import os
import resource
import signal
import subprocess
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.storage.toy_runs import content
from timm_moe_dg.errors import ArgumentError, FolderInUseError, StorageError
from timm_moe_dg.storage.files import (
    all_or_nothing,
    append_line,
    is_owned,
    json_text,
    lock_file,
    owned,
    recovered,
    replaced,
    write_csv,
    write_text,
)
from timm_moe_dg.storage.run_folder import Checkpoints


@contextmanager
def full_disk(limit):
    """Makes every write beyond `limit` bytes of a file fail, for real; the error is EFBIG instead of ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def write_folder(path, size):
    with replaced(path) as fresh:
        (fresh / "weights").write_bytes(bytes(size))


def save_network(path, size):
    with replaced(path) as fresh:
        save_file({"weight": torch.zeros(size)}, fresh / "model.safetensors")


WRITERS = {
    "folder": write_folder,
    "safetensors": save_network,
    "file": lambda path, size: write_text(path, "x" * size),
    "line": lambda path, size: append_line(path, "x" * size),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_cannot_be_written_stays_as_it_was(tmp_path, kind):
    write = WRITERS[kind]
    write(tmp_path / "best", 10)
    before = content(tmp_path)
    with pytest.raises(StorageError, match=r"output='.*best': cannot be written"), full_disk(1000):
        write(tmp_path / "best", 2000)
    assert content(tmp_path) == before
    write(tmp_path / "best", 20)
    assert content(tmp_path) != before


@pytest.fixture
def disk_events(monkeypatch):
    """What reaches the disk, in order: names of flushed files and folders, and pairs of renamed ones."""
    events = []
    flush = os.fsync

    def fsync(descriptor):
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    def note(name):
        move = getattr(os, name)
        monkeypatch.setattr(os, name, lambda old, new: events.append((old.name, new.name)) or move(old, new))

    monkeypatch.setattr(os, "fsync", fsync)
    note("replace")
    note("rename")
    return events


def test_content_is_on_disk_before_its_name_and_the_name_before_the_end(tmp_path, disk_events):
    write_text(tmp_path / "a", "1")
    assert disk_events == [".a.new", (".a.new", "a"), tmp_path.name]
    disk_events.clear()
    append_line(tmp_path / "a", "2")
    assert disk_events == ["a"]
    disk_events.clear()
    with replaced(tmp_path / "best") as folder:
        (folder / "weights").write_text("1")
    assert disk_events == ["weights", ".best.new", (".best.new", "best"), tmp_path.name]
    disk_events.clear()
    Checkpoints(tmp_path).save(1, {})
    fresh = ".step-000001.pt.new"
    assert disk_events == [fresh, (fresh, "step-000001.pt"), tmp_path.name]


def test_what_a_killed_process_left_is_settled(tmp_path):
    for name in (".best.old", ".best.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
    recovered(tmp_path / "best")
    assert content(tmp_path) == {"best/weights": b".best.old"}


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_is_left_after_an_error(tmp_path, existed):
    target = tmp_path / "target"
    if existed:
        target.mkdir()

    def fail():
        with all_or_nothing(target, ["one"]) as folder:
            (folder / "one").write_text("1")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert target.exists() is existed
    assert list(tmp_path.rglob("*")) == ([target] if existed else [])


def test_existing_files_are_kept_unless_they_may_be_replaced(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(ArgumentError, match="output="), all_or_nothing(tmp_path, ["one"]):
        pytest.fail("the work must not begin")
    with all_or_nothing(tmp_path, ["one"], overwrite=True) as folder:
        (folder / "one").write_text("new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"one": "new", "other": "mine"}


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_an_interrupted_exchange_never_mixes_two_results_and_the_next_call_completes_it(tmp_path, monkeypatch, moved):
    names = ["metrics", "pictures", "predictions", "table"]
    for name in (*names, "notes"):
        (tmp_path / name).write_text("old")
    original, calls = os.replace, iter(range(10))

    def replace(*paths):
        if next(calls) == moved:
            raise KeyboardInterrupt
        original(*paths)

    def exchange():
        with all_or_nothing(tmp_path, names, overwrite=True) as folder:
            for name in ("metrics", "predictions", "table", "more"):  # no picture could be drawn
                (folder / name).write_text("new")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        exchange()
    monkeypatch.undo()
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}.pop("notes") == "old"
    assert {path.read_text() for path in tmp_path.iterdir() if path.name in names} <= {"new"}
    with pytest.raises(ArgumentError, match="output="), all_or_nothing(tmp_path, names):
        pytest.fail("the work must not begin")
    expected = {"metrics": "new", "predictions": "new", "table": "new", "more": "new", "notes": "old"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == expected


def test_a_kill_before_the_first_file_moves_leaves_all_files_to_the_next_call(tmp_path):
    """Old files that were not removed yet are removed."""
    (tmp_path / "unfinished-exchange" / ".replaced").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "unfinished-exchange" / ".replaced" / name).touch()
    (tmp_path / "unfinished-exchange" / "a").write_text("new")
    for name in "abc":
        (tmp_path / name).write_text("old")
    with all_or_nothing(tmp_path, ["d"]) as folder:
        (folder / "d").write_text("newest")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "new", "c": "old", "d": "newest"}


@pytest.mark.parametrize("place", ["target", "target/a"], ids=["of an exchange", "a file"])
def test_a_link_to_another_folder_and_a_file_in_its_place_are_refused(tmp_path, place):
    target, elsewhere = tmp_path / "target", tmp_path / "elsewhere"
    for folder in (target, elsewhere):
        folder.mkdir()
        (folder / "a").write_text("mine")
    (target / "unfinished-exchange").symlink_to(elsewhere)
    before = content(tmp_path)
    with pytest.raises(ArgumentError, match="output="), all_or_nothing(tmp_path / place, ["d"]):
        pytest.fail("the work must not begin")
    assert content(tmp_path) == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_files_have_the_modes_that_the_umask_says(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with replaced(tmp_path / "best") as fresh:
            save_file({"weight": torch.zeros(2)}, fresh / "model.safetensors")
        with all_or_nothing(tmp_path / "out", ["a"]) as work:
            save_file({"weight": torch.zeros(2)}, work / "a")
    finally:
        os.umask(before)
    for path in (tmp_path / "best" / "model.safetensors", tmp_path / "out" / "a"):
        assert path.stat().st_mode & 0o777 == mode


def test_csv_escapes_formulas_and_leaves_the_rest(tmp_path):
    """A carriage return ends no row."""
    rows = [["=1+1", "-x", "\tcat", "\rcat", "a\r\nb", "two\nlines"], ["'", -1, 2.5, 0, "é", " ", "a,b", 'say "x"']]
    write_csv(tmp_path / "a.csv", rows)
    expected = [["'=1+1", "'-x", r"\tcat", r"\rcat", r"a\r\nb", r"two\nlines"], list(map(str, rows[1]))]
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == expected


def test_json_has_null_for_nan_at_any_depth():
    value = {"a": float("nan"), "b": [1.5, (float("nan"), 2)], "c": {"d": [[float("nan")]]}, "e": "nan", "f": True}
    read = json.loads(json_text(value), parse_constant=lambda name: 1 / 0)
    assert read == {"a": None, "b": [1.5, [None, 2]], "c": {"d": [[None]]}, "e": "nan", "f": True}
    assert json_text({"a": 1}, indent=2) == '{\n  "a": 1\n}\n'


FORK = get_context("fork")


def own_and_wait(folder, ready, with_worker):
    with owned(folder):
        if with_worker and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        ready.set()
        time.sleep(60)


@contextmanager
def other_owner(folder, *, with_worker=False):
    """A process that owns the folder."""
    ready = FORK.Event()
    process = FORK.Process(target=own_and_wait, args=(folder, ready, with_worker))
    process.start()
    assert ready.wait(20)
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_a_second_owner_is_refused_and_the_first_named(tmp_path):
    with other_owner(tmp_path / "a") as first:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        complaint = rf"output='.*a': is in use by process {first.pid} on \S+; wait until .*--experiment"
        with pytest.raises(FolderInUseError, match=complaint), owned(tmp_path / "a"):
            pass
        assert is_owned(tmp_path / "a")
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        with owned(tmp_path / "b"):
            pass


@pytest.mark.parametrize("second", ["a", "link"])
def test_a_process_cannot_own_a_folder_twice_even_through_a_link(tmp_path, second):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with owned(tmp_path / "a"), pytest.raises(FolderInUseError), owned(tmp_path / second):
        pass


def test_the_lock_ends_with_its_process_though_a_worker_lives_on(tmp_path):
    with other_owner(tmp_path / "a", with_worker=True) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.join()
        assert lock_file(tmp_path / "a").exists()
        assert not is_owned(tmp_path / "a")
        assert not list(tmp_path.iterdir())  # whoever looks removes the files of a killed owner
        with owned(tmp_path / "a"):
            pass


def try_at_once(folder, barrier, owners):
    barrier.wait()
    try:
        with owned(folder):
            with owners.get_lock():
                owners.value += 1
            barrier.wait()
    except FolderInUseError:
        barrier.wait()


@pytest.mark.slow
def test_of_many_that_start_at_once_one_is_the_owner(tmp_path):
    for _ in range(3):
        barrier, owners = FORK.Barrier(6), FORK.Value("i", 0)
        processes = [
            FORK.Process(target=try_at_once, args=(tmp_path / "runs" / "a", barrier, owners)) for _ in range(6)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert owners.value == 1
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def look(folder, stop):
    while not stop.is_set():
        is_owned(folder)


def test_asking_keeps_no_process_from_starting(tmp_path):
    stop = FORK.Event()
    lookers = [FORK.Process(target=look, args=(tmp_path / "a", stop)) for _ in range(2)]
    for looker in lookers:
        looker.start()
    for _ in range(100):
        with owned(tmp_path / "a"):
            pass
    stop.set()
    for looker in lookers:
        looker.join()


def test_nothing_is_left_behind(tmp_path):
    run = tmp_path / "new" / "output" / "a"
    with owned(run):
        assert is_owned(run)
    assert not is_owned(run)
    assert not list(tmp_path.iterdir())
    with owned(run):
        run.mkdir()
    assert list(run.parent.iterdir()) == [run]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"output='.*file/\.a\.lock': cannot be written"), owned(tmp_path / "file/a"):
        pass


def test_another_user_s_lock_counts_as_owned(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("not yours")

    lock_file(tmp_path / "a").touch()
    monkeypatch.setattr("timm_moe_dg.storage.files.FileLock", refuse)
    assert is_owned(tmp_path / "a")


WITHOUT_UNIX = """
import signal, sys
sys.modules["fcntl"] = None
sys.modules["resource"] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGCHLD"):
    delattr(signal, name)
import timm_moe_dg, timm_moe_dg.finetuning, timm_moe_dg.inference.report
import timm_moe_dg.comparisons.jobs
"""


@pytest.mark.slow
def test_the_package_imports_without_the_modules_and_signals_of_unix(fresh_python):
    path = str(Path(__file__).parents[2])
    subprocess.run([fresh_python, "-c", WITHOUT_UNIX], check=True, env={**os.environ, "PYTHONPATH": path})
