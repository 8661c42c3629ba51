"""One step of any algorithm: gradients are fresh, the auxiliary loss is that of the step's one forward pass."""

import pytest
import torch
from torch import nn

from timm_moe_dg.algorithms import ALGORITHMS, Algorithm, Setup, Training, get_algorithm
from timm_moe_dg.errors import ArgumentError


class Distance(Algorithm):
    """Pulls the parameter of a `Scalar` towards 3."""

    def objective(self, model, minibatches):
        return {"loss": (model.value - 3).square()}


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))


def test_update_is_one_gradient_step():
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [Distance(Setup(model, 1, 1)).update(Training(model, optimizer), []) for _ in range(2)]
    # 1 -> 1 - 0.1 * 2 * (1 - 3) = 1.4 -> 1.4 + 0.32 = 1.72; left-over gradients would give 2.12
    assert model.value.item() == pytest.approx(1.72)
    assert [step["loss"].item() for step in losses] == pytest.approx([4.0, 2.56])
    assert not losses[0]["loss"].requires_grad


def test_backward_is_the_caller_s():
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Distance(Setup(model, 1, 1)).update(Training(model, optimizer, lambda loss: (loss * 0.5).backward()), [])
    assert model.value.item() == pytest.approx(1.2)


def test_unknown_algorithm_lists_the_choices():
    assert all(get_algorithm(name) is method for name, method in ALGORITHMS.items())
    with pytest.raises(ArgumentError, match="algorithm='erm': choose from ERM"):
        get_algorithm("erm")
