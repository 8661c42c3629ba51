"""A run is the only one that writes to its folder, and names that were made up do not collide."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from timm_moe_dg.errors import ArgumentError, FolderInUseError, ProcessLostError
from timm_moe_dg.finetuning import plan, run
from timm_moe_dg.finetuning.plan import RunPlan, make_plan
from timm_moe_dg.finetuning.run import lock_folder
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.storage.ownership import is_owned, owned


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One process, without accelerate."""
    monkeypatch.setattr(run, "broadcast_object_list", lambda names: names)
    return SimpleNamespace(is_main_process=True)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two domains of two classes; nobody opens the files."""
    root = tmp_path_factory.mktemp("images")
    for number in range(5):
        for place in ("sea/one", "sea/two", "land/one", "land/two"):
            (root / place).mkdir(parents=True, exist_ok=True)
            (root / place / f"{number}.png").touch()
    return root


@pytest.fixture
def planned(images):
    def plan(output: Path, experiment: str | None = None, **options: Any) -> RunPlan:
        data = {"dataset": "folder", "data_dir": str(images)}
        return make_plan(RunOptions(**data, output=str(output), experiment=experiment, steps=3, **options))

    return plan


def test_a_run_owns_its_folder_and_nothing_is_left_of_one_that_wrote_nothing(tmp_path, planned, processes):
    with lock_folder(planned(tmp_path / "runs", "a"), processes) as locked_plan:
        assert is_owned(locked_plan.folder.path)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_owns_nothing(tmp_path, planned, processes):
    with owned(tmp_path / "a"), lock_folder(planned(tmp_path, "a", dry_run=True), processes):
        pass


def test_a_given_name_that_is_taken_is_refused(tmp_path, planned, processes):
    plan = planned(tmp_path, "a")
    with owned(tmp_path / "a"), pytest.raises(FolderInUseError, match="is in use by"), lock_folder(plan, processes):
        pass
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("filled after the plan was made")
    with pytest.raises(ArgumentError, match="holds files of another run"), lock_folder(plan, processes):
        pass


def test_names_that_were_made_up_get_numbers(tmp_path, planned, processes, monkeypatch):
    monkeypatch.setattr(run, "run_names", lambda options: iter(["same", "same-2", "same-3"]))
    with ExitStack() as stack:
        plans = [stack.enter_context(lock_folder(planned(tmp_path), processes)) for _ in range(3)]
        assert [locked_plan.options.experiment for locked_plan in plans] == ["same", "same-2", "same-3"]
    for locked_plan in plans:
        name = locked_plan.options.experiment
        assert (locked_plan.folder.path, locked_plan.folder.args["experiment"]) == (tmp_path / name, name)
        assert locked_plan.record_args["experiment"] == name


def test_a_made_up_name_is_one_that_is_not_there(tmp_path, planned):
    first = planned(tmp_path)
    name = first.options.experiment
    for taken in (name, f"{name}-2"):
        (tmp_path / taken).mkdir()
    names = plan.run_names(first.options)
    assert [next(names) for _ in range(3)] == [name, f"{name}-2", f"{name}-3"]
    assert list(plan.run_names(planned(tmp_path, "given").options)) == ["given"]


def test_where_the_main_process_is_refused_the_others_end(tmp_path, planned, monkeypatch):
    monkeypatch.setattr(run, "broadcast_object_list", lambda names: names)  # what the main process sent: no name
    with (
        pytest.raises(ProcessLostError, match="see its own message"),
        lock_folder(planned(tmp_path, "a"), SimpleNamespace(is_main_process=False)),
    ):
        pass
