"""What a step is taken with."""

import torch

from tests.algorithms.test_base import Scalar
from timm_moe_dg.algorithms import StepContext


def test_a_shared_statistic_is_the_mean_over_processes_with_the_local_gradient():
    local = torch.tensor([1.0, 2.0], requires_grad=True)
    context = StepContext(Scalar(), None, reduce=lambda value: (value + torch.tensor([3.0, 6.0])) / 2)
    shared = context.mean_keeping_gradient(local)
    assert shared.tolist() == [2.0, 4.0]
    shared.square().sum().backward()
    assert local.grad.tolist() == [4.0, 8.0]  # 2 * the mean, with which every process's own gradient is multiplied
