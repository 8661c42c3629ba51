"""The sorted experts within compiled programs: torch's own check of operators, eager values, gradients, any batch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.layers.feed_forwards import GatedActivation
from timm_moe_dg.layers.sorted_path import compiled, sorted_activation

EXPERTS, WIDTH, HIDDEN = 4, 8, 16
FORMS = {
    "gelu": {},
    "tanh": {"act_layer": lambda: nn.GELU(approximate="tanh")},
    "swiglu": {"act_layer": nn.SiLU, "gated": True},
    "biased once": {"bias": (True, False)},
}


@pytest.fixture(params=FORMS)
def experts(request):
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN, **FORMS[request.param]).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts


def call(items=9, seed=0, tokens=3):
    """Expert 2 gets nothing, and some choices go nowhere with a weight that is no number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(items, tokens, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    indices = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:2] for _ in range(items)])
    indices[indices == 2] = EXPERTS
    weights = torch.rand(items, 2, dtype=torch.float64, generator=generator)
    return x, indices, weights.masked_fill(indices == EXPERTS, torch.nan).requires_grad_()


def gradients(experts, forward, arguments, wanted=None):
    wanted = [arguments[0], *experts.parameters()] if wanted is None else wanted
    output = forward(*arguments)
    return output, *torch.autograd.grad(output.square().sum(), wanted)


def recorded(module, **options):
    """The compiled module, and the programs that it will be made of."""
    programs = []

    def backend(program, inputs):
        programs.append(program)
        return program.forward

    return torch.compile(module, fullgraph=True, backend=backend, **options), programs


def holds_the_operator(program):
    return any("sorted_experts" in str(node.target) for node in program.graph.nodes)


def wants_the_operator():
    """Programs of torch 2.11 cannot tell compilation from export, and hold the loop as exported ones do."""
    compiled = torch.compile(lambda x: x + torch.compiler.is_exporting(), fullgraph=True, backend="eager")
    return compiled(torch.zeros(())).item() == 0


def test_values_and_gradients_are_those_of_the_loop_for_batches_of_any_size(experts):
    compiled, programs = recorded(experts, dynamic=True)
    for items in (9, 5, 12):
        arguments = call(items, seed=items)
        found, expected = (gradients(experts, one, arguments) for one in (compiled, experts.forward_loop))
        torch.testing.assert_close(found, expected)
    assert len(programs) == 1
    assert holds_the_operator(programs[0]) == wants_the_operator()


def test_the_backward_pass_is_traced_and_gives_the_weights_gradients_too(experts):
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    x, indices, weights = call()
    weights = weights.detach().nan_to_num(0.5).requires_grad_()
    wanted = [x, weights, *experts.parameters()]
    found, expected = (
        gradients(experts, one, (x, indices, weights), wanted) for one in (compiled, experts.forward_loop)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("frozen", ["fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias"])
def test_a_frozen_stack_gets_no_gradient_and_changes_no_other(frozen):
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN).double()
    experts.get_parameter(frozen).requires_grad_(False)
    wanted = [one for one in experts.parameters() if one.requires_grad]
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    found, expected = (gradients(experts, one, call(), wanted) for one in (compiled, experts.forward_loop))
    torch.testing.assert_close(found, expected)


def test_checkpointed_blocks_are_computed_again_alike(experts):
    compiled = torch.compile(
        lambda *arguments: checkpoint(experts, *arguments, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    found, expected = (gradients(experts, one, call()) for one in (compiled, experts.forward_loop))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("gate", [None, 1])
@pytest.mark.parametrize("drop", [False, True])
def test_torch_finds_nothing_wrong_with_the_operator(gate, drop):
    torch.manual_seed(0)
    x, indices, weights = call()
    before = HIDDEN * (1 + (gate is not None))
    shapes = [(EXPERTS, before, WIDTH), (EXPERTS, before), (EXPERTS, WIDTH, HIDDEN)]
    stacks = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seed = torch.tensor(3) if drop else None
    torch.library.opcheck(
        compiled._sorted_experts,
        (x, weights, *stacks, None, indices, seed, 0.3 if drop else 0.0, "gelu", "none", gate, True),
        # Each comparison runs the operator twice, and places that no assignment fills differ
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_dropout_takes_whole_features_with_their_gradients():
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(1, 1, 4000, hidden_drop=0.25, act_layer=nn.SiLU, bias=False)
    for layer in (experts.fc1, experts.fc2):
        nn.init.ones_(layer.weight)
    x, indices, weights = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
    output = torch.compile(experts, fullgraph=True, backend="aot_eager")(x, indices, weights)
    (grad,) = torch.autograd.grad(output[0, 0], experts.fc2.weight)
    scaled = nn.functional.silu(torch.ones(())) / 0.75
    torch.testing.assert_close(grad.unique(), torch.stack([torch.zeros(()), scaled]))
    torch.testing.assert_close(grad.sum(), output[0, 0].detach())
    kept = grad.ne(0).double().mean()
    assert abs(kept - 0.75) < 5 * (0.75 * 0.25 / 4000) ** 0.5  # five standard deviations of 4,000 draws
    assert output[0] != output[1]


def test_checkpointed_dropout_loses_the_same_features_when_it_is_computed_again():
    torch.manual_seed(0)
    torch._dynamo.reset()
    experts = StackedExperts(2, 8, 64, hidden_drop=0.5, bias=False)
    x, indices, weights = torch.randn(16, 8), torch.arange(32).view(16, 2) % 2, torch.rand(16, 2)
    compiled = torch.compile(
        lambda *arguments: checkpoint(experts, *arguments, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    output = compiled(x, indices, weights).sum()
    (grad,) = torch.autograd.grad(output, experts.fc2.weight)
    # Linear in these weights: with the same features, the derivative along them is the value
    torch.testing.assert_close((grad * experts.fc2.weight).sum(), output)


def test_exported_programs_need_no_operator_of_this_package():
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN).double().eval()
    arguments = tuple(one.detach() for one in call())
    assert not holds_the_operator(torch.export.export(experts, arguments, strict=False))
    assert not holds_the_operator(torch.export.export(experts, arguments, strict=True))


def test_what_the_fast_path_does_not_know_is_looped_over():
    torch._dynamo.reset()
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN, act_layer=nn.ReLU, norm_layer=nn.LayerNorm).double()
    arguments = call()
    compiled, programs = recorded(experts)
    torch.testing.assert_close(compiled(*arguments), experts.forward_loop(*arguments))
    assert not any(holds_the_operator(program) for program in programs)


def test_without_gradients_the_values_are_the_same_and_nothing_is_kept(experts):
    compiled_experts, programs = recorded(experts, dynamic=True)
    for items in (9, 5):
        arguments = call(items, seed=items)
        with torch.no_grad():
            torch.testing.assert_close(compiled_experts(*arguments), experts.forward_loop(*arguments))
    assert len(programs) == 1
    if wants_the_operator():
        x, indices, weights = call()
        operands, activation = experts._operands(x, weights), sorted_activation(experts.act)
        sums, *kept = compiled._sorted_experts(*operands, indices, None, 0.0, *activation, False)
        torch.testing.assert_close(sums.view(x.shape), experts.forward_loop(x, indices, weights))
        assert [one.numel() for one in kept] == [0, 0]


def test_gated_experts_take_the_operator():
    torch._dynamo.reset()
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN, act_layer=nn.GELU, gated=True).double()
    assert isinstance(experts.act, GatedActivation)
    compiled, programs = recorded(experts)
    compiled(*call())
    assert holds_the_operator(programs[0]) == wants_the_operator()
