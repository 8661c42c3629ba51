"""The sorted experts: activations, dropout, gradients, what is saved, and the same under torch.compile.

Their values and first derivatives are compared with a reference in test_experts.py.
"""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from timm_moe_dg.layers import assignments
from timm_moe_dg.layers import fast_experts as module
from timm_moe_dg.layers.dense.feed_forwards import GatedActivation
from timm_moe_dg.layers.experts import StackedExperts, set_expert_implementation
from timm_moe_dg.layers.fast_experts import (
    DROPPED,
    ExpertInputs,
    HiddenDropout,
    SortedActivation,
    draw_seed,
    dropped_positions,
    mark_dropped,
    sorted_activation,
    sorted_experts,
)

ITEMS, TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 6, 2, 4, 5, 3, 2
INDICES = torch.tensor([[0, 1], [1, 3], [3, 3], [0, 2], [1, 0], [2, 1]])  # 3 is nowhere
CPU = torch.device("cpu")
FORMS = {
    "gelu": nn.GELU(),
    "tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "swiglu": GatedActivation(nn.SiLU()),
    "geglu": GatedActivation(nn.GELU()),
    "gate_last": GatedActivation(nn.GELU(approximate="tanh"), gate_last=True),
}
every_activation = pytest.mark.parametrize("act", FORMS.values(), ids=FORMS)


# Activations


def features(act, rows=5):
    torch.manual_seed(0)
    return torch.randn(rows, HIDDEN * (1 + isinstance(act, GatedActivation)), dtype=torch.float64, requires_grad=True)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dropped_features_and_their_derivatives_are_exactly_zero(act, dtype):
    activation, before = sorted_activation(act), features(act).detach().to(dtype)
    mask = torch.arange(5 * HIDDEN).view(5, HIDDEN) % 3 == 0
    expected = act(before).masked_fill(mask, 0)
    activation.halves(before)[0].masked_fill_(mask, DROPPED)
    hidden = torch.empty_like(expected)
    activation.write(before, hidden)
    assert hidden[mask].eq(0).all()
    torch.testing.assert_close(hidden, expected)
    grad, out = torch.ones_like(expected), torch.empty_like(before)
    activation.write_gradient(before, grad, hidden, out, needs_hidden=True)
    for half in out.split(HIDDEN, dim=-1):
        assert half[mask].eq(0).all()
        assert half[~mask].ne(0).all()


def test_modules_whose_activation_is_supported():
    assert sorted_activation(nn.GELU(approximate="tanh")) == SortedActivation("gelu", "tanh")
    assert sorted_activation(GatedActivation(nn.SiLU(), gate_last=True)) == SortedActivation("silu", gate=1)

    class Scaled(nn.GELU):
        def forward(self, x):
            return super().forward(x) * 2

    for other in (nn.ReLU(), Scaled(), GatedActivation(nn.ReLU()), GatedActivation(GatedActivation(nn.GELU()))):
        assert sorted_activation(other) is None


# Dropout


def dropped_mask(size, rate, seed):
    positions = dropped_positions(size, rate, torch.Generator().manual_seed(seed))
    assert (positions.diff() > 0).all()
    return torch.zeros(size).index_fill_(0, positions, 1)


@pytest.mark.parametrize("rate", [2**-10, 0.1, 0.5, 0.9])
def test_steps_between_dropped_positions_are_geometric(rate):
    positions = dropped_positions(int(100_000 / rate), rate, torch.Generator().manual_seed(0))
    steps = torch.cat([positions[:1] + 1, positions.diff()]).numpy()
    # bins of about equal probability, the last one open
    ends = sorted({int(stats.geom.ppf(quantile, rate)) for quantile in np.linspace(0.02, 0.98, 25)})
    counts = np.bincount(np.searchsorted(ends, steps), minlength=len(ends) + 1)
    expected = len(steps) * np.diff([0, *stats.geom.cdf(ends, rate), 1])
    assert stats.chisquare(counts, expected).pvalue > 1e-4


@pytest.mark.parametrize(("size", "rate"), [(1, 0.3), (7, 0.5), (50, 0.02), (400, 0.9)])
def test_every_position_is_dropped_at_the_rate_in_small_tensors_too(size, rate):
    draws = 4000
    masks = torch.stack([dropped_mask(size, rate, seed) for seed in range(draws)])
    # five deviations of a mean over all draws; of single positions, six, as there are many of them
    assert abs(masks.mean() - rate) < 5 * (rate * (1 - rate) / masks.numel()) ** 0.5
    assert (masks.mean(0) - rate).abs().max() < 6 * (rate * (1 - rate) / draws) ** 0.5
    variance = size * rate * (1 - rate)  # of the binomial distribution
    assert masks.sum(1).var().item() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("rate", [1e-30, 1e-12, 1.0])
def test_nothing_and_everything_is_dropped(rate):
    assert dropped_mask(100, rate, seed=0).eq(rate == 1).all()
    assert dropped_mask(0, rate, seed=0).numel() == 0
    assert HiddenDropout(1.0, 0).scale == 0


@pytest.mark.parametrize("gate", [None, 0, 1])
def test_positions_and_masks_mean_the_same_in_either_half_of_the_features(gate):
    rows, width = 6, 5
    whole = torch.zeros(rows, width if gate is None else 2 * width)
    half = whole if gate is None else whole.chunk(2, dim=1)[gate]
    mask = torch.arange(rows * width).view(rows, width) % 3 == 1
    mark_dropped(half, mask.flatten().nonzero().flatten())
    assert torch.equal(half == DROPPED, mask)
    assert whole.ne(0).sum() == mask.sum()
    other = torch.zeros_like(half)
    mark_dropped(other, mask)
    assert torch.equal(other, half)


def test_the_experts_parts_are_those_of_one_draw():
    sizes, width = [3, 0, 4, 1], 50
    dropout = HiddenDropout(0.4, seed=5)
    parts = [torch.zeros(size, width) for size in sizes]
    for part, dropped in zip(parts, dropout.sample(sizes, width, CPU), strict=True):
        mark_dropped(part, dropped)
    (dropped,) = dropout.sample([sum(sizes)], width, CPU)
    expected = torch.zeros(sum(sizes), width)
    mark_dropped(expected, dropped)
    assert torch.equal(torch.cat(parts), expected)
    assert expected.ne(0).any()


def test_a_seed_comes_from_torchs_generator_which_dropout_then_leaves_alone():
    torch.manual_seed(3)
    first, second = draw_seed(), draw_seed()
    assert first != second
    torch.manual_seed(3)
    assert draw_seed() == first
    state = torch.get_rng_state()
    assert torch.equal(*(HiddenDropout(0.2, int(first)).sample([40], 10, CPU)[0] for _ in range(2)))
    assert torch.equal(torch.get_rng_state(), state)


def test_defaults_of_device_and_type_do_not_change_dropout():
    torch.manual_seed(3)
    seed = draw_seed()
    expected = HiddenDropout(0.2, int(seed)).sample([40, 3], 10, CPU)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            assert draw_seed() == seed
            samples = HiddenDropout(0.2, int(seed)).sample([40, 3], 10, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, samples, expected))


def one_feature(value, drop, items=40_000):
    """Items of one feature through one expert with weights of 1."""
    x, weight = torch.full((items, 1, 1), value), torch.ones(1, 1, 1)
    inputs = ExpertInputs(x, torch.ones(items, 1), weight, None, weight, None)
    return sorted_experts(inputs, torch.zeros(items, 1, dtype=torch.int64), drop=drop)


@pytest.mark.parametrize("drop", [1e-9, 2**-16, 0.1, 0.25, 0.5, 1 - 2**-16])
def test_remaining_features_make_up_for_dropped_ones_at_any_rate(drop):
    count = 400_003
    outputs = one_feature(3.0, drop, count)
    value = F.gelu(torch.tensor(3.0)).item()
    remaining = outputs != 0
    torch.testing.assert_close(outputs[remaining], torch.full_like(outputs[remaining], value / (1 - drop)))
    # six binomial deviations, and one feature
    assert remaining.sum().item() == pytest.approx(count * (1 - drop), abs=6 * (count * drop * (1 - drop)) ** 0.5 + 1)


def test_dropping_everything_leaves_the_bias():
    inputs = make_inputs()
    expected = sorted_experts(inputs._replace(weight2=torch.zeros_like(inputs.weight2)), INDICES)
    torch.testing.assert_close(sorted_experts(inputs, INDICES, drop=1.0), expected)


# Gradients


def make_inputs(act=FORMS["gelu"]):
    generator = torch.Generator().manual_seed(0)
    before = HIDDEN * (1 + isinstance(act, GatedActivation))
    shapes = [(ITEMS, TOKENS, WIDTH), (ITEMS, TOP_K)]
    shapes += [(EXPERTS, before, WIDTH), (EXPERTS, before), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return ExpertInputs(*(tensor.requires_grad_() for tensor in tensors))


@every_activation
def test_nothing_is_read_before_it_is_written(act):
    expected = sorted_experts(make_inputs(act=act), INDICES, sorted_activation(act))
    inputs = make_inputs(act=act)
    torch.use_deterministic_algorithms(True)  # fills fresh tensors with NaN
    try:
        actual = sorted_experts(inputs, INDICES, sorted_activation(act))
        actual.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(actual, expected)
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


@pytest.mark.parametrize("act", [FORMS["gelu"], FORMS["swiglu"]], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("frozen", ExpertInputs._fields)
def test_a_frozen_input_gets_no_gradient_and_changes_none_of_the_others(frozen, act):
    full, part = make_inputs(act=act), make_inputs(act=act)
    getattr(part, frozen).requires_grad_(False)
    for inputs in (full, part):
        sorted_experts(inputs, INDICES, sorted_activation(act)).square().sum().backward()
    for name in ExpertInputs._fields:
        if name == frozen:
            assert getattr(part, name).grad is None
        else:
            torch.testing.assert_close(getattr(part, name).grad, getattr(full, name).grad)


@pytest.mark.parametrize("drop", [0.0, 0.4])
@every_activation
def test_gradients_with_a_graph_equal_the_others_even_where_inputs_depend_on_each_other(drop, act):
    results = []
    activation = sorted_activation(act)
    for create_graph in (False, True):
        inputs = make_inputs(act=act)
        torch.manual_seed(3)
        once = sorted_experts(inputs, INDICES, activation, drop)
        again = inputs._replace(x=once, combine_weights=once.mean(1)[:, :TOP_K])
        loss = sorted_experts(again, INDICES, activation, drop).square().sum()
        results.append(torch.autograd.grad(loss, tuple(inputs), create_graph=create_graph))
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_second_derivatives_are_right_too():
    def with_the_same_mask(*tensors):
        torch.manual_seed(3)
        return sorted_experts(ExpertInputs(*tensors), INDICES, drop=0.4)

    assert torch.autograd.gradgradcheck(with_the_same_mask, tuple(make_inputs()))


def test_the_output_may_be_changed_in_place_and_combine_weights_may_have_any_strides():
    experts = StackedExperts(EXPERTS, 8, 16)
    set_expert_implementation(experts, "sorted")
    x, weights = torch.randn(ITEMS, 8), torch.rand(TOP_K, ITEMS).t().requires_grad_()
    experts(x, INDICES, weights).mul_(3).sum().backward()
    expected = torch.autograd.grad(experts.forward_loop(x, INDICES, weights).sum() * 3, weights)[0]
    torch.testing.assert_close(weights.grad, expected)


# Memory and work


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_one_tensor_of_hidden_features_and_no_mask_is_saved_for_the_backward_pass(drop):
    experts = StackedExperts(3, 8, 32, hidden_drop=drop).train()
    set_expert_implementation(experts, "sorted")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        experts(torch.randn(10, 8), torch.arange(20).view(10, 2) % 3, torch.rand(10, 2, requires_grad=True))
    parameters = {parameter.data_ptr() for parameter in experts.parameters()}
    floats = [tensor for tensor in saved if tensor.is_floating_point() and tensor.data_ptr() not in parameters]
    assert sum(tensor.numel() for tensor in floats if tensor.shape[-1] == 32) == 20 * 32
    # besides: the items, their combine weights, the items in the experts' order, and the outputs with a row of zeros
    assert sum(tensor.numel() for tensor in floats if tensor.shape[-1] != 32) == 10 * 8 + 10 * 2 + 20 * 8 + 21 * 8
    assert not any(tensor.dtype == torch.bool for tensor in saved)


class Calls(TorchDispatchMode):
    """Counts operators and remembers the largest tensor that was taken from `new_empty`."""

    def __init__(self):
        super().__init__()
        self.counts, self.largest = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[func] += 1
        if func is torch.ops.aten.new_empty.default:
            self.largest = max(self.largest, result.numel())
        return result


def test_inference_and_the_backward_pass_hold_the_hidden_features_of_one_expert():
    experts = StackedExperts(8, 8, 512)
    set_expert_implementation(experts, "sorted")
    items, indices, weights = torch.randn(64, 8), torch.arange(64).view(64, 1) % 8, torch.rand(64, 1)
    with torch.no_grad(), Calls() as calls:
        experts(items, indices, weights)
    assert calls.largest == 8 * 512
    output = experts(items, indices, weights)
    with Calls() as calls:
        output.sum().backward()
    assert calls.largest == 8 * 512


@pytest.mark.parametrize(("frozen", "products"), [((), 4), (("x",), 3), (("weight1",), 3), (("weight1", "weight2"), 2)])
def test_no_matrix_product_for_a_gradient_that_is_not_needed(frozen, products):
    inputs = make_inputs()
    for name in frozen:
        getattr(inputs, name).requires_grad_(False)
    output = sorted_experts(inputs, INDICES)
    with Calls() as calls:
        output.sum().backward()
    assert calls.counts[torch.ops.aten.addmm.out] == products * EXPERTS


# torch.compile


@pytest.fixture(
    params=[
        {},
        {"act_layer": partial(nn.GELU, approximate="tanh")},
        {"act_layer": nn.SiLU, "gated": True},
        {"bias": (True, False)},
    ],
    ids=["gelu", "tanh", "swiglu", "biased once"],
)
def experts(request):
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(4, 8, 16, **request.param).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


one_form = pytest.mark.parametrize("experts", [{"act_layer": nn.SiLU, "gated": True}], indirect=True, ids=["swiglu"])


def make_call(items=9, seed=0, tokens=3):
    """Expert 2 gets nothing, and some choices go nowhere with a weight of NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, tokens, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    indices = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(items)])
    indices[indices == 2] = 4
    weights = torch.rand(items, 2, dtype=torch.float64, generator=generator)
    return x, indices, weights.masked_fill(indices == 4, torch.nan).requires_grad_()


def assert_as_the_loop(experts, compiled, arguments, wanted=None):
    """Compares the output and the gradients."""
    wanted = wanted or [arguments[0], *(weight for weight in experts.parameters() if weight.requires_grad)]
    results = []
    for forward in (compiled, experts.forward_loop):
        output = forward(*arguments)
        results.append((output, *torch.autograd.grad(output.square().sum(), wanted)))
    torch.testing.assert_close(*results)


def compile_recording(module, **options):
    """The compiled module, and a list that its programs are appended to."""
    programs = []

    def backend(program, inputs):
        programs.append(program)
        return program.forward

    return torch.compile(module, fullgraph=True, backend=backend, **options), programs


def compile_with_autograd(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def holds_the_operator(program):
    return any("sorted_experts" in str(node.target) for node in program.graph.nodes)


def wants_the_operator():
    """Programs of torch 2.11 cannot tell compilation from export, and hold the loop as exported ones do."""
    compiled = torch.compile(lambda x: x + torch.compiler.is_exporting(), fullgraph=True, backend="eager")
    return compiled(torch.zeros(())).item() == 0


def test_compiled_values_and_gradients_are_those_of_the_loop_for_batches_of_any_size(experts):
    compiled, programs = compile_recording(experts, dynamic=True)
    for items in (9, 5, 12):
        assert_as_the_loop(experts, compiled, make_call(items, seed=items))
    assert len(programs) == 1
    assert holds_the_operator(programs[0]) == wants_the_operator()


def test_the_compiled_backward_pass_gives_the_combine_weights_gradients_too(experts):
    x, indices, weights = make_call()
    weights = weights.detach().nan_to_num(0.5).requires_grad_()
    wanted = [x, weights, *experts.parameters()]
    assert_as_the_loop(experts, compile_with_autograd(experts), (x, indices, weights), wanted)


@pytest.mark.parametrize("frozen", ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"])
def test_a_frozen_stack_gets_no_compiled_gradient_and_changes_no_other(frozen):
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(4, 8, 16).double()
    experts.get_parameter(frozen).requires_grad_(False)
    assert_as_the_loop(experts, compile_with_autograd(experts), make_call())


@one_form
def test_compiled_checkpointed_blocks_are_computed_again_alike(experts):
    compiled = compile_with_autograd(lambda *arguments: checkpoint(experts, *arguments, use_reentrant=False))
    assert_as_the_loop(experts, compiled, make_call())


@pytest.mark.parametrize("gate", [None, 1])
@pytest.mark.parametrize("drop", [False, True])
def test_torchs_own_check_of_operators_passes(gate, drop):
    torch.manual_seed(0)
    x, indices, weights = make_call()
    before = 16 * (1 + (gate is not None))
    stacks = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in [(4, before, 8), (4, before), (4, 8, 16)]
    ]
    seed = torch.tensor(3) if drop else None
    torch.library.opcheck(
        module._sorted_experts,
        (x, weights, *stacks, None, indices, seed, 0.3 if drop else 0.0, "gelu", "none", gate, True),
        # Each comparison runs the operator twice, and buffers' unused elements differ
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_compiled_dropout_drops_whole_features_with_their_gradients():
    torch.manual_seed(0)
    torch._dynamo.reset()
    # float64, since 4,000 summands are added in an order that depends on the processor
    experts = StackedExperts(1, 1, 4000, hidden_drop=0.25, act_layer=nn.SiLU, bias=False, dtype=torch.float64)
    for layer in (experts.fc1, experts.fc2):
        nn.init.ones_(layer.weight)
    x, weights = torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    output = compile_with_autograd(experts)(x, torch.zeros(2, 1, dtype=torch.long), weights)
    (grad,) = torch.autograd.grad(output[0, 0], experts.fc2.weight)
    remaining = grad[grad != 0]
    scaled = F.silu(torch.ones((), dtype=torch.float64)) / 0.75
    torch.testing.assert_close(remaining, scaled.expand_as(remaining))
    torch.testing.assert_close(grad.sum(), output[0, 0].detach())
    assert abs(len(remaining) / 4000 - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5  # five standard deviations
    assert output[0] != output[1]


def test_compiled_checkpointed_dropout_drops_the_same_features_again():
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(2, 8, 64, hidden_drop=0.5, bias=False).double()
    x, indices, weights = torch.randn(16, 8).double(), torch.arange(32).view(16, 2) % 2, torch.rand(16, 2).double()
    compiled = compile_with_autograd(lambda *arguments: checkpoint(experts, *arguments, use_reentrant=False))
    output = compiled(x, indices, weights).sum()
    (grad,) = torch.autograd.grad(output, experts.fc2.weight)
    # Linear in these weights: with the same features, the derivative along them is the value
    torch.testing.assert_close((grad * experts.fc2.weight).sum(), output)


def test_exported_programs_need_no_operator_of_this_package():
    experts = StackedExperts(4, 8, 16).double().eval()
    arguments = tuple(argument.detach() for argument in make_call())
    assert not holds_the_operator(torch.export.export(experts, arguments, strict=False))
    assert not holds_the_operator(torch.export.export(experts, arguments, strict=True))


def test_compiled_programs_of_quantized_experts_hold_the_loop():
    experts, programs = StackedExperts(4, 8, 16), []
    weight = experts.fc1.weight.detach()
    experts.fc1.weight = nn.Parameter(TwoTensor(weight, weight))  # a class of its own, as quantized weights have
    torch._dynamo.reset()
    x, indices, weights = (argument.detach().float() for argument in make_call())
    torch.compile(experts, backend=lambda program, _: programs.append(program) or program.forward)(
        x, indices.long(), weights
    )
    assert programs
    assert not any(map(holds_the_operator, programs))


@one_form
def test_the_backward_pass_of_compiled_programs_does_not_wait_again(experts, monkeypatch):
    if not wants_the_operator():
        pytest.skip("this torch takes the loop")
    waits, counts = [], assignments._counts
    monkeypatch.setattr(assignments, "_counts", lambda ends: waits.append(1) or counts(ends))
    compile_with_autograd(experts)(*make_call()).sum().backward()
    assert len(waits) == 1


@one_form
def test_compiled_programs_save_nothing_without_gradients(experts):
    compiled, programs = compile_recording(experts, dynamic=True)
    for items in (9, 5):
        arguments = make_call(items, seed=items)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), experts.forward_loop(*arguments))
    assert len(programs) == 1
    if wants_the_operator():
        x, indices, weights = make_call()
        inputs, activation = experts._inputs(x, weights), sorted_activation(experts.act)
        sums, *buffers = module._sorted_experts(*inputs, indices, None, 0.0, *activation, False)
        torch.testing.assert_close(sums.view(x.shape), experts.forward_loop(x, indices, weights))
        assert buffers == []
