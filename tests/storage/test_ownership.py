"""One owner per folder, whatever happens to the owner, and whoever looks."""

import errno
import fcntl
import os
import signal
import time
from contextlib import contextmanager
from multiprocessing import get_context

import pytest

from timm_moe_dg.errors import FolderInUseError, StorageError
from timm_moe_dg.storage.ownership import is_owned, lock_file, owned, start_number

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


def test_one_process_cannot_be_the_owner_twice(tmp_path):
    with owned(tmp_path / "a"), pytest.raises(FolderInUseError), owned(tmp_path / "a"):
        pass


def test_the_lock_dies_with_its_process_though_a_worker_lives_on(tmp_path):
    with other_owner(tmp_path / "a", with_worker=True) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.join()
        assert not is_owned(tmp_path / "a")
        with owned(tmp_path / "a"):
            pass


def try_at_once(folder, barrier, won):
    barrier.wait()
    try:
        with owned(folder):
            with won.get_lock():
                won.value += 1
            barrier.wait()
    except FolderInUseError:
        barrier.wait()


@pytest.mark.slow
def test_of_many_that_start_at_once_one_is_the_owner(tmp_path):
    for _ in range(10):
        barrier, won = FORK.Barrier(6), FORK.Value("i", 0)
        processes = [FORK.Process(target=try_at_once, args=(tmp_path / "runs" / "a", barrier, won)) for _ in range(6)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        assert won.value == 1
        assert not list(tmp_path.iterdir())


def look(folder, stop):
    while not stop.is_set():
        is_owned(folder)


def test_whoever_looks_keeps_nobody_from_starting(tmp_path):
    stop = FORK.Event()
    lookers = [FORK.Process(target=look, args=(tmp_path / "a", stop)) for _ in range(2)]
    for looker in lookers:
        looker.start()
    (tmp_path / "a").mkdir()  # an unfinished run, whose lock's file stays
    for _ in range(200):
        with owned(tmp_path / "a"):
            pass
    stop.set()
    for looker in lookers:
        looker.join()


def test_what_is_left_behind(tmp_path):
    run = tmp_path / "output" / "a"
    with owned(run):
        assert is_owned(run)
    assert not list(tmp_path.iterdir())
    with owned(run):
        run.mkdir()
    assert lock_file(run).exists()
    assert not is_owned(run)
    with owned(run):
        (run / "done").touch()
    assert [path.name for path in run.parent.iterdir()] == ["a"]


def test_the_order_of_starts_needs_no_clock(tmp_path):
    for name in ("a", "b", "a"):
        with owned(tmp_path / name):
            (tmp_path / name).mkdir(exist_ok=True)
    assert start_number(tmp_path / "a") > start_number(tmp_path / "b") > start_number(tmp_path / "c") == 0
    lock_file(tmp_path / "b").write_text("[")
    assert start_number(tmp_path / "b") == 0


def test_a_link_leads_to_the_same_lock(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with owned(tmp_path / "a"), pytest.raises(FolderInUseError), owned(tmp_path / "link"):
        pass


def test_without_locks_a_message_says_so(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with owned(tmp_path / "a"):
        pass
    assert "this file system has no locks (No locks available); nothing keeps two runs apart here" in caplog.text


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"output='.*file/\.a\.lock': cannot be written"), owned(tmp_path / "file/a"):
        pass


def test_a_lock_that_cannot_be_signed_is_let_go(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        with pytest.raises(StorageError, match="No space left"), owned(tmp_path / "a"):
            pass
    assert not is_owned(tmp_path / "a")
    assert not lock_file(tmp_path / "a").exists()
    with owned(tmp_path / "a"):
        assert is_owned(tmp_path / "a")
