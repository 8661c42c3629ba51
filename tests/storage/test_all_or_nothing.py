"""Result files: all under their final names, or none."""

import pytest

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.storage.all_or_nothing import delivered


def test_files_appear_together_at_the_end(tmp_path):
    with delivered(tmp_path / "a" / "b", ["one", "two"]) as folder:
        (folder / "one").write_text("1")
        (folder / "two").write_text("2")
        assert not (tmp_path / "a" / "b" / "one").exists()
    assert {path.name: path.read_text() for path in (tmp_path / "a" / "b").iterdir()} == {"one": "1", "two": "2"}


@pytest.mark.parametrize("existed", [True, False])
def test_nothing_is_left_after_an_error(tmp_path, existed):
    target = tmp_path / "target"
    if existed:
        target.mkdir()

    def fail():
        with delivered(target, ["one"]) as folder:
            (folder / "one").write_text("1")
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    assert target.exists() is existed
    assert list(tmp_path.rglob("*")) == ([target] if existed else [])


def test_existing_files_are_kept_unless_they_may_be_replaced(tmp_path):
    (tmp_path / "one").write_text("mine")
    (tmp_path / "other").write_text("mine")
    with (
        pytest.raises(ArgumentError, match=r"output=.*holds one already; choose another, or --force"),
        delivered(tmp_path, ["one"]),
    ):
        pytest.fail("the work must not begin")
    with delivered(tmp_path, ["one"], overwrite=True) as folder:
        (folder / "one").write_text("new")
    assert (tmp_path / "one").read_text() == "new"
    assert (tmp_path / "other").read_text() == "mine"


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(ArgumentError, match=r"output=.*file': cannot be written"),
        delivered(tmp_path / "file", ["one"]),
    ):
        pytest.fail("the work must not begin")
