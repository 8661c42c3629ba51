"""Checkpoints come back as they were; a byte that changes is noticed, and a run goes on all the same."""

import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.toy_runs import content, run
from timm_moe_dg.errors import ArgumentError, CheckpointError, FormatError
from timm_moe_dg.storage.checkpoint import STATE, TENSORS, Checkpoints, read_checkpoint
from timm_moe_dg.storage.checksums import CHECKSUMS, damage, read_checksums, write_checksums
from timm_moe_dg.storage.outcome import DONE, lost, verify_model, vouched

pytestmark = pytest.mark.slow  # some of them take two seconds

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TENSORS_DRAWN = st.builds(
    lambda shape, dtype, seed: (
        100 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(TYPES),
    st.integers(0, 99),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | TENSORS_DRAWN
STATES = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


@pytest.fixture(autouse=True, scope="module")
def without_waiting():
    """For the disk, which is for power failures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def same(found, wanted):
    """Equal with types, order of keys, NaN and every bit of a tensor."""
    if isinstance(wanted, torch.Tensor):
        bits = (each.contiguous().view(-1).view(torch.uint8) if each.numel() else each for each in (found, wanted))
        return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(*bits)
    if isinstance(wanted, dict):
        pairs = zip(found.items(), wanted.items(), strict=True)
        return type(found) is dict and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and all(same(*pair) for pair in zip(found, wanted, strict=True))
    return type(found) is type(wanted) and repr(found) == repr(wanted)


@given(STATES)
def test_a_state_comes_back_as_it_was(tmp_path, state):
    assert same(read_checkpoint(Checkpoints(tmp_path).save(0, state)), state)


def flipped(path, data):
    """Changes one byte of a file and returns what was there."""
    before = path.read_bytes()
    place, change = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(1, 255))
    path.write_bytes(before[:place] + bytes([before[place] ^ change]) + before[place + 1 :])
    return before


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint and what is in it."""
    state = {"step": 3, "weights": {"a": torch.arange(6.0), 1: torch.ones(2, 2)}, "records": ["x"], "rate": 0.1}
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).save(3, state), state


@given(st.sampled_from([TENSORS, STATE, CHECKSUMS]), st.data())
def test_any_byte_of_a_checkpoint_that_changes_is_noticed(saved, name, data):
    folder, state = saved
    before = flipped(folder / name, data)
    try:
        found = read_checkpoint(folder)
    except CheckpointError:
        found = None
    finally:
        (folder / name).write_bytes(before)
    # Among checksums there is white space, which may be another
    assert found is None or (name == CHECKSUMS and same(found, state))


@given(st.dictionaries(st.sampled_from("abc"), st.binary(min_size=1, max_size=40), min_size=1), st.data())
def test_any_byte_of_a_folder_with_checksums_that_changes_is_noticed(tmp_path, files, data):
    folder = tmp_path / "best"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "below").mkdir(parents=True)
    for name, binary in files.items():
        (folder / "below" / name).write_bytes(binary)
    write_checksums(folder)
    written = read_checksums(folder)
    assert damage(folder) is None
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    flipped(path, data)
    assert damage(folder) is not None or (path.name == CHECKSUMS and read_checksums(folder) == written)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("finished") / "a"
    run(path)
    return path


@given(st.data())
def test_any_byte_of_a_finished_run_that_changes_is_noticed(finished, data):
    files = sorted(path for path in finished.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    path, table = data.draw(st.sampled_from(files)), vouched(finished)
    assert lost(finished) is None
    before = flipped(path, data)
    try:
        assert lost(finished) is not None or (path.name == DONE and vouched(finished) == table)
        if path.parent != finished:
            with pytest.raises(CheckpointError, match="is damaged"):
                verify_model(f"local-dir:{path.parent}")
    finally:
        path.write_bytes(before)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Runs that stopped, one just after an evaluation, and what they are to become."""
    root = tmp_path_factory.mktemp("interrupted")
    for upto in (5, 6):
        run(root / f"stopped{upto}", upto=upto)
    run(root / "whole")
    return [root / "stopped5", root / "stopped6"], results(root / "whole")


def results(path):
    """All but args.yaml, which stays as it is found, and the checksums, in which white space may be another."""
    without = ("args.yaml", DONE, CHECKSUMS)
    return {name: text for name, text in content(path).items() if not name.endswith(without)}


@pytest.mark.filterwarnings("ignore")
@given(st.integers(0, 1), st.data())
def test_a_run_goes_on_to_the_same_results_whatever_byte_of_it_changed(interrupted, which, data):
    (*_, stopped), whole = interrupted[0][: which + 1], interrupted[1]
    damaged = stopped.with_name("damaged")
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(stopped, damaged)
    path = data.draw(st.sampled_from(sorted(path for path in damaged.rglob("*") if path.is_file())))
    flipped(path, data)
    try:
        run(damaged, resume=True)
    except (ArgumentError, FormatError):
        assert path.name == "args.yaml"  # another run's, as far as it says
        return
    found = results(damaged)
    assert found.keys() == whole.keys()
    for name in (name for name, text in whole.items() if found[name] != text):
        # A network whose checkpoint is gone cannot be made again
        assert damaged / name == path
        with pytest.raises(CheckpointError, match="is damaged"):
            verify_model(f"local-dir:{path.parent}")
