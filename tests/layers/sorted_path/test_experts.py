"""The experts' own function of autograd: against autograd's steps, its second derivatives, dropout, what it keeps."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.layers.sorted_path.forms import FORMS
from timm_moe_dg.layers.dispatch import sort_assignments
from timm_moe_dg.layers.experts import StackedExperts, dispatch_info, set_dispatch
from timm_moe_dg.layers.feed_forwards import GatedActivation
from timm_moe_dg.layers.sorted_path.activations import sorted_activation
from timm_moe_dg.layers.sorted_path.experts import Operands, sorted_experts

ITEMS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 6, 2, 4, 5, 3, 2
INDICES = torch.tensor([[0, 1], [1, 3], [3, 3], [0, 2], [1, 0], [2, 1]])  # 3 is nowhere


every_activation = pytest.mark.parametrize("act", FORMS.values(), ids=FORMS)


def operands(bias1=True, bias2=True, act=FORMS["gelu"]):
    generator = torch.Generator().manual_seed(0)
    before = HIDDEN * (1 + isinstance(act, GatedActivation))
    shapes = [(ITEMS, TOKENS, WIDTH), (ITEMS, TOP_K)]
    shapes += [(EXPERTS, before, WIDTH), (EXPERTS, before), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH)]
    there = [True, True, True, bias1, True, bias2]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return Operands(*(tensor.requires_grad_() if has else None for tensor, has in zip(tensors, there, strict=True)))


def assignments():
    return sort_assignments(INDICES, EXPERTS)


def one_by_one(x, combine_weights, weight1, bias1, weight2, bias2, act=FORMS["gelu"]):
    """Item by item and choice by choice."""
    rows = []
    for item in range(ITEMS):
        total = torch.zeros_like(x[item])
        for choice, expert in enumerate(INDICES[item].tolist()):
            if expert < EXPERTS:
                before = F.linear(x[item], weight1[expert], None if bias1 is None else bias1[expert])
                output = F.linear(act(before), weight2[expert], None if bias2 is None else bias2[expert])
                total = total + combine_weights[item, choice] * output
        rows.append(total)
    return torch.stack(rows)


@every_activation
@pytest.mark.parametrize(("bias1", "bias2"), list(itertools.product([True, False], repeat=2)))
def test_output_and_gradients_equal_those_item_by_item(act, bias1, bias2):
    inputs = operands(bias1, bias2, act)
    given = [tensor for tensor in inputs if tensor is not None]
    actual, expected = sorted_experts(inputs, assignments(), sorted_activation(act)), one_by_one(*inputs, act)
    torch.testing.assert_close(actual, expected)
    probe = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).view_as(actual)
    for got, want in zip(*(torch.autograd.grad((y * probe).sum(), given) for y in (actual, expected)), strict=True):
        torch.testing.assert_close(got, want)


@every_activation
def test_without_gradients_the_output_is_the_same_bit_by_bit(act):
    call = (operands(act=act), assignments(), sorted_activation(act))
    recorded = sorted_experts(*call)
    with torch.no_grad():
        assert torch.equal(sorted_experts(*call), recorded)
    with torch.inference_mode():
        assert torch.equal(sorted_experts(*call), recorded)
    frozen = Operands(*(tensor.detach() for tensor in call[0]))
    assert torch.equal(sorted_experts(frozen, *call[1:]), recorded)


@every_activation
def test_nothing_is_read_before_it_is_written(act):
    expected = sorted_experts(operands(act=act), assignments(), sorted_activation(act))
    wanted = operands(act=act)
    torch.use_deterministic_algorithms(True)  # fills fresh tensors with NaN
    try:
        actual = sorted_experts(wanted, assignments(), sorted_activation(act))
        actual.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(actual, expected)
    assert all(tensor.grad.isfinite().all() for tensor in wanted)


@pytest.mark.parametrize("act", [FORMS["gelu"], FORMS["swiglu"]], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("frozen", ["x", "combine_weights", "weight1", "bias1", "weight2", "bias2"])
def test_a_frozen_operand_gets_no_gradient_and_changes_none_of_the_others(frozen, act):
    full, part = operands(act=act), operands(act=act)
    getattr(part, frozen).requires_grad_(False)
    for inputs in (full, part):
        sorted_experts(inputs, assignments(), sorted_activation(act)).square().sum().backward()
    for name in Operands._fields:
        if name == frozen:
            assert getattr(part, name).grad is None
        else:
            assert torch.equal(getattr(part, name).grad, getattr(full, name).grad)


@pytest.mark.parametrize("drop", [0.0, 0.4])
@every_activation
def test_gradients_to_be_differentiated_equal_the_others_even_where_operands_depend_on_each_other(drop, act):
    found = []
    activation = sorted_activation(act)
    for create_graph in (False, True):
        inputs = operands(act=act)
        torch.manual_seed(3)
        once = sorted_experts(inputs, assignments(), activation, drop)
        again = inputs._replace(x=once, combine_weights=once.mean(1)[:, :TOP_K])
        loss = sorted_experts(again, assignments(), activation, drop).square().sum()
        found.append(torch.autograd.grad(loss, tuple(inputs), create_graph=create_graph))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_second_derivatives_are_right_too(drop):
    def with_the_same_mask(*tensors):
        torch.manual_seed(3)
        return sorted_experts(Operands(*tensors), assignments(), drop=drop)

    assert torch.autograd.gradcheck(with_the_same_mask, tuple(operands()))
    assert torch.autograd.gradgradcheck(with_the_same_mask, tuple(operands()))


def one_way(value, drop, items=40_000):
    """Items of one feature through one expert with weights of 1."""
    items = torch.full((items, 1, 1), value)
    one = torch.ones(1, 1, 1)
    route = sort_assignments(torch.zeros(len(items), 1, dtype=torch.int64), 1)
    return sorted_experts(Operands(items, torch.ones(len(items), 1), one, None, one, None), route, drop=drop)


def test_dropout_loses_its_share_and_keeps_the_mean():
    outputs = one_way(3.0, drop=0.25)
    kept = outputs != 0
    value = F.gelu(torch.tensor(3.0)).item()
    torch.testing.assert_close(outputs[kept], torch.full_like(outputs[kept], value / 0.75))
    # binomial deviation of the share: sqrt(0.25 * 0.75 / 40000) = 0.0022; five of them
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.011)


@pytest.mark.parametrize("drop", [1e-9, 2**-16, 0.1, 0.5, 1 - 2**-16])
def test_what_is_kept_makes_up_for_what_is_lost_at_any_rate(drop):
    count = 400_003
    outputs = one_way(3.0, drop, count)
    value = F.gelu(torch.tensor(3.0)).item()
    kept = outputs != 0
    torch.testing.assert_close(outputs[kept], torch.full_like(outputs[kept], value / (1 - drop)))
    # six binomial deviations, and one place
    assert kept.sum().item() == pytest.approx(count * (1 - drop), abs=6 * (count * drop * (1 - drop)) ** 0.5 + 1)


def test_losing_everything_leaves_the_bias():
    inputs = operands()
    expected = one_by_one(*inputs._replace(weight2=torch.zeros_like(inputs.weight2)))
    torch.testing.assert_close(sorted_experts(inputs, assignments(), drop=1.0), expected)


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_one_tensor_of_hidden_features_and_no_mask_is_kept_for_the_backward_pass(drop):
    experts = StackedExperts(3, 8, 32, hidden_drop=drop).train()
    set_dispatch(experts, "sorted")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        experts(torch.randn(10, 8), torch.arange(20).view(10, 2) % 3, torch.rand(10, 2, requires_grad=True))
    parameters = {parameter.data_ptr() for parameter in experts.parameters()}
    floats = [tensor for tensor in kept if tensor.is_floating_point() and tensor.data_ptr() not in parameters]
    assert sum(tensor.numel() for tensor in floats if tensor.shape[-1] == 32) == 20 * 32
    # besides: the items, their combine weights, the items in the experts' order, and the outputs with a row of zeros
    assert sum(tensor.numel() for tensor in floats if tensor.shape[-1] != 32) == 10 * 8 + 10 * 2 + 20 * 8 + 21 * 8
    assert not any(tensor.dtype == torch.bool for tensor in kept)


class Watch(TorchDispatchMode):
    """Counts operators and remembers the largest tensor that was taken from `new_empty`."""

    def __init__(self):
        super().__init__()
        self.calls, self.largest = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls[func] += 1
        if func is torch.ops.aten.new_empty.default:
            self.largest = max(self.largest, result.numel())
        return result


def test_one_experts_hidden_features_are_all_that_is_held_in_inference_and_in_the_backward_pass():
    experts = StackedExperts(8, 8, 512)
    set_dispatch(experts, "sorted")
    items, indices, weights = torch.randn(64, 8), torch.arange(64).view(64, 1) % 8, torch.rand(64, 1)
    with torch.no_grad(), Watch() as watch:
        experts(items, indices, weights)
    assert watch.largest == 8 * 512
    output = experts(items, indices, weights)
    with Watch() as watch:
        output.sum().backward()
    assert watch.largest == 8 * 512


@pytest.mark.parametrize(("frozen", "products"), [((), 4), (("x",), 3), (("weight1",), 3), (("weight1", "weight2"), 2)])
def test_no_matrix_product_for_a_gradient_that_nobody_needs(frozen, products):
    inputs = operands()
    for name in frozen:
        getattr(inputs, name).requires_grad_(False)
    output = sorted_experts(inputs, assignments())
    with Watch() as watch:
        output.sum().backward()
    assert watch.calls[torch.ops.aten.addmm.out] == products * EXPERTS


@pytest.mark.parametrize("path", ["forward_sorted", "forward_grouped", "forward_loop"])
@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_the_weight_of_an_assignment_to_no_expert_does_not_matter(path, weight):
    experts = StackedExperts(EXPERTS, 8, 16)
    x, weights = torch.randn(ITEMS, 8), torch.rand(ITEMS, TOP_K)
    weights[INDICES == EXPERTS] = weight
    x.requires_grad_()
    output = getattr(experts, path)(x, INDICES, weights)
    output.sum().backward()
    assert output.isfinite().all()
    assert output[2].eq(0).all()
    assert x.grad.isfinite().all()


def test_many_assignments_keep_the_order_of_items_within_an_expert():
    indices = torch.randint(0, 5, (700, 2), generator=torch.Generator().manual_seed(0))
    many = sort_assignments(indices, 5)
    assert all((part.diff() >= 0).all() for part in many.items.split(many.counts))


def test_the_form_of_gelu_reaches_the_fast_path():
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, 8, 16, act_layer=partial(nn.GELU, approximate="tanh"))
    nn.init.normal_(experts.fc1.weight)  # features around 1, where the two forms differ most
    nn.init.normal_(experts.fc2.weight)
    call = (torch.randn(ITEMS, 8), INDICES, torch.rand(ITEMS, TOP_K))
    torch.testing.assert_close(experts.forward_sorted(*call), experts.forward_loop(*call))
    exact = StackedExperts(EXPERTS, 8, 16)
    exact.load_state_dict(experts.state_dict())
    assert (exact.forward_sorted(*call) - experts.forward_sorted(*call)).abs().max() > 1e-3


def test_the_output_may_be_changed_in_place_and_combine_weights_may_have_any_strides():
    experts = StackedExperts(EXPERTS, 8, 16)
    x, weights = torch.randn(ITEMS, 8), torch.rand(TOP_K, ITEMS).t().requires_grad_()
    experts(x, INDICES, weights).mul_(3).sum().backward()
    expected = torch.autograd.grad(experts.forward_loop(x, INDICES, weights).sum() * 3, weights)[0]
    torch.testing.assert_close(weights.grad, expected)


@pytest.mark.parametrize("dispatch", ["sorted", "grouped"])
def test_autocast_computes_in_its_type_and_gives_gradients_in_the_parameters(dispatch):
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, 8, 16)
    set_dispatch(experts, dispatch)
    x, weights = torch.randn(ITEMS, 8, requires_grad=True), torch.rand(ITEMS, TOP_K)
    exact = experts(x, INDICES, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = experts(x, INDICES, weights)
        assert rounded.dtype == torch.bfloat16
        assert experts.double()(x.double(), INDICES, weights).dtype == torch.float64  # autocast leaves it alone
    experts.float()
    # rounding unit 2^-8 on outputs of size below 0.1
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=2e-3)
    rounded.float().square().sum().backward()
    assert {tensor.grad.dtype for tensor in (x, *experts.parameters())} == {torch.float32}


@pytest.mark.parametrize("dispatch", ["sorted", "grouped"])
def test_backward_within_autocast_computes_as_without(dispatch):
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, 8, 16)
    set_dispatch(experts, dispatch)
    x, weights = torch.randn(ITEMS, 8, requires_grad=True), torch.rand(ITEMS, TOP_K, requires_grad=True)
    loss = experts(x, INDICES, weights).square().sum()
    wanted = [x, weights, *experts.parameters()]
    expected = torch.autograd.grad(loss, wanted, retain_graph=True)
    for create_graph in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.autograd.grad(loss, wanted, retain_graph=True, create_graph=create_graph)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)


def test_torch_func_differentiates_through_the_loop():
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, 8, 16)
    set_dispatch(experts, "sorted")
    x, weights = torch.randn(ITEMS, 8), torch.rand(ITEMS, TOP_K)
    loss = experts(x, INDICES, weights).square().sum()
    expected = torch.autograd.grad(loss, list(experts.parameters()))
    assert dispatch_info(experts) == {"": "sorted"}

    def of(parameters):
        return torch.func.functional_call(experts, parameters, (x, INDICES, weights)).square().sum()

    actual = torch.func.grad(of)(dict(experts.named_parameters()))
    for got, want in zip(actual.values(), expected, strict=True):
        torch.testing.assert_close(got, want)


class Half(nn.SiLU):
    """A subclass may compute anything."""

    def forward(self, x):
        return super().forward(x) / 2


def test_other_activations_and_normalized_hidden_features_are_computed_group_by_group():
    torch.manual_seed(0)
    for options in ({"act_layer": nn.ReLU}, {"norm_layer": nn.LayerNorm}, {"act_layer": Half}):
        experts = StackedExperts(1, 8, 16, **options)
        x = torch.randn(5, 8)
        hidden = experts.norm(experts.act(F.linear(x, experts.fc1.weight[0], experts.fc1.bias[0])))
        expected = F.linear(hidden, experts.fc2.weight[0], experts.fc2.bias[0])
        torch.testing.assert_close(experts(x, torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)), expected)
        assert dispatch_info(experts) == {"": "grouped"}


def test_indices_may_have_32_bits():
    experts = StackedExperts(EXPERTS, 8, 16)
    x, weights = torch.randn(ITEMS, 8), torch.rand(ITEMS, TOP_K)
    assert torch.equal(experts(x, INDICES.int(), weights), experts(x, INDICES, weights))
