"""Every dispatch path against the naive mixture, forward and every gradient, and the shapes nobody plans for."""

import warnings

import pytest
import torch
from torch import Tensor

from tests.references.naive_moe import naive_drops, naive_mixture
from timm_moe_dg.layers import dispatch_info
from timm_moe_dg.layers.dispatch import expert_capacity, group_assignments, over_capacity, sort_assignments
from timm_moe_dg.layers.experts import StackedExperts, _sorted_path_is_tested

PATHS = ["forward_sorted", "forward_grouped", "forward_loop", "forward_masked"]


def make_experts(num_experts: int = 4, dtype: torch.dtype = torch.float32) -> StackedExperts:
    torch.manual_seed(0)
    experts = StackedExperts(num_experts, 8, 16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def make_routing(tokens: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    scores = torch.rand(tokens, num_experts, generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_()
    return x, scores.topk(top_k).indices, weights


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return list(torch.autograd.grad((output * probe).sum(), inputs))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), [(13, 4, 2), (13, 4, 4), (5, 1, 1), (1, 4, 3), (3, 64, 2)])
def test_output_and_all_gradients_equal_the_naive_mixture(path, tokens, num_experts, top_k):
    experts = make_experts(num_experts)
    x, indices, weights = make_routing(tokens, num_experts, top_k)
    inputs = (x, weights, *experts.parameters())
    expected = naive_mixture(experts, x, indices, weights)
    actual = getattr(experts, path)(x, indices, weights)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients(actual, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_an_assignment_to_no_expert_adds_nothing(path):
    experts = make_experts()
    x, indices, weights = make_routing(13, 4, 2)
    indices[::2, 1] = 4
    indices[3] = 4
    actual = getattr(experts, path)(x, indices, weights)
    torch.testing.assert_close(actual, naive_mixture(experts, x, indices, weights), rtol=1e-5, atol=1e-5)
    assert actual[3].eq(0).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("routed_nowhere", [False, True])
def test_without_any_assignment_every_expert_still_gets_a_zero_gradient(path, routed_nowhere):
    experts = make_experts()
    x, indices, weights = make_routing(6 if routed_nowhere else 0, 4, 2)
    output = getattr(experts, path)(x, torch.full_like(indices, 4), weights)
    assert output.shape == x.shape
    for gradient in gradients(output, *experts.parameters()):
        assert gradient.eq(0).all()


@pytest.mark.parametrize("path", PATHS)
def test_experts_that_nobody_visits_get_a_zero_gradient_and_the_others_do_not(path):
    experts = make_experts()
    x, indices, weights = make_routing(6, 4, 1)
    gradient = gradients(getattr(experts, path)(x, torch.full_like(indices, 2), weights), experts.fc1.weight)[0]
    assert [bool(expert.any()) for expert in gradient] == [False, False, True, False]


@pytest.mark.parametrize("path", PATHS)
def test_items_may_be_whole_images(path):
    experts = make_experts()
    _, indices, weights = make_routing(5, 4, 2)
    images = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(2))
    actual = getattr(experts, path)(images, indices, weights)
    for token in range(3):
        expected = naive_mixture(experts, images[:, token], indices, weights)
        torch.testing.assert_close(actual[:, token], expected, rtol=1e-5, atol=1e-5)


# Rounding units 2^-8 and 2^-11 on outputs of size about 5, summed over two experts
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 0.1), (torch.float16, 0.0125)]
)
def test_every_floating_type(path, dtype, tolerance):
    experts = make_experts(dtype=torch.float64)
    x, indices, weights = make_routing(13, 4, 2, torch.float64)
    expected = naive_mixture(experts, x, indices, weights.double())
    actual = getattr(experts.to(dtype), path)(x.to(dtype), indices, weights.to(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def test_sorted_assignments_are_grouped_by_expert_and_keep_the_order_of_items():
    indices = torch.tensor([[2, 0], [0, 3], [3, 2], [0, 1]])  # 3 is nowhere
    assignments = sort_assignments(indices, 3)
    assert assignments.counts == [3, 1, 2]
    assert assignments.items.tolist() == [0, 1, 3, 3, 0, 2]
    assert assignments.positions.tolist() == [1, 2, 6, 7, 0, 5]


def test_grouped_assignments_have_those_of_nowhere_at_the_end():
    indices = torch.tensor([[2, 0], [0, 3], [3, 2], [0, 1]])
    groups = group_assignments(indices, 3)
    assert groups.order.tolist() == [1, 2, 6, 7, 0, 5, 3, 4]
    assert groups.experts.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert groups.ends.tolist() == [3, 4, 8]
    assert groups.counts() == [3, 1, 4]
    assert groups.ranks.tolist() == [[4, 0], [1, 6], [7, 5], [2, 3]]
    assert groups.absent.tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert group_assignments(indices.clamp(max=2), 3).absent is None


def test_capacity_counts_as_the_released_code_does():
    # 2 * floor(1.5 * ceil(10 / 4)) = 2 * floor(4.5)
    assert expert_capacity(10, 4, 2, 1.5) == 8
    assert expert_capacity(197, 6, 1, 1.5) == 49


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_drops_equal_the_naive_queue(capacity):
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(29, 4, generator=generator)
    indices = scores.topk(2).indices
    priority = (scores.amax(1) * 4).round() / 4  # many ties
    expected = naive_drops(indices.tolist(), priority.tolist(), capacity)
    assert over_capacity(indices, priority, 4, capacity).tolist() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", PATHS)
def test_cuda_equals_cpu(path):
    experts = make_experts(dtype=torch.float64)
    x, indices, weights = make_routing(64, 4, 2, torch.float64)
    expected = getattr(experts, path)(x, indices, weights)
    actual = getattr(experts.cuda(), path)(x.cuda(), indices.cuda(), weights.cuda())
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-10, atol=1e-10)


def test_each_layer_says_which_path_it_took_by_the_rows_of_an_expert():
    experts = make_experts()
    assert dispatch_info(experts) == {"": None}
    for items, path in ((63, "grouped"), (64, "sorted")):  # 2 experts per item, 4 experts: 31.5 and 32 rows each
        experts(*make_routing(items, 4, 2))
        assert dispatch_info(experts) == {"": path}
    experts(torch.randn(32, 2, 8), torch.zeros(32, 2, dtype=torch.int64), torch.rand(32, 2))  # as many tokens
    assert dispatch_info(experts) == {"": "sorted"}


def test_where_the_fast_path_is_not_tested_the_loop_runs_with_one_warning(monkeypatch):
    monkeypatch.setattr("timm_moe_dg.layers.experts.SORTED_PATH_DTYPES", (torch.float32,))
    monkeypatch.setattr(StackedExperts, "forward_sorted", None)  # would fail if called
    experts = make_experts(dtype=torch.float64)
    x, indices, weights = make_routing(5, 4, 2, torch.float64)
    _sorted_path_is_tested.cache_clear()
    with pytest.warns(UserWarning, match=r"experts on cpu in torch.float64: the sorted dispatch is not tested"):
        output = experts(x, indices, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(x, indices, weights)
    _sorted_path_is_tested.cache_clear()
    torch.testing.assert_close(output, naive_mixture(experts, x, indices, weights.double()))
    assert dispatch_info(experts) == {"": "loop"}
