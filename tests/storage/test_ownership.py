"""One process at a time owns a folder, however the process ends."""

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from timm_moe_dg.errors import FolderInUseError, StorageError
from timm_moe_dg.storage.ownership import is_owned, lock_file, owned

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


def test_a_process_cannot_own_a_folder_twice_even_through_a_link(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for second in ("a", "link"):
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
    for _ in range(10):
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
    monkeypatch.setattr("timm_moe_dg.storage.ownership.FileLock", refuse)
    assert is_owned(tmp_path / "a")


WITHOUT_UNIX = """
import signal, sys
sys.modules["fcntl"] = None
sys.modules["resource"] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGCHLD"):
    delattr(signal, name)
import timm_moe_dg, timm_moe_dg.finetuning, timm_moe_dg.report.pages
import timm_moe_dg.sweeping.jobs, timm_moe_dg.sweeping.slurm
"""


@pytest.mark.slow
def test_the_package_imports_without_the_modules_and_signals_of_unix(fresh_python):
    path = str(Path(__file__).parents[2])
    subprocess.run([fresh_python, "-c", WITHOUT_UNIX], check=True, env={**os.environ, "PYTHONPATH": path})
