"""Any byte that differs is noticed, and so is a table that vouches for nothing."""

import pytest

from timm_moe_dg.storage.checksums import CHECKSUMS, damage, known_checksums, read_checksums, write_checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "weights").write_bytes(bytes(range(40)))
    (tmp_path / "sub" / "config").write_text("{}")
    write_checksums(tmp_path)
    return tmp_path


def test_a_folder_as_it_was_written_is_whole(folder):
    assert damage(folder) is None
    assert damage(folder, ("weights",)) is None
    assert sorted(read_checksums(folder)) == ["sub/config", "weights"]
    assert damage(folder, ("weights", "more")) == "checksums.json does not list more"


def test_any_flipped_byte_of_any_file_is_noticed(folder):
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for position in range(len(whole)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            assert damage(folder) is not None, (path, position)
        path.write_bytes(whole)
    assert damage(folder) is None


@pytest.mark.parametrize("text", ["[]", "{}", "null", "{", '{"weights": 5}', "\xff", "[" * 100_000])
def test_a_table_that_lists_nothing_is_damage(folder, text):
    (folder / CHECKSUMS).write_bytes(text.encode("latin1"))
    assert damage(folder).startswith("checksums.json: ")


def test_a_missing_file_is_named(folder):
    (folder / "weights").unlink()
    assert damage(folder) == "weights cannot be read: No such file or directory"


def test_without_a_table_the_files_of_now_count(folder):
    listed = read_checksums(folder)
    (folder / CHECKSUMS).unlink()
    assert known_checksums(folder) == listed
