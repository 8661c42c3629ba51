"""Stacked experts within a layer: storage of their own, and dropout on their hidden features alone."""

import pytest
import torch
from timm.layers import Mlp

from tests.layers.test_moe_mlp import images, make_layer
from timm_moe_dg.layers import MoeMlp


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
