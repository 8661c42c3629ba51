"""One step of any algorithm: gradients are fresh, the auxiliary loss is that of the step's one forward pass."""

import pytest
import torch
from torch import nn

from timm_moe_dg.algorithms import ALGORITHMS, Algorithm, Setup, StepContext, get_algorithm
from timm_moe_dg.errors import ArgumentError


class Distance(Algorithm):
    """Pulls the parameter of a `Scalar` toward 3."""

    def objective(self, context, minibatches):
        return {"loss": (context.model.value - 3).square()}


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))


def test_update_is_one_gradient_step():
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [Distance(Setup(model, 1, 1)).update(StepContext(model, optimizer), []) for _ in range(2)]
    # 1 -> 1 - 0.1 * 2 * (1 - 3) = 1.4 -> 1.4 + 0.32 = 1.72; left-over gradients would give 2.12
    assert model.value.item() == pytest.approx(1.72)
    assert [step["loss"].item() for step in losses] == pytest.approx([4.0, 2.56])
    assert not losses[0]["loss"].requires_grad


def test_backward_is_the_caller_s():
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Distance(Setup(model, 1, 1)).update(
        StepContext(model, optimizer, backward=lambda loss: (loss * 0.5).backward()), []
    )
    assert model.value.item() == pytest.approx(1.2)


def test_unknown_algorithm_lists_the_choices():
    assert all(get_algorithm(name) is method for name, method in ALGORITHMS.items())
    with pytest.raises(ArgumentError, match="algorithm='erm': choose from ERM"):
        get_algorithm("erm")


class Settled(Distance):
    """Needs whole steps."""

    ACCUMULATES = False


def images(size):
    return torch.arange(size), torch.arange(size)


def test_every_part_of_an_accumulated_step_has_every_domain():
    parts = Distance(Setup(Scalar(), 2, 1)).chunk([images(4), images(2)], 2)
    assert [[images.tolist() for images, _ in part] for part in parts] == [[[0, 1], [0]], [[2, 3], [1]]]


def test_bad_accumulation_is_refused_by_name():
    with pytest.raises(ArgumentError, match="grad_accum_steps=3: does not divide the batch of \\[4\\] images"):
        Distance(Setup(Scalar(), 1, 1)).chunk([images(4)], 3)
    with pytest.raises(ArgumentError, match="grad_accum_steps=2: Settled needs a whole step"):
        Settled(Setup(Scalar(), 1, 1)).chunk([images(4)], 2)


def test_a_shared_statistic_is_the_mean_over_processes_with_the_local_gradient():
    local = torch.tensor([1.0, 2.0], requires_grad=True)
    context = StepContext(Scalar(), None, reduce=lambda value: (value + torch.tensor([3.0, 6.0])) / 2)
    shared = context.mean_keeping_gradient(local)
    assert shared.tolist() == [2.0, 4.0]
    shared.square().sum().backward()
    assert local.grad.tolist() == [4.0, 8.0]  # 2 * the mean, with which every process's own gradient is multiplied
