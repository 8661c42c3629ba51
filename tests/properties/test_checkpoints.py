"""Checkpoints come back as they were, and a byte that changes is noticed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.storage.run_folder import Checkpoints, read_checkpoint

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


def same(actual, expected):
    """Equal with types, order of keys, NaN and every bit of a tensor."""
    if isinstance(expected, torch.Tensor):
        bits = (item.contiguous().view(-1).view(torch.uint8) if item.numel() else item for item in (actual, expected))
        return actual.dtype == expected.dtype and actual.shape == expected.shape and torch.equal(*bits)
    if isinstance(expected, dict):
        pairs = zip(actual.items(), expected.items(), strict=True)
        return type(actual) is dict and all(same(list(a), list(b)) for a, b in pairs)
    if isinstance(expected, list | tuple):
        return type(actual) is type(expected) and all(same(*pair) for pair in zip(actual, expected, strict=True))
    return type(actual) is type(expected) and repr(actual) == repr(expected)


@given(STATES)
def test_a_state_comes_back_as_it_was(tmp_path, state):
    assert same(read_checkpoint(Checkpoints(tmp_path).save(0, state)), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint and its state."""
    state = {"step": 3, "weights": {"a": torch.arange(6.0), 1: torch.ones(2, 2)}, "records": ["x"], "rate": 0.1}
    return Checkpoints(tmp_path_factory.mktemp("checkpoints")).save(3, state), state


@given(st.data())
def test_any_byte_of_a_checkpoint_that_changes_is_noticed_or_has_no_meaning(saved, data):
    path, state = saved
    before = path.read_bytes()
    place, change = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(1, 255))
    path.write_bytes(before[:place] + bytes([before[place] ^ change]) + before[place + 1 :])
    try:
        read_state = read_checkpoint(path)
    except CheckpointError:
        return
    finally:
        path.write_bytes(before)
    assert same(read_state, state)  # padding, or a date in the archive
