"""Every dispatch path of stacked experts computes their equation, whatever is asked of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.mixtures import GATES, MODULES, SEEDS, mixtures
from tests.references.naive_moe import naive_drops
from tests.references.weighted_experts import ACTIVATIONS
from timm_moe_dg.layers.dispatch import over_capacity, sort_assignments
from timm_moe_dg.layers.experts import StackedExperts

EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64, whose rounding unit is 2e-16, after some tens of operations


@pytest.mark.parametrize("gate", GATES)
@given(st.data())
def test_every_path_gives_the_reference_in_every_type(gate, data):
    mixture = data.draw(mixtures(gates=[gate]))
    expected, tolerance = mixture.expected(), mixture.tolerance()
    for path in mixture.paths:
        actual = getattr(mixture.experts, path)(*mixture.asked)
        assert actual.dtype == mixture.x.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance, msg=path)
        with torch.no_grad():
            without_graph = getattr(mixture.experts, path)(*mixture.asked)
        torch.testing.assert_close(without_graph.double(), expected, rtol=0, atol=tolerance, msg=path)


@given(mixtures(torch.float64))
def test_every_path_gives_the_gradients_of_the_reference(mixture):
    inputs = (mixture.x.requires_grad_(), mixture.combine_weights.requires_grad_(), *mixture.experts.parameters())
    wanted = gradients(mixture.expected(), inputs)
    for path in mixture.paths:
        found = gradients(getattr(mixture.experts, path)(*mixture.asked), inputs)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, **EXACT, msg=path)


def gradients(output, inputs):
    """Zeros where the output does not depend on an input."""
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    if not output.requires_grad:
        return [torch.zeros_like(each) for each in inputs]
    return torch.autograd.grad((output * probe).sum(), inputs, materialize_grads=True)


@given(mixtures(torch.float64), st.data())
def test_what_is_not_finite_stays_with_its_item(mixture, data):
    broken = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    spoiled = data.draw(st.integers(0, max(len(mixture.x) - 1, 0)))
    others = [item for item in range(len(mixture.x)) if item != spoiled]
    x = mixture.x.clone()
    x[spoiled : spoiled + 1] = broken
    for path in mixture.paths:
        output = getattr(mixture.experts, path)(x, *mixture.asked[1:])
        torch.testing.assert_close(output[others], mixture.expected()[others], **EXACT, msg=path)


@given(mixtures(torch.float64), st.data())
def test_an_expert_touches_those_who_visit_it_alone(mixture, data):
    spoiled = data.draw(st.integers(0, mixture.experts.num_experts - 1))
    others = ~(mixture.expert_indices == spoiled).any(1)
    expected = mixture.expected()[others]
    with torch.no_grad():
        mixture.experts.fc2.weight[spoiled] = float("nan")
    for path in mixture.paths:
        output = getattr(mixture.experts, path)(*mixture.asked)
        torch.testing.assert_close(output[others], expected, **EXACT, msg=path)


def test_masked_out_is_an_expert_that_is_not_finite():
    """The smallest mixture in which that failed: one item that goes nowhere, one expert."""
    experts = StackedExperts(1, 1, 1, dtype=torch.float64)
    torch.nn.init.constant_(experts.fc2.weight, float("inf"))
    torch.nn.init.constant_(experts.fc2.bias, float("nan"))
    nowhere = experts.forward_masked(torch.ones(1, 1).double(), torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert nowhere.tolist() == [[0.0]]


@given(mixtures(torch.float64), SEEDS)
def test_the_order_of_items_and_the_names_of_experts_do_not_matter(mixture, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(mixture.x), generator=generator)
    names = torch.randperm(mixture.experts.num_experts, generator=generator)  # old -> new
    renamed = torch.cat([names, torch.tensor([len(names)])])
    for path in mixture.paths:
        before = getattr(mixture.experts, path)(*mixture.asked)
        of_items = getattr(mixture.experts, path)(*(part[order] for part in mixture.asked))
        torch.testing.assert_close(of_items, before[order], **EXACT, msg=path)
        for parameter in (*mixture.experts.fc1.parameters(), *mixture.experts.fc2.parameters()):
            parameter.data[names] = parameter.data.clone()
        asked = (mixture.x, renamed[mixture.expert_indices], mixture.combine_weights)
        torch.testing.assert_close(getattr(mixture.experts, path)(*asked), before, **EXACT, msg=path)
        for parameter in (*mixture.experts.fc1.parameters(), *mixture.experts.fc2.parameters()):
            parameter.data = parameter.data[names]


TABLES = st.integers(1, 6).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.integers(1, experts).flatmap(
            lambda top_k: st.lists(st.permutations(range(experts)).map(lambda order: order[:top_k]), max_size=12)
        ),
    )
)


@given(TABLES, st.data())
def test_sorting_groups_every_assignment_once(table, data):
    num_experts, rows = table
    rows = [[data.draw(st.sampled_from([expert, num_experts])) for expert in row] for row in rows]
    indices = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 1)
    found = sort_assignments(indices, num_experts)
    flat = indices.flatten().tolist()
    kept = [place for expert in range(num_experts) for place, own in enumerate(flat) if own == expert]
    assert found.positions.tolist() == kept
    assert found.items.tolist() == [place // indices.shape[1] for place in kept]
    assert found.counts == [flat.count(expert) for expert in range(num_experts)]
    ranks = {place: rank for rank, place in enumerate(kept)}
    assert found.ranks.flatten().tolist() == [ranks.get(place, len(kept)) for place in range(len(flat))]


@given(TABLES, st.integers(0, 8), st.data())
def test_capacity_drops_as_a_queue_does(table, capacity, data):
    num_experts, rows = table
    priority = [data.draw(st.sampled_from([0.25, 0.5, 0.5, 1.0])) for _ in rows]  # ties too
    indices = torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 1)
    dropped = over_capacity(indices, torch.tensor(priority), num_experts, capacity)
    assert dropped.tolist() == (naive_drops(rows, priority, capacity) if rows else [])
    kept = torch.bincount(indices[~dropped], minlength=num_experts)
    assert kept.tolist() == torch.bincount(indices.flatten(), minlength=num_experts).clamp(max=capacity).tolist()


@pytest.mark.parametrize("act", sorted(MODULES))
def test_the_reference_is_that_of_pytorch(act):
    """The activations that this file's reference writes out."""
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[act](x), MODULES[act](x), **EXACT)
