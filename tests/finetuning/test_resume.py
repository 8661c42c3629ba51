"""Which run is resumed, and that it is still the same."""

import os

import pytest

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.resume import run_to_resume
from timm_moe_dg.storage.ownership import owned


def begun(output, name, age, done=False):
    run = output / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "args.yaml").write_text("{}")
    if done:
        (run / "done").write_text("done")
    os.utime(run / "checkpoints", (1e9 - age, 1e9 - age))
    return run


def test_auto_finds_the_newest_unfinished_run(tmp_path):
    begun(tmp_path, "old", 50)
    newest = begun(tmp_path, "new", 20)
    begun(tmp_path, "finished", 10, done=True)
    assert run_to_resume("auto", tmp_path, None) == newest


def test_auto_without_a_name_does_not_start_a_run(tmp_path):
    begun(tmp_path, "finished", 10, done=True)
    with pytest.raises(ArgumentError, match=r"resume='auto': there is no unfinished run below .*--experiment"):
        run_to_resume("auto", tmp_path, None)


def test_auto_with_a_name_and_a_folder(tmp_path):
    old = begun(tmp_path, "old", 50)
    begun(tmp_path, "new", 20)
    assert run_to_resume("auto", tmp_path, "old") == old
    assert run_to_resume("auto", tmp_path, "fresh") is None
    assert run_to_resume(str(old), tmp_path, None) == old
    with pytest.raises(ArgumentError, match=r"resume='.*fresh': is not the folder of a run"):
        run_to_resume(str(tmp_path / "fresh"), tmp_path, None)


def test_auto_leaves_out_a_run_that_a_process_is_at(tmp_path):
    older = begun(tmp_path, "older", 50)
    with owned(begun(tmp_path, "newer", 20)):
        assert run_to_resume("auto", tmp_path, None) == older
