"""Files of V-MoE checkpoints, written here as its own code writes them, are read as they were; damage is named."""

from pathlib import Path

import numpy as np
import pytest

from tests.vmoe_files import Arrays, made_arrays, write_vmoe
from timm_moe_dg.conversion.vmoe_shards import read_vmoe_shards
from timm_moe_dg.errors import CheckpointError


@pytest.fixture
def arrays(tmp_path: Path) -> Arrays:
    """Eleven blocks' worth of names, so that 10 sorts before 2."""
    made = made_arrays() | {f"Encoder/encoderblock_{n}/LayerNorm_0/scale": np.full(3, n, "float32") for n in (10, 11)}
    write_vmoe(tmp_path / "vmoe", made)
    return made


@pytest.mark.parametrize(("files", "parts"), [(1, 1), (2, 2), (3, 4)])
def test_arrays_come_back_as_they_were_whatever_they_were_cut_into(files, parts, tmp_path):
    made = made_arrays()
    write_vmoe(tmp_path / "vmoe", made, files, parts)
    found = read_vmoe_shards(tmp_path / "vmoe")
    assert found.keys() == made.keys()
    assert all(np.array_equal(found[name].numpy(), made[name]) for name in made)


def test_names_are_numbered_as_jax_does(arrays, tmp_path):
    found = read_vmoe_shards(tmp_path / "vmoe")
    assert all(np.array_equal(found[name].numpy(), value) for name, value in arrays.items())


def test_a_missing_file_is_named(arrays, tmp_path):
    (tmp_path / "vmoe.data-00001-of-00002").unlink()
    with pytest.raises(CheckpointError, match=r"vmoe\.data-00001-of-00002: No such file.*give the prefix"):
        read_vmoe_shards(tmp_path / "vmoe")
    with pytest.raises(CheckpointError, match=r"nothing\.index: No such file"):
        read_vmoe_shards(tmp_path / "nothing")


def test_a_damaged_file_is_named(arrays, tmp_path):
    path = tmp_path / "vmoe.data-00000-of-00002"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match="is damaged, or no file of V-MoE's"):
        read_vmoe_shards(tmp_path / "vmoe")
    (tmp_path / "vmoe.index").write_bytes(b"\x80")  # an empty map
    with pytest.raises(CheckpointError, match="is no index of a V-MoE checkpoint"):
        read_vmoe_shards(tmp_path / "vmoe")


def test_files_of_another_checkpoint_are_noticed(arrays, tmp_path):
    write_vmoe(tmp_path / "other", made_arrays(), parts=1)
    for number in range(2):
        (tmp_path / f"other.data-{number:05d}-of-00002").replace(tmp_path / f"vmoe.data-{number:05d}-of-00002")
    with pytest.raises(CheckpointError, match="data files lack slices that the index names"):
        read_vmoe_shards(tmp_path / "vmoe")
