"""Peak memory of work whose need is known, and page faults of work whose memory is kept."""

import ctypes
import multiprocessing
import resource
import sys

import pytest
import torch

from timm_moe_dg.measure.memory import keep_freed_memory, peak_memory

MIB = 2**20


def hold_and_borrow(held: int, borrowed: int):
    """Keeps `held` MiB for good and takes `borrowed` MiB twice, one after the other, in each step."""
    kept = torch.ones(held * MIB // 4)

    def step() -> None:
        for _ in range(2):
            torch.ones(borrowed * MIB // 4).add_(kept[0])

    return step


@pytest.mark.slow
def test_what_is_held_counts_and_what_is_returned_counts_once():
    # a step that kept what it borrows would come to 64 + 6 * 32; imports of the first step add a few MiB
    assert peak_memory(hold_and_borrow, 64, 32, device="cpu", threads=1) == pytest.approx(96, abs=8)


def page_faults(keep: bool) -> int:
    """Of taking 64 MiB four times, after twelve times before: which free blocks serve them settles in some of these."""
    if keep:
        keep_freed_memory()
    for _ in range(12):
        torch.ones(64 * MIB // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(64 * MIB // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")
def test_kept_memory_is_used_again_without_page_faults():
    context = multiprocessing.get_context("spawn")  # the setting stays with its process
    faults = []
    for keep in (False, True):
        with context.Pool(1) as pool:
            faults.append(pool.apply(page_faults, (keep,)))
    assert faults[1] * 10 < faults[0]
