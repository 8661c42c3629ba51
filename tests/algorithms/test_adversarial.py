"""DANN and CDANN: what their turns do to the run's optimizer."""

import torch

from tests.algorithms.networks import minibatches, network
from tests.algorithms.test_updates import build
from timm_moe_dg.algorithms import StepContext


def test_adversaries_give_the_run_s_optimizer_their_betas():
    net = network("mlp")
    algorithm, context = build("DANN", net, beta1=0.25)
    algorithm.update(context, minibatches("mlp", 0))
    assert context.optimizer.param_groups[0]["betas"] == (0.25, 0.9)
    sgd = StepContext(net, torch.optim.SGD(net.parameters(), lr=0.1))
    algorithm.update(sgd, minibatches("mlp", 1))
    assert "betas" not in sgd.optimizer.param_groups[0]
