"""SIGTERM is noted, and acted upon between two items."""

import os
import signal

import pytest

from timm_moe_dg.finetuning.interruption import Interrupted, Interruption


def test_the_signal_is_noted_and_the_handler_before_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as stop:
        assert not stop.agreed()
        assert list(stop.breaking([1, 2])) == [1, 2]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed()
        with pytest.raises(Interrupted):
            list(stop.breaking([1, 2]))
    assert signal.getsignal(signal.SIGTERM) is before
