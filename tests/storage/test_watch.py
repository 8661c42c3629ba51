"""What another program does to the files of a run is noticed at the next write."""

import os
import shutil

import pytest

from timm_moe_dg.errors import StorageError
from timm_moe_dg.storage.watch import Watch


@pytest.fixture
def watch(tmp_path):
    run = tmp_path / "run"
    (run / "best").mkdir(parents=True)
    (run / "results").write_text("1\n")
    (run / "best" / "weights").write_text("w")
    found = Watch(run)
    found.note("results", "best", "not_there_yet")
    found.check()
    return run, found


def test_what_the_run_writes_itself_is_noted(watch):
    run, seen = watch
    (run / "results").write_text("1\n2\n")
    shutil.rmtree(run / "best")
    (run / "best").mkdir()
    (run / "best" / "other").write_text("v")
    (run / "log").write_text("not watched")
    seen.note("results", "best")
    seen.check()


@pytest.mark.parametrize("name", ["results", "best/weights"])
@pytest.mark.parametrize("what", ["changed", "removed"])
def test_a_file_that_was_touched_is_named(watch, name, what):
    run, seen = watch
    if what == "removed":
        (run / name).unlink()
    else:
        look = os.stat(run / name)
        (run / name).write_text("x" * look.st_size)
        os.utime(run / name, ns=(look.st_atime_ns, look.st_mtime_ns + 1))
    with pytest.raises(StorageError, match=rf"output='.*run': {name} was {what} by something else .*--resume"):
        seen.check()


def test_a_folder_that_is_gone_is_said_to_be(watch):
    run, seen = watch
    shutil.rmtree(run)
    with pytest.raises(StorageError, match=r"output='.*run': was removed while .*; start the run again"):
        seen.check()
