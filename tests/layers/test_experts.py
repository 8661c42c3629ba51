"""Stacked experts: every way to compute them against their equation, which way is taken, precision and storage."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.test_mixtures import make_layer
from tests.properties.mixtures import GATES, MODULES, SEEDS, mixtures
from tests.references.weighted_experts import ACTIVATIONS, weighted_experts
from timm_moe_dg.layers import expert_implementation_info, set_expert_implementation
from timm_moe_dg.layers.experts import StackedExperts, _is_known_or_warn

WAYS = ["forward_sorted", "forward_grouped", "forward_loop", "forward_masked"]
EXACT = {"rtol": 1e-9, "atol": 1e-9}  # float64, whose rounding unit is 2e-16, after some tens of operations
EXPERTS = 4


# The equation


@pytest.mark.parametrize("gate", GATES)
@given(st.data())
def test_every_way_gives_the_reference_in_every_type(gate, data):
    mixture = data.draw(mixtures(gates=[gate]))
    expected, tolerance = mixture.expected(), mixture.tolerance()
    for way in mixture.ways:
        actual = getattr(mixture.experts, way)(*mixture.arguments)
        assert actual.dtype == mixture.x.dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance, msg=way)
        with torch.no_grad():
            without_graph = getattr(mixture.experts, way)(*mixture.arguments)
        torch.testing.assert_close(without_graph.double(), expected, rtol=0, atol=tolerance, msg=way)


@given(mixtures(torch.float64))
def test_every_way_gives_the_gradients_of_the_reference(mixture):
    inputs = (mixture.x.requires_grad_(), mixture.combine_weights.requires_grad_(), *mixture.experts.parameters())
    expected = gradients(mixture.expected(), inputs)
    for way in mixture.ways:
        actual = gradients(getattr(mixture.experts, way)(*mixture.arguments), inputs)
        torch.testing.assert_close(actual, expected, **EXACT, msg=way)


def gradients(output, inputs):
    """Zeros where the output does not depend on an input."""
    probe = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    if not output.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in inputs)
    return torch.autograd.grad((output * probe).sum(), inputs, materialize_grads=True)


@given(mixtures(torch.float64), st.data())
def test_an_item_that_is_not_finite_changes_no_other(mixture, data):
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    changed = data.draw(st.integers(0, max(len(mixture.x) - 1, 0)))
    others = [item for item in range(len(mixture.x)) if item != changed]
    x = mixture.x.clone()
    x[changed : changed + 1] = value
    for way in mixture.ways:
        output = getattr(mixture.experts, way)(x, *mixture.arguments[1:])
        torch.testing.assert_close(output[others], mixture.expected()[others], **EXACT, msg=way)


@given(mixtures(torch.float64), st.data())
def test_an_expert_changes_its_own_items_alone(mixture, data):
    changed = data.draw(st.integers(0, mixture.experts.num_experts - 1))
    others = ~(mixture.expert_indices == changed).any(1)
    expected = mixture.expected()[others]
    with torch.no_grad():
        mixture.experts.fc2.weight[changed] = float("nan")
    for way in mixture.ways:
        output = getattr(mixture.experts, way)(*mixture.arguments)
        torch.testing.assert_close(output[others], expected, **EXACT, msg=way)


def test_masked_outputs_need_not_be_finite():
    """The smallest mixture in which that failed: one item that goes nowhere, one expert."""
    experts = StackedExperts(1, 1, 1, dtype=torch.float64)
    nn.init.constant_(experts.fc2.weight, float("inf"))
    nn.init.constant_(experts.fc2.bias, float("nan"))
    nowhere = experts.forward_masked(torch.ones(1, 1).double(), torch.ones(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert nowhere.tolist() == [[0.0]]


@given(mixtures(torch.float64), SEEDS)
def test_the_order_of_items_and_the_numbers_of_experts_do_not_matter(mixture, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(mixture.x), generator=generator)
    numbers = torch.randperm(mixture.experts.num_experts, generator=generator)  # old -> new
    renumbered = torch.cat([numbers, torch.tensor([len(numbers)])])
    for way in mixture.ways:
        before = getattr(mixture.experts, way)(*mixture.arguments)
        permuted = getattr(mixture.experts, way)(*(part[order] for part in mixture.arguments))
        torch.testing.assert_close(permuted, before[order], **EXACT, msg=way)
        for parameter in (*mixture.experts.fc1.parameters(), *mixture.experts.fc2.parameters()):
            parameter.data[numbers] = parameter.data.clone()
        arguments = (mixture.x, renumbered[mixture.expert_indices], mixture.combine_weights)
        torch.testing.assert_close(getattr(mixture.experts, way)(*arguments), before, **EXACT, msg=way)
        for parameter in (*mixture.experts.fc1.parameters(), *mixture.experts.fc2.parameters()):
            parameter.data = parameter.data[numbers]


@pytest.mark.parametrize("act", sorted(MODULES))
def test_the_references_activations_are_those_of_pytorch(act):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[act](x), MODULES[act](x), **EXACT)


def make_experts(dtype=torch.float32, **options):
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, 8, 16, **options)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def make_call(tokens=13, top_k=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    return x, scores.topk(top_k).indices, torch.rand(tokens, top_k, generator=generator).requires_grad_()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [0, 6])
def test_experts_without_items_get_a_gradient_of_zero_and_not_none(way, tokens):
    experts = make_experts()
    x, indices, weights = make_call(tokens)
    for expert in (2, EXPERTS):
        output = getattr(experts, way)(x, torch.full_like(indices, expert), weights)
        for gradient in torch.autograd.grad(output.sum(), tuple(experts.parameters())):
            assert [bool(part.any()) for part in gradient] == [
                tokens > 0 and index == expert for index in range(EXPERTS)
            ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_the_weight_of_an_assignment_to_no_expert_does_not_matter(way, weight):
    x, indices, weights = make_call()
    weights = weights.detach()
    indices[::3, 1] = EXPERTS
    indices[2] = EXPERTS
    weights[indices == EXPERTS] = weight
    output = getattr(make_experts(), way)(x, indices, weights)
    output.sum().backward()
    assert output.isfinite().all()
    assert output[2].eq(0).all()
    assert x.grad.isfinite().all()


def test_indices_may_have_32_bits():
    x, indices, weights = make_call()
    experts = make_experts()
    torch.testing.assert_close(experts(x, indices.int(), weights), experts(x, indices, weights))


# Which way is taken


def test_the_way_follows_from_the_rows_of_an_expert():
    experts = make_experts()
    assert expert_implementation_info(experts) == {"": None}
    for items, way in ((63, "grouped"), (64, "sorted")):  # 2 experts per item, 4 experts: 31.5 and 32 rows each
        experts(*make_call(items))
        assert expert_implementation_info(experts) == {"": way}
    experts(torch.randn(32, 2, 8), torch.zeros(32, 2, dtype=torch.int64), torch.rand(32, 2))  # as many tokens
    assert expert_implementation_info(experts) == {"": "sorted"}


@pytest.mark.parametrize("implementation", ["sorted", "grouped", "loop"])
def test_an_implementation_is_set_by_name(implementation):
    experts = make_experts()
    set_expert_implementation(nn.Sequential(experts), implementation)
    torch.testing.assert_close(experts(*make_call()), experts.forward_loop(*make_call()))
    assert expert_implementation_info(experts) == {"": implementation}


class Half(nn.SiLU):
    """A subclass may compute anything."""

    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize("options", [{"act_layer": nn.ReLU}, {"norm_layer": nn.LayerNorm}, {"act_layer": Half}])
@pytest.mark.parametrize("implementation", ["auto", "sorted"])
def test_other_activations_and_normalized_hidden_features_are_grouped_even_if_sorted_is_set(options, implementation):
    experts = make_experts(**options)
    set_expert_implementation(experts, implementation)
    x = torch.randn(5, 8)
    hidden = experts.norm(experts.act(F.linear(x, experts.fc1.weight[0], experts.fc1.bias[0])))
    expected = F.linear(hidden, experts.fc2.weight[0], experts.fc2.bias[0])
    torch.testing.assert_close(experts(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)), expected)
    assert expert_implementation_info(experts) == {"": "grouped"}


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"implementation='triton': choose one of auto, sorted, grouped, loop"):
        set_expert_implementation(nn.Linear(2, 2), "triton")


def test_untested_types_take_the_loop_with_one_warning(monkeypatch):
    monkeypatch.setattr("timm_moe_dg.layers.experts.DTYPES", (torch.float32,))
    monkeypatch.setattr(StackedExperts, "forward_grouped", None)  # would fail if called
    experts = make_experts(dtype=torch.float64)
    x, indices, weights = make_call(5, dtype=torch.float64)
    _is_known_or_warn.cache_clear()
    with pytest.warns(UserWarning, match=r"experts on cpu in torch.float64: only the loop over experts is known"):
        output = experts(x, indices, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts(x, indices, weights)
    _is_known_or_warn.cache_clear()
    torch.testing.assert_close(output, weighted_experts(experts, "gelu", None, x, indices, weights))
    assert expert_implementation_info(experts) == {"": "loop"}


def test_torch_func_differentiates_through_the_loop():
    experts = make_experts()
    set_expert_implementation(experts, "sorted")
    x, indices, weights = make_call()
    loss = experts(x, indices, weights).square().sum()
    expected = torch.autograd.grad(loss, tuple(experts.parameters()))
    assert expert_implementation_info(experts) == {"": "sorted"}

    def loss_of(parameters):
        return torch.func.functional_call(experts, parameters, (x, indices, weights)).square().sum()

    actual = torch.func.grad(loss_of)(dict(experts.named_parameters()))
    torch.testing.assert_close(tuple(actual.values()), expected)


EVERY_WAY = pytest.mark.parametrize("options", [{}, {"act_layer": nn.ReLU}], ids=["simple", "other"])
EVERY_SIZE = pytest.mark.parametrize("tokens", [13, 70], ids=["few rows", "many rows"])


@EVERY_WAY
@EVERY_SIZE
def test_forward_mode_derivatives_are_those_of_the_loop(options, tokens):
    experts = make_experts(torch.float64, **options)
    x, indices, weights = (part.detach() for part in make_call(tokens, dtype=torch.float64))
    direction = torch.ones_like(x)
    expected = torch.autograd.functional.jvp(lambda x: experts.forward_loop(x, indices, weights), x, direction)[1]
    with forward_ad.dual_level():
        output = experts(forward_ad.make_dual(x, direction), indices, weights)
        torch.testing.assert_close(forward_ad.unpack_dual(output).tangent, expected)


def test_a_mixture_is_linearized():
    experts = make_experts()
    x, indices, weights = (part.detach() for part in make_call(3))
    expected = torch.func.jvp(lambda x: experts(x, indices, weights), (x,), (torch.ones_like(x),))[1]
    _, linear = torch.func.linearize(lambda x: experts(x, indices, weights), x)
    torch.testing.assert_close(linear(torch.ones_like(x)), expected)


@EVERY_WAY
@EVERY_SIZE
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_batched_gradients_are_the_single_ones(options, tokens, drop):
    experts = make_experts(torch.float64, hidden_drop=drop, **options)
    x, indices, weights = make_call(tokens, dtype=torch.float64)
    output, wanted = experts(x, indices, weights), (x, weights, *experts.parameters())
    batch = torch.stack([torch.ones_like(output), torch.linspace(-1, 1, output.numel()).view_as(output)])
    expected = [torch.autograd.grad(output, wanted, grad, retain_graph=True) for grad in batch]
    expected = tuple(map(torch.stack, zip(*expected, strict=True)))
    actual = torch.autograd.grad(output, wanted, batch, retain_graph=True, is_grads_batched=True)
    torch.testing.assert_close(actual, expected)
    actual = torch.vmap(lambda grad: torch.autograd.grad(output, wanted, grad, retain_graph=True))(batch)
    torch.testing.assert_close(actual, expected)


def test_weights_of_another_class_take_the_loop():
    experts = make_experts()
    expected = experts(*make_call(70))
    experts.fc1.weight = nn.Parameter(TwoTensor(experts.fc1.weight.detach(), experts.fc1.weight.detach()))
    output = experts(*make_call(70))
    assert expert_implementation_info(experts) == {"": "loop"}
    torch.testing.assert_close(output.a, expected)


# Precision and storage


@pytest.mark.parametrize("implementation", ["sorted", "grouped"])
def test_autocast_computes_in_its_type_and_gives_gradients_in_the_parameters(implementation):
    experts = StackedExperts(EXPERTS, 8, 16)
    set_expert_implementation(experts, implementation)
    x, indices, weights = make_call(6)
    exact = experts(x, indices, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = experts(x, indices, weights)
        assert rounded.dtype == torch.bfloat16
        assert experts.double()(x.double(), indices, weights).dtype == torch.float64  # autocast leaves it alone
    experts.float()
    # rounding unit 2^-8 on outputs of size below 0.1
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=2e-3)
    rounded.float().square().sum().backward()
    assert {tensor.grad.dtype for tensor in (x, *experts.parameters())} == {torch.float32}


@pytest.mark.parametrize("implementation", ["sorted", "grouped"])
def test_backward_within_autocast_computes_as_without(implementation):
    experts = make_experts()
    set_expert_implementation(experts, implementation)
    x, indices, weights = make_call(6)
    loss = experts(x, indices, weights).square().sum()
    wanted = [x, weights, *experts.parameters()]
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    for create_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            actual = torch.autograd.grad(loss, wanted, retain_graph=True, create_graph=create_graph)
        torch.testing.assert_close(actual, expected)


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


@pytest.mark.parametrize("implementation", ["sorted", "grouped"])
def test_under_autocast_each_stack_and_its_gradient_is_cast_once_for_all_experts(implementation):
    experts = StackedExperts(6, 8, 16)
    set_expert_implementation(experts, implementation)
    stacks = [experts.fc1.weight, experts.fc2.weight]
    with Casts() as casts:
        with torch.autocast("cpu", torch.bfloat16):
            output = experts(torch.randn(20, 8), torch.arange(40).view(20, 2) % 6, torch.rand(20, 2))
        output.float().sum().backward()
    assert all(casts.shapes.count(tuple(stack.shape)) == 2 for stack in stacks)
    assert all(stack.grad.dtype == torch.float32 for stack in stacks)
    parts = [tuple(stack.shape[1:]) for stack in stacks]
    assert not any(shape in parts for shape in casts.shapes)


def test_hidden_dropout_keeps_both_rates():
    # an activation survives timm's dropout and the experts' own: 0.9 * 0.8
    assert make_layer(drop=0.1, expert_drop=0.2).experts.drop.p == pytest.approx(1 - 0.9 * 0.8)
