"""Divergence: the steps that it can have begun at, and weights that a finite loss hides."""

import math

import pytest
import torch
from torch import nn

from timm_moe_dg.errors import DivergenceError
from timm_moe_dg.finetuning.divergence import DivergenceCheck, with_weights


def test_the_step_or_the_range_of_steps_is_named():
    check = DivergenceCheck(5, ["sea", "land"])
    check(5, torch.tensor(1.0), "none yet")
    with pytest.raises(DivergenceError, match=r"not finite at step 6, on a batch of sea, land; .*checkpoint: step-3"):
        check(6, torch.tensor(math.nan), "step-3")
    with pytest.raises(DivergenceError, match="loss=inf: not finite in one of the steps 6 to 10"):
        check(10, torch.tensor(math.inf), "step-3")


def test_weights_count():
    network = nn.Linear(2, 2)
    total = torch.tensor(2.5)
    assert with_weights(total, network).item() == 2.5
    with torch.no_grad():
        network.bias[1] = math.inf
    assert math.isnan(with_weights(total, network).item())
