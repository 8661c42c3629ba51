"""Methods that judge risks: weights that rise, and a penalty that sets in with a fresh optimizer."""

from dataclasses import replace

import pytest
import torch

from tests.algorithms.networks import minibatches, network
from tests.algorithms.test_updates import build


def risks_of(net, batches):
    return torch.stack([torch.nn.functional.cross_entropy(net(images), targets) for images, targets in batches])


def test_group_dro_starts_from_equal_weights_that_rise_with_the_risks():
    net, batches = network("mlp"), minibatches("mlp", 0)
    risks = risks_of(net, batches).detach()
    algorithm, context = build("GroupDRO", net, groupdro_eta=0.5)
    losses = algorithm.update(context, batches)
    expected = (0.5 * risks).softmax(0)
    torch.testing.assert_close(algorithm.weights.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["task_loss"], (algorithm.weights * risks).sum())


def test_group_dro_leaves_the_proportions_of_the_domains_that_a_step_has_not_drawn():
    net, batches = network("mlp"), minibatches("mlp", 0, domains=2)
    risks = risks_of(net, batches).detach()
    algorithm, context = build("GroupDRO", net, domains=5, per_step=2, groupdro_eta=0.5)
    losses = algorithm.update(replace(context, domains=[3, 1]), batches)
    factors = torch.ones(5, dtype=torch.float64)
    factors[[3, 1]] = (0.5 * risks).exp()
    torch.testing.assert_close(algorithm.weights, factors / factors.sum(), rtol=1e-6, atol=0)
    # Over all pairs that can be drawn alike, each domain's share of the loss is its weight
    torch.testing.assert_close(losses["task_loss"], 5 / 2 * (algorithm.weights[[3, 1]] * risks).sum())


@pytest.mark.parametrize("anneal", [0, 2])
def test_v_rex_weighs_the_variance_by_1_and_from_its_step_on_by_lambda_with_a_fresh_optimizer(anneal):
    net = network("mlp")
    algorithm, context = build("VREx", net, vrex_lambda=7.0, vrex_penalty_anneal_iters=anneal)
    for step in range(4):
        batches = minibatches("mlp", step)
        risks = risks_of(net, batches).detach()
        weight = 7.0 if step >= anneal else 1.0
        losses = algorithm.update(context, batches)
        torch.testing.assert_close(losses["loss"], risks.mean() + weight * risks.var(correction=0))
        counted = {int(state["step"]) for state in context.optimizer.state.values()}
        assert counted == {step + 1 - (anneal if step >= anneal else 0)}
