"""A folder with a manifest: what is intact is kept, what is not is made anew, what is another's is refused."""

import json
from pathlib import Path

import pytest

from timm_moe_dg.errors import ArgumentError, StorageError
from timm_moe_dg.storage.manifest import JOURNAL, MANIFEST, Manifest

IDENTITY = {"data_set": "letters", "weights": {"a": "1"}}


def filled(folder: Path, *names: str) -> Manifest:
    manifest = Manifest(folder, IDENTITY)
    for name in names:
        if name not in manifest:
            manifest.write(name, name.encode())
    return manifest


def test_the_manifest_holds_identity_facts_and_a_hash_per_file(tmp_path):
    filled(tmp_path / "out", "b/x", "a").finish({"seed": 3})
    table = json.loads((tmp_path / "out" / MANIFEST).read_text())
    expected = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # SHA-256 of the letter a
    assert list(table) == ["data_set", "weights", "seed", "files"]
    assert list(table["files"]) == ["a", "b/x"]
    assert table["files"]["a"] == {"size": 1, "sha256": expected}
    assert {path.name for path in (tmp_path / "out").rglob("*")} == {"a", "b", "x", MANIFEST}


@pytest.mark.parametrize("finished", [True, False])
def test_a_file_that_is_missing_or_differs_is_no_longer_held(tmp_path, finished):
    manifest = filled(tmp_path, "a", "b", "c", "d")
    if finished:
        manifest.finish({})
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_text("longer")
    (tmp_path / "c").write_text("?")  # of the same size
    again = Manifest(tmp_path, IDENTITY)
    assert [name in again for name in "abcd"] == [False, False, False, True]


def test_a_torn_line_at_the_journals_end_costs_that_file_alone(tmp_path):
    filled(tmp_path, "a", "b")
    journal = tmp_path / JOURNAL
    journal.write_text(journal.read_text()[:-20])
    again = filled(tmp_path, "c")
    assert [name in again for name in "abc"] == [True, False, True]
    assert [name in Manifest(tmp_path, IDENTITY) for name in "abc"] == [True, False, True]


def test_a_damaged_line_in_the_journal_costs_that_file_alone(tmp_path):
    filled(tmp_path, "a", "b")
    first, _, *rest = (tmp_path / JOURNAL).read_text().splitlines()
    (tmp_path / JOURNAL).write_text("\n".join([first, "no JSON", *rest]) + "\n")
    assert [name in Manifest(tmp_path, IDENTITY) for name in "ab"] == [False, True]


def test_what_a_killed_write_left_is_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    manifest = Manifest(tmp_path / "out", IDENTITY)
    (tmp_path / "out" / ".a.new").write_text("half")
    manifest.write("a", b"whole")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", JOURNAL]


def test_a_link_is_held_as_long_as_its_target_is_the_same(tmp_path):
    (tmp_path / "source").write_text("photograph")
    manifest = Manifest(tmp_path / "out", IDENTITY)
    manifest.link("natural/a", tmp_path / "source")
    assert (tmp_path / "out" / "natural" / "a").is_symlink()
    assert "natural/a" in Manifest(tmp_path / "out", IDENTITY)
    (tmp_path / "source").write_text("photographs")
    assert "natural/a" not in Manifest(tmp_path / "out", IDENTITY)


@pytest.mark.parametrize("finished", [True, False])
def test_another_data_sets_folder_is_refused_and_left_alone(tmp_path, finished):
    manifest = filled(tmp_path, "a")
    if finished:
        manifest.finish({})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ArgumentError, match=r"another data set \(weights differ\)"):
        Manifest(tmp_path, {**IDENTITY, "weights": {"a": "2"}})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", [MANIFEST, JOURNAL])
@pytest.mark.parametrize("content", ["", "[]\n", "{}\n", "no JSON\n", '{"files": 3}\n'])
def test_a_damaged_or_foreign_manifest_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ArgumentError, match="another data set"):
        Manifest(tmp_path, IDENTITY)


def test_a_folder_without_a_manifest_has_to_be_empty(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ArgumentError, match="holds files but no manifest"):
        Manifest(tmp_path, IDENTITY)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written") as caught:
        Manifest(tmp_path / "file" / "out", IDENTITY)
    assert "\n" not in str(caught.value)
    manifest = Manifest(tmp_path / "out", IDENTITY)
    manifest.write("a", b"")
    with pytest.raises(StorageError, match="run the same command again"):
        manifest.write("a/b", b"")  # a is a file
