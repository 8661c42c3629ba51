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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.properties.mixtures import GATES, MODULES, SEEDS, mixtures
from tests.references.weighted_experts import ACTIVATIONS
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import MoeMlp, expert_implementation_info, set_expert_implementation
from timm_moe_dg.layers.experts import StackedExperts

WAYS = ["forward_grouped", "forward_loop", "forward_masked"]
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


def test_an_item_that_goes_nowhere_reaches_no_expert_and_gets_no_gradient():
    x, indices, weights = make_call()
    with torch.no_grad():
        x[0] = torch.nan
    indices[0] = EXPERTS
    experts = make_experts()
    gradients = torch.autograd.grad(experts(x, indices, weights).square().sum(), (x, *experts.parameters()))
    assert gradients[0][0].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


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


def test_the_output_may_be_changed_in_place_and_combine_weights_may_have_any_strides():
    experts, (x, indices, _) = make_experts(), make_call()
    weights = torch.rand(2, 13).t().requires_grad_()
    experts(x, indices, weights).mul_(3).sum().backward()
    expected = torch.autograd.grad(experts.forward_loop(x, indices, weights).sum() * 3, weights)[0]
    torch.testing.assert_close(weights.grad, expected)


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


def test_a_mixture_is_linearized():
    experts = make_experts()
    x, indices, weights = (part.detach() for part in make_call(3))
    expected = torch.func.jvp(lambda x: experts(x, indices, weights), (x,), (torch.ones_like(x),))[1]
    _, linear = torch.func.linearize(lambda x: experts(x, indices, weights), x)
    torch.testing.assert_close(linear(torch.ones_like(x)), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_batched_gradients_are_the_single_ones(drop):
    experts = make_experts(torch.float64, hidden_drop=drop)
    x, indices, weights = make_call(dtype=torch.float64)
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


def test_under_autocast_each_stack_and_its_gradient_is_cast_once_for_all_experts():
    experts = StackedExperts(6, 8, 16)
    stacks = [experts.fc1.weight, experts.fc2.weight]
    with Casts() as casts:
        with torch.autocast("cpu", torch.bfloat16):
            output = experts(torch.randn(20, 8), torch.arange(40).view(20, 2) % 6, torch.rand(20, 2))
        output.float().sum().backward()
    assert all(casts.shapes.count(tuple(stack.shape)) == 2 for stack in stacks)
    assert all(stack.grad.dtype == torch.float32 for stack in stacks)
    parts = [tuple(stack.shape[1:]) for stack in stacks]
    assert not any(shape in parts for shape in casts.shapes)


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_hidden_features_are_dropped_in_training_alone(implementation):
    torch.manual_seed(0)
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


def test_hidden_dropout_keeps_both_rates():
    # an activation survives timm's dropout and the experts' own: 0.9 * 0.8
    assert MoeMlp(8, drop=0.1, expert_drop=0.2).experts.drop.p == pytest.approx(1 - 0.9 * 0.8)


# torch.compile and export


def compile_recording(module, **options):
    """The compiled module, and a list that its programs are appended to."""
    programs = []

    def backend(program, inputs):
        programs.append(program)
        return program.forward

    torch._dynamo.reset()
    return torch.compile(module, backend=backend, **options), programs


def holds_the_operator(program):
    return any("timm_moe_dg" in str(node.target) for node in program.graph.nodes)


def takes_the_operator():
    """Programs of torch 2.11 cannot tell compilation from export, and hold the loop as exported ones do."""
    compiled = torch.compile(lambda x: x + torch.compiler.is_exporting(), fullgraph=True, backend="eager")
    return compiled(torch.zeros(())).item() == 0


def test_programs_are_for_batches_of_any_size():
    experts = make_experts(torch.float64)
    compiled, programs = compile_recording(experts, dynamic=True, fullgraph=True)
    for items in (9, 5, 12):
        arguments = make_call(items, dtype=torch.float64)
        torch.testing.assert_close(compiled(*arguments), experts.forward_loop(*arguments))
    assert len(programs) == 1
    assert holds_the_operator(programs[0]) == takes_the_operator()


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


def test_compiled_programs_of_quantized_experts_hold_the_loop():
    experts = make_experts()
    weight = experts.fc1.weight.detach()
    experts.fc1.weight = nn.Parameter(TwoTensor(weight, weight))  # a class of its own, as quantized weights have
    compiled, programs = compile_recording(experts)
    compiled(*(argument.detach() for argument in make_call()))
    assert programs
    assert not any(map(holds_the_operator, programs))
