"""Three steps of every method end at the parameters that its published update rule, written out, ends at."""

from copy import deepcopy
from dataclasses import replace
from inspect import signature

import pytest
import torch

from tests.algorithms.networks import CLASSES, DOMAINS, NETWORKS, minibatches, network
from tests.references.domain_algorithms import AUX, LR, REFERENCES, WEIGHT_DECAY
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.layers import LossWeights

# Penalties set in at the second of three steps, with weights that matter
HPARAMS = {
    "IRM": {"irm_penalty_anneal_iters": 1},
    "VREx": {"vrex_penalty_anneal_iters": 1},
    "GroupDRO": {"groupdro_eta": 2.0},
    "MLDG": {"n_meta_test": 1, "mldg_beta": 0.7},
    "DANN": {"d_steps_per_g_step": 2, "grad_penalty": 0.3, "weight_decay_d": 0.01, "mlp_width": 8},
    "CDANN": {"grad_penalty": 0.3, "lr_d": 1e-2, "mlp_width": 8, "beta1": 0.2},
    "Fish": {"meta_lr": 0.3},
    "Fishr": {"penalty_anneal_iters": 1, "ema": 0.6},
    "RDM": {"rdm_penalty_anneal_iters": 1, "rdm_lr": 3e-4},
}

BY_DOMAIN = ("GroupDRO", "Fishr", "DANN", "CDANN")  # keep something for each training domain


def build(name, net, domains=DOMAINS, per_step=None, **hparams):
    """An algorithm in float64 and what it takes a step with."""
    torch.manual_seed(7)  # discriminators
    hparams = {"lr": LR, "weight_decay": WEIGHT_DECAY, **HPARAMS.get(name, {}), **hparams}
    setup = Setup(
        net, domains, CLASSES, hparams=hparams, loss_weights=LossWeights(aux_coef=AUX), domains_per_step=per_step
    )
    algorithm = ALGORITHMS[name](setup).double()
    groups = algorithm.parameter_groups(LR, WEIGHT_DECAY)
    optimizer = torch.optim.Adam([{"params": list(net.parameters())}, *groups], lr=LR, weight_decay=WEIGHT_DECAY)
    return algorithm, StepContext(net, optimizer)


def train(algorithm, context, name, steps):
    for step in steps:
        torch.manual_seed(step)
        losses = algorithm.update(context, minibatches(name, step))
    return losses


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ALGORITHMS)
def test_three_steps_end_where_the_published_rule_ends(method, name):
    net, twin = network(name), network(name)
    algorithm, context = build(method, net)
    # The reference starts from the same discriminators
    further = {"algorithm": deepcopy(algorithm)} if "algorithm" in signature(REFERENCES[method]).parameters else {}
    # Both players' moments matter from their second step on
    steps = range(5 if further else 3)
    losses = train(algorithm, context, name, steps)
    opponent = further["algorithm"].parameters() if further else ()
    own = REFERENCES[method](twin, [minibatches(name, step) for step in steps], algorithm.hparams, **further)
    columns = (net.named_parameters(), twin.parameters(), network(name).parameters())
    for (key, value), expected, first in zip(*columns, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
        assert (value - first).abs().max() > 1e-5  # three steps of Adam leave nothing where it was
    for value, expected in zip(algorithm.parameters(), own or opponent, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert {"loss", "task_loss", "aux_loss"} <= losses.keys()
    assert not any(value.requires_grad for value in losses.values())


DRAWN = [[4, 1], [0, 1], [1, 3], [3, 4], [1, 4]]  # of five domains; 2 in no step, 1 in nearly all


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", BY_DOMAIN)
def test_what_is_kept_by_domain_follows_the_domains_that_a_step_draws(method, name):
    net, twin = network(name), network(name)
    algorithm, context = build(method, net, domains=5, per_step=2)
    further = {"algorithm": deepcopy(algorithm)} if "algorithm" in signature(REFERENCES[method]).parameters else {}
    further |= {"total": 5} if method == "GroupDRO" else {}
    everything = [minibatches(name, step, domains=5) for step in range(len(DRAWN))]
    steps = [[step[domain] for domain in drawn] for step, drawn in zip(everything, DRAWN, strict=True)]
    for number, (step, drawn) in enumerate(zip(steps, DRAWN, strict=True)):
        torch.manual_seed(number)
        algorithm.update(replace(context, domains=drawn), step)
    REFERENCES[method](twin, steps, algorithm.hparams, drawn=DRAWN, **further)
    for value, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", BY_DOMAIN)
def test_a_step_of_all_domains_is_bit_for_bit_what_it_is_without_a_list_of_them(method):
    ends = []
    for domains in (None, range(DOMAINS)):
        net = network("mlp")
        algorithm, context = build(method, net)
        train(algorithm, replace(context, domains=domains), "mlp", range(4))
        ends.append([*net.state_dict().values(), *algorithm.parameters(), *algorithm.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_mldg_goes_round_its_test_domains():
    net, twin = network("mlp"), network("mlp")
    steps = [minibatches("mlp", step, domains=5) for step in range(3)]
    algorithm, context = build("MLDG", net, domains=5, n_meta_test=2)  # three pairs, so that a test domain comes twice
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        algorithm.update(context, step)
    REFERENCES["MLDG"](twin, steps, algorithm.hparams)
    for value, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["MLDG", "Mixup"])
def test_methods_that_pair_domains_cut_the_larger_minibatch_to_the_smaller(method):
    net, twin = network("mlp"), network("mlp")
    step = [(x[:size], y[:size]) for (x, y), size in zip(minibatches("mlp", 0, size=9), (9, 4, 6), strict=True)]
    algorithm, context = build(method, net)
    torch.manual_seed(0)
    algorithm.update(context, step)
    torch.manual_seed(0)
    REFERENCES[method](twin, [step], algorithm.hparams)
    for value, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)


def test_every_method_has_a_reference():
    assert REFERENCES.keys() == ALGORITHMS.keys()
