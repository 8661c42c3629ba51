"""Stacked experts: every way to compute them against their equation, which way is taken, precision and storage."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from tests.properties.mixtures import GATES, mixtures
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import expert_implementation_info, set_expert_implementation
from timm_moe_dg.layers.experts import StackedExperts

WAYS = ["forward_grouped", "forward_loop"]
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


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"act_layer": nn.SiLU, "norm_layer": nn.LayerNorm}])
def test_second_derivatives_are_those_of_the_loop(options):
    experts, (x, indices, weights) = make_experts(torch.float64, **options), make_call(dtype=torch.float64)
    indices[::3, 1] = EXPERTS
    seconds = []
    for forward in (experts, experts.forward_loop):
        wanted = [x, weights, *experts.parameters()]
        firsts = torch.autograd.grad(forward(x, indices, weights).square().mean(), wanted, create_graph=True)
        seconds.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), wanted))
    torch.testing.assert_close(*seconds)


def test_nothing_waits_for_the_device_where_it_has_a_kernel():
    """The meta device has no values to wait for, and refuses whatever asks for one."""
    experts = make_experts(torch.bfloat16, norm_layer=nn.LayerNorm).to("meta")
    arguments = [tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in make_call()]
    experts(*arguments).sum().backward()
    assert expert_implementation_info(experts) == {"": "grouped"}
    assert all(tensor.grad is not None for tensor in (arguments[0], arguments[2], *experts.parameters()))


def test_indices_may_have_32_bits():
    x, indices, weights = make_call()
    experts = make_experts()
    torch.testing.assert_close(experts(x, indices.int(), weights), experts(x, indices, weights))


# Which way is taken


@pytest.mark.parametrize("implementation", ["auto", "grouped", "loop"])
def test_an_implementation_is_set_by_name(implementation):
    experts = make_experts()
    assert expert_implementation_info(experts) == {"": None}
    set_expert_implementation(nn.Sequential(experts), implementation)
    torch.testing.assert_close(experts(*make_call()), experts.forward_loop(*make_call()))
    assert expert_implementation_info(experts) == {"": "loop" if implementation == "loop" else "grouped"}


def test_an_implementation_that_does_not_exist_is_refused():
    with pytest.raises(ArgumentError, match="implementation='sorted'"):
        set_expert_implementation(nn.Linear(2, 2), "sorted")


def test_other_devices_take_the_loop(monkeypatch):
    monkeypatch.setattr("timm_moe_dg.layers.experts.DEVICES", ("cuda",))
    experts = make_experts()
    experts(*make_call())
    assert expert_implementation_info(experts) == {"": "loop"}
    set_expert_implementation(experts, "grouped")
    experts(*make_call())
    assert expert_implementation_info(experts) == {"": "grouped"}


def test_torch_func_differentiates_through_the_loop():
    experts = make_experts()
    x, indices, weights = make_call()
    loss = experts(x, indices, weights).square().sum()
    expected = torch.autograd.grad(loss, tuple(experts.parameters()))

    def loss_of(parameters):
        return torch.func.functional_call(experts, parameters, (x, indices, weights)).square().sum()

    actual = torch.func.grad(loss_of)(dict(experts.named_parameters()))
    torch.testing.assert_close(tuple(actual.values()), expected)


def test_forward_mode_derivatives_are_those_of_the_loop():
    experts = make_experts(torch.float64)
    x, indices, weights = (part.detach() for part in make_call(dtype=torch.float64))
    direction = torch.ones_like(x)
    expected = torch.autograd.functional.jvp(lambda x: experts.forward_loop(x, indices, weights), x, direction)[1]
    with forward_ad.dual_level():
        output = experts(forward_ad.make_dual(x, direction), indices, weights)
        torch.testing.assert_close(forward_ad.unpack_dual(output).tangent, expected)


def test_weights_of_another_class_take_the_loop():
    experts = make_experts()
    expected = experts(*make_call())
    experts.fc1.weight = nn.Parameter(TwoTensor(experts.fc1.weight.detach(), experts.fc1.weight.detach()))
    output = experts(*make_call())
    assert expert_implementation_info(experts) == {"": "loop"}
    torch.testing.assert_close(output.a, expected)


# Precision and storage


def test_autocast_computes_in_its_type_and_gives_gradients_in_the_parameters():
    experts = StackedExperts(EXPERTS, 8, 16)
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


def test_backward_within_autocast_computes_as_without():
    experts = make_experts()
    x, indices, weights = make_call(6)
    loss = experts(x, indices, weights).square().sum()
    wanted = [x, weights, *experts.parameters()]
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    for create_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            actual = torch.autograd.grad(loss, wanted, retain_graph=True, create_graph=create_graph)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_hidden_features_are_dropped_in_training_alone(implementation):
    experts = StackedExperts(1, 1, 4000, hidden_drop=0.25, act_layer=nn.SiLU, bias=False)
    set_expert_implementation(experts, implementation)
    for layer in (experts.fc1, experts.fc2):
        nn.init.ones_(layer.weight)
    arguments = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    hidden = F.silu(torch.ones(()))
    for training, scale in ((True, 1 / 0.75), (False, 1)):
        output = experts.train(training)(*arguments)
        (gradient,) = torch.autograd.grad(output[0, 0], experts.fc2.weight)  # the hidden features of the first item
        remaining = gradient[gradient != 0]
        torch.testing.assert_close(remaining, (hidden * scale).expand_as(remaining))
        assert len(remaining) / 4000 == pytest.approx(1 / scale, abs=5 * (0.75 * 0.25 / 4000) ** 0.5)
        assert torch.isclose(output[0], output[1], rtol=1e-5) != training


# torch.compile and export


def holds_the_operator(program):
    return any("timm_moe_dg" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("frozen", [None, "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_values_and_gradients_are_those_of_the_loop(frozen, checkpointed):
    torch._dynamo.reset()
    experts, (x, indices, weights) = make_experts(torch.float64, gated=True), make_call(dtype=torch.float64)
    indices[::3, 1] = EXPERTS
    weights = weights.detach().masked_fill(indices == EXPERTS, torch.nan).requires_grad_()
    if frozen:
        experts.get_parameter(frozen).requires_grad_(False)
    wanted = [x, *(parameter for parameter in experts.parameters() if parameter.requires_grad)]
    block = partial(checkpoint, experts, use_reentrant=False) if checkpointed else experts
    results = []
    for forward in (torch.compile(block, fullgraph=True, backend="aot_eager"), experts.forward_loop):
        output = forward(x, indices, weights)
        *gradients, of_weights = torch.autograd.grad(output.square().sum(), [*wanted, weights])
        results.append((output, *gradients, of_weights[indices != EXPERTS]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_need_no_operator_of_this_package(strict):
    arguments = tuple(argument.detach() for argument in make_call())
    assert not holds_the_operator(torch.export.export(make_experts(hidden_drop=0.1), arguments, strict=strict))
