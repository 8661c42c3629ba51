"""Why runs stop: the steps that divergence can have begun at, weights that a finite loss hides, and SIGTERM."""

import math
import os
import signal

import pytest
import torch
from torch import nn

from timm_moe_dg.errors import DivergenceError
from timm_moe_dg.finetuning.stopping import (
    DivergenceCheck,
    Interrupted,
    Interruption,
    check_weights,
    nan_if_not_finite,
)


def test_the_step_or_the_range_of_steps_is_named():
    check = DivergenceCheck(5, ["sea", "land"])
    check(5, torch.tensor(1.0), "none yet")
    with pytest.raises(DivergenceError, match=r"not finite at step 6, on a batch of sea, land; .*checkpoint: step-3"):
        check(6, torch.tensor(math.nan), "step-3")
    with pytest.raises(DivergenceError, match="loss=inf: not finite in one of the steps 6 to 10"):
        check(10, torch.tensor(math.inf), "step-3")


def test_a_step_that_is_checked_twice_is_one_step():
    check = DivergenceCheck(0, ["sea"])
    check(0, torch.tensor(1.0), "none yet")
    with pytest.raises(DivergenceError, match=r"loss=nan: not finite at step 0, on"):
        check(0, torch.tensor(math.nan), "none yet")


def test_finite_weights_that_overflow_next_are_not_kept():
    network = nn.Linear(2, 2)
    check_weights(network, 5, "step-3")
    for value in (1e10, -1e30, math.inf, math.nan):
        with torch.no_grad():
            network.weight[0, 1] = value
        with pytest.raises(DivergenceError, match=r"weights=\S+: too large after step 5 .*good checkpoint: step-3"):
            check_weights(network, 5, "step-3")


def test_weights_count():
    network = nn.Linear(2, 2)
    total = torch.tensor(2.5)
    assert nan_if_not_finite(total, network).item() == 2.5
    with torch.no_grad():
        network.bias[1] = math.inf
    assert math.isnan(nan_if_not_finite(total, network).item())


def test_the_signal_is_noted_and_the_handler_before_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as stop:
        assert not stop.should_stop()
        assert list(stop.until_stopped([1, 2])) == [1, 2]
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.should_stop()
        with pytest.raises(Interrupted):
            list(stop.until_stopped([1, 2]))
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal; a suite that a script started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_noted_once_and_then_ends_at_once(ctrl_c):
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.should_stop()
        assert stop.error("").exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_schedulers_send_has_its_own_status():
    with Interruption() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.error("").exit_code == 143
