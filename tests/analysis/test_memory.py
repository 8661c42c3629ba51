"""Peak memory of work whose need is known."""

import pytest
import torch

from timm_moe_dg.analysis.memory import peak_memory

MIB = 2**20


def hold_and_borrow(held: int, borrowed: int):
    """Keeps `held` MiB for good and takes `borrowed` MiB twice, one after the other, in each step."""
    kept = torch.ones(held * MIB // 4)

    def step() -> None:
        for _ in range(2):
            torch.ones(borrowed * MIB // 4).add_(kept[0])

    return step


def test_what_is_held_counts_and_what_is_returned_counts_once():
    # a step that kept what it borrows would come to 64 + 6 * 32; imports of the first step add a few MiB
    assert peak_memory(hold_and_borrow, 64, 32, device="cpu", threads=1) == pytest.approx(96, abs=8)
