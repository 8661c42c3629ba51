"""The order of assignments by expert, and which are dropped over capacity: by hand and against naive code."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.references.naive_moe import naive_drops
from timm_moe_dg.layers.assignments import Assignments, expert_capacity, over_capacity

TABLES = st.integers(1, 6).flatmap(
    lambda experts: st.tuples(
        st.just(experts),
        st.integers(1, experts).flatmap(
            lambda top_k: st.lists(st.permutations(range(experts)).map(lambda order: order[:top_k]), max_size=12)
        ),
    )
)


def as_indices(rows):
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), -1 if rows else 1)


@given(TABLES, st.data())
def test_each_item_stands_once_in_the_rows_of_each_of_its_experts(table, data):
    num_experts, rows = table
    indices = as_indices([[data.draw(st.sampled_from([expert, num_experts])) for expert in row] for row in rows])
    assignments = Assignments.of(indices, num_experts, counts_on_cpu=True)
    flat = indices.flatten().tolist()
    positions = [position for expert in range(num_experts) for position, index in enumerate(flat) if index == expert]
    nowhere = [position for position, index in enumerate(flat) if index == num_experts]
    assert assignments.order.tolist() == [*positions, *nowhere[:1]]
    assert assignments.counts.tolist() == [flat.count(expert) for expert in range(num_experts)]
    ranks = {position: rank for rank, position in enumerate(positions)}
    assert assignments.ranks.flatten().tolist() == [ranks.get(place, len(positions)) for place in range(len(flat))]
    x, weights = torch.randn(len(rows), 1, 2), torch.rand(indices.shape)
    gathered = assignments.gather(x)
    assert torch.equal(gathered, x[assignments.order // indices.shape[1]])
    gathered[len(positions) :] = 0
    expected = x * (weights * (indices < num_experts)).sum(1).view(-1, 1, 1)
    torch.testing.assert_close(assignments.combine(gathered, weights), expected)


def test_where_values_are_not_read_each_assignment_has_a_row():
    indices = torch.tensor([[2, 0], [0, 3], [3, 2], [0, 1]])
    assignments = Assignments.of(indices, 3, counts_on_cpu=False)
    assert assignments.order.tolist() == [1, 2, 6, 7, 0, 5, 3, 4]
    assert assignments.ranks.tolist() == [[4, 0], [1, 6], [7, 5], [2, 3]]
    assert assignments.counts.tolist() == [3, 1, 2]


def test_capacity_counts_as_the_released_code_does():
    # 2 * floor(1.5 * ceil(10 / 4)) = 2 * floor(4.5)
    assert expert_capacity(10, 4, 2, 1.5) == 8
    assert expert_capacity(197, 6, 1, 1.5) == 49


@given(TABLES, st.integers(0, 8), st.data())
def test_capacity_drops_as_a_queue_does(table, capacity, data):
    num_experts, rows = table
    priority = [data.draw(st.sampled_from([0.25, 0.5, 0.5, 1.0])) for _ in rows]  # ties too
    if data.draw(st.booleans()):  # items that go nowhere, such as padding, take no place
        padded = torch.cat([as_indices(rows), torch.full_like(as_indices(rows), num_experts)])
        doubled = over_capacity(padded, torch.tensor(priority * 2), num_experts, capacity)
        assert doubled.tolist() == [
            *over_capacity(as_indices(rows), torch.tensor(priority), num_experts, capacity).tolist(),
            *torch.zeros_like(as_indices(rows), dtype=torch.bool).tolist(),
        ]
    indices = as_indices(rows)
    dropped = over_capacity(indices, torch.tensor(priority), num_experts, capacity)
    assert dropped.tolist() == (naive_drops(rows, priority, capacity) if rows else [])
    remaining = torch.bincount(indices[~dropped], minlength=num_experts)
    assert remaining.tolist() == torch.bincount(indices.flatten(), minlength=num_experts).clamp(max=capacity).tolist()
