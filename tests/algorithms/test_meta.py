"""Fish and MLDG: what their inner steps leave of the network, and what they refuse."""

import pytest
import torch
from torch import nn

from tests.algorithms.networks import CLASSES, SmallMlp, minibatches, network
from tests.algorithms.test_updates import build
from timm_moe_dg.algorithms import ALGORITHMS, Setup
from timm_moe_dg.errors import ArgumentError, ProtocolError


def test_as_many_meta_test_domains_as_domains_are_refused():
    with pytest.raises(ProtocolError, match="n_meta_test=2: must be less than the number of training domains, 2"):
        ALGORITHMS["MLDG"](Setup(network("mlp"), 2, CLASSES))


def test_mldg_refuses_scaled_gradients():
    algorithm, context = build("MLDG", network("mlp"))
    context.optimizer.scaler = object()  # as accelerate's optimizer has it with float16
    with pytest.raises(ArgumentError, match="amp_dtype='float16': MLDG"):
        algorithm.update(context, minibatches("mlp", 0))


def test_fish_interpolates_running_statistics_and_keeps_counts():
    class Normalized(SmallMlp):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(10)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # as an attention mask has it

        def embed(self, images):
            return self.out(self.norm(self.hidden(images.flatten(1))))

    torch.manual_seed(0)
    net = Normalized().double()
    algorithm, context = build("Fish", net, meta_lr=0.25)
    before = net.norm.running_mean.clone()
    inner = Normalized().double()
    inner.load_state_dict(net.state_dict())
    _, again = build("ERM", inner)
    for minibatch in minibatches("mlp", 0):
        again.optimizer.zero_grad()
        nn.functional.cross_entropy(inner(minibatch[0]), minibatch[1]).backward()
        again.optimizer.step()
    algorithm.update(context, minibatches("mlp", 0))
    torch.testing.assert_close(net.norm.running_mean, before + 0.25 * (inner.norm.running_mean - before))
    assert net.norm.num_batches_tracked == 3
    assert net.mask.tolist() == [0.0, -torch.inf]
