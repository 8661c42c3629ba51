"""The search for garbage stops for a while, and goes on only where it was on."""

import gc

import pytest

from timm_moe_dg.cli.garbage import uncollected


def fail_within() -> None:
    with uncollected():
        raise ValueError(f"collected: {gc.isenabled()}")


@pytest.mark.parametrize("before", [True, False])
def test_it_is_afterwards_as_it_was_before(before):
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        with pytest.raises(ValueError, match="collected: False"):
            fail_within()
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()
