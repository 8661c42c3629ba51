"""Stacked experts within a layer: storage of their own, dropout on their hidden features alone, casts once."""

import pytest
import torch
from timm.layers import Mlp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.test_moe_mlp import images, make_layer
from timm_moe_dg.layers import MoeMlp, set_dispatch
from timm_moe_dg.layers.experts import StackedExperts


def test_upcycled_experts_do_not_share_storage():
    dense = Mlp(8, 16)
    layer = MoeMlp.from_dense(dense, num_experts=3)
    with torch.no_grad():
        layer.experts.fc1.weight[0].zero_()
    assert torch.equal(layer.experts.fc1.weight[1], dense.fc1.weight)
    assert dense.fc1.weight.any()


def test_dropout_acts_on_the_experts_in_training_only():
    layer = make_layer(expert_drop=0.5, router_noise=0.0)
    still = layer.eval()(images())
    assert torch.equal(still, layer(images()))
    assert not torch.allclose(layer.train()(images()), still)


def test_hidden_dropout_keeps_both_rates():
    # an activation survives timm's dropout and the experts' own: 0.9 * 0.8
    assert make_layer(drop=0.1, expert_drop=0.2).experts.drop.p == pytest.approx(1 - 0.9 * 0.8)


class Casts(TorchDispatchMode):
    """Lists the shapes that are copied into another type."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype != args[0].dtype:
            self.shapes.append(tuple(result.shape))
        return result


@pytest.mark.parametrize("dispatch", ["sorted", "grouped"])
def test_under_autocast_each_stack_and_its_gradient_is_cast_once_for_all_experts(dispatch):
    experts = StackedExperts(6, 8, 16)
    set_dispatch(experts, dispatch)
    stacks = [experts.fc1.weight, experts.fc2.weight]
    with Casts() as casts:
        with torch.autocast("cpu", torch.bfloat16):
            output = experts(torch.randn(20, 8), torch.arange(40).view(20, 2) % 6, torch.rand(20, 2))
        output.float().sum().backward()
    assert all(casts.shapes.count(tuple(one.shape)) == 2 for one in stacks)
    assert all(one.grad.dtype == torch.float32 for one in stacks)
    parts = [tuple(one.shape[1:]) for one in stacks]
    assert not any(shape in parts for shape in casts.shapes)
