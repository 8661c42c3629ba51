"""Averages of networks: exact cases, a selection by hand, and experts in another order."""

from statistics import fmean

import numpy as np
import pytest
import torch

from tests.models.cases import randomize
from tests.saved_run import SMALL
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import LinearRouter, register_router
from timm_moe_dg.networks.averages import match_experts, mean_weights, restricted_selection
from timm_moe_dg.networks.build import build_network


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_mean_of_equal_weights_is_bitwise_one_of_them(count):
    weights = {"a": torch.randn(50), "half": torch.randn(50).half(), "steps": torch.tensor(7)}
    mean = mean_weights([weights] * count)
    assert all(torch.equal(mean[name], weights[name]) and mean[name].dtype == weights[name].dtype for name in weights)


def test_shares_of_0_and_1_are_bitwise_the_ends():
    start, end = {"a": torch.randn(50)}, {"a": torch.randn(50)}
    for share, expected in ((0.0, start), (1.0, end)):
        assert torch.equal(mean_weights([start, end], [1 - share, share])["a"], expected["a"])
    between = mean_weights([start, end], [0.75, 0.25])["a"]
    assert torch.allclose(between, 0.75 * start["a"] + 0.25 * end["a"])


@pytest.mark.parametrize(
    "other", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}]
)
def test_weights_of_other_networks_are_refused(other):
    with pytest.raises(ArgumentError, match=r"weights='[ab]': .* average equal networks"):
        mean_weights([{"a": torch.zeros(2)}, other])


def released_selection(outcomes, average):
    """DiWA's released rule, as it reads: `outcomes[candidate][domain]` and `average(members)` are lists of 0 and 1."""
    mean_over_domains = [np.mean([np.mean(domain) for domain in domains]) for domains in outcomes]
    selected, best = [], -np.inf
    for candidate in np.argsort(-np.array(mean_over_domains), kind="stable"):
        pooled = np.concatenate(average([*selected, candidate])).mean()
        if pooled >= best:
            selected, best = [*selected, candidate], pooled
    return selected


def test_restricted_selection_pools_the_images_of_all_domains_as_the_release_does():
    random = np.random.default_rng(0)
    sizes, selections = (10, 100), []
    for _ in range(50):
        outcomes = [[random.integers(2, size=size) for size in sizes] for _ in range(4)]

        def majority(members, outcomes=outcomes):
            return [np.mean([outcomes[member][domain] for member in members], 0) > 0.4 for domain in range(2)]

        scores = [fmean(float(domain.mean()) for domain in domains) for domains in outcomes]
        selected = restricted_selection(scores, lambda m, of=majority: sum(int(d.sum()) for d in of(m)))
        assert selected == released_selection(outcomes, majority)
        selections.append(len(selected))
    assert 1 < fmean(selections) < 4  # some are accepted and some refused


def test_a_tie_is_accepted_where_means_of_domains_differ_in_the_last_bit():
    assert fmean([20 / 60, 24 / 60]) > fmean([22 / 60, 22 / 60])  # both are 44 of 120
    assert restricted_selection([fmean([20 / 60, 24 / 60]), fmean([22 / 60, 22 / 60])], lambda _: 44) == [0, 1]
    assert restricted_selection([fmean([22 / 60, 22 / 60]), fmean([20 / 60, 24 / 60])], lambda _: 44) == [0, 1]


def mixture(name, **options):
    return randomize(build_network(name, 3, img_size=32, model_kwargs={**SMALL, **options}), std=0.15).eval()


def reordered(weights, orders):
    """Gives the experts of each layer another order, by the names of its weights."""
    rows = (".experts.fc1.", ".experts.fc2.", ".router.codes", ".router.gate.weight")
    layers = {name: order for name in weights for layer, order in orders.items() if name.startswith(layer)}
    return {
        name: value[layers[name]] if name in layers and any(row in name for row in rows) else value
        for name, value in weights.items()
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gmoe_tiny_patch16", {"router": "cosine", "moe_layers": (0, 1)}),
        ("gmoe_tiny_patch16", {"router": "linear"}),
        ("moge_tiny", {}),
    ],
)
def test_experts_in_another_order_are_matched_exactly(name, options):
    network = mixture(name, **options)
    weights = network.state_dict()
    orders = {f"blocks.{layer}.": [2, 0, 3, 1] if layer else [3, 2, 1, 0] for layer in options.get("moe_layers", (1,))}
    other = reordered(weights, orders)
    assert any(not torch.equal(weights[key], other[key]) for key in weights)
    images = torch.randn(2, 3, 32, 32)
    inputs = (images, torch.tensor([[10.0, 50.0], [-70.0, -10.0]])) if name == "moge_tiny" else (images,)
    with torch.no_grad():
        expected = network(*inputs)
        network.load_state_dict(other)
        assert torch.allclose(network(*inputs), expected, atol=1e-5)  # the same function
    matched = match_experts(network, weights, other)
    assert all(torch.equal(matched[key], weights[key]) for key in weights)
    # Training moves experts, by less than they differ from each other
    moved = {key: value + 0.03 * torch.randn_like(value) for key, value in weights.items()}
    back = match_experts(network, weights, reordered(moved, orders))
    assert all(torch.equal(back[key], moved[key]) for key in weights)


def test_a_router_that_does_not_name_its_rows_is_refused(monkeypatch):
    @register_router("nameless")
    class Nameless(LinearRouter):
        expert_rows = ()

    network = mixture("gmoe_tiny_patch16", router="nameless")
    with pytest.raises(ArgumentError, match=r"router='Nameless': .*leave out --match-experts"):
        match_experts(network, network.state_dict(), network.state_dict())
