"""Grouped products: where torch has them, that nothing waits for the device, and second derivatives."""

import pytest
import torch
from torch import nn

from tests.layers.sorted_path.test_compiled import wants_the_operator
from timm_moe_dg.layers import dispatch, dispatch_info, set_dispatch
from timm_moe_dg.layers.experts import StackedExperts

EXPERTS, WIDTH, HIDDEN = 4, 8, 16


def make_experts(dtype=torch.float64, device=None, **options):
    torch.manual_seed(0)
    experts = StackedExperts(EXPERTS, WIDTH, HIDDEN, **options).to(dtype)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    return experts.to(device)


def call(items=9, dtype=torch.float64, device=None):
    """Expert 2 gets nothing, and some choices go nowhere."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(items, 3, WIDTH, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    indices = torch.stack([torch.randperm(EXPERTS + 1, generator=generator)[:2] for _ in range(items)])
    indices[indices == 2] = EXPERTS
    weights = torch.rand(items, 2, generator=generator).to(device, dtype).requires_grad_()
    return x, indices.to(device), weights


@pytest.fixture
def products(monkeypatch):
    """The types that grouped products were asked for."""
    asked, product = [], torch.nn.functional.grouped_mm

    def listed(rows, *arguments, **options):
        asked.append(rows.dtype)
        return product(rows, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", listed)
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_layer_is_one_product(dtype, products):
    make_experts(dtype).forward_grouped(*call(dtype=dtype))
    assert products == [dtype, dtype]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 6), (torch.bfloat16, 4)])
def test_where_torch_has_no_such_product_experts_are_multiplied_one_by_one(dtype, width, products):
    experts = StackedExperts(EXPERTS, width, HIDDEN, dtype=dtype)
    x, indices, weights = call(dtype=dtype)
    found = experts.forward_grouped(x[..., :width], indices, weights)
    assert products == []
    expected = experts.forward_loop(x[..., :width], indices, weights)
    torch.testing.assert_close(found, expected)


def on_a_device_without_values(experts, forward, dtype):
    x, indices, weights = call(dtype=dtype, device="meta")
    forward(experts, x, indices, weights).sum().backward()
    assert all(one.grad is not None for one in (x, weights, *experts.parameters()))


def test_nothing_waits_for_the_device():
    """The meta device has no values to wait for, and refuses whatever asks for one."""
    for options in ({}, {"act_layer": nn.ReLU, "norm_layer": nn.LayerNorm}):
        experts = make_experts(torch.bfloat16, "meta", **options)
        on_a_device_without_values(experts, StackedExperts.forward_grouped, torch.bfloat16)


def test_the_sorted_path_waits_for_the_counts_alone(monkeypatch):
    waits = []

    def counts(ends):
        waits.append(ends)
        return [4, 4, 0, 4]

    monkeypatch.setattr(dispatch, "_counts", counts)
    on_a_device_without_values(make_experts(device="meta"), StackedExperts.forward_sorted, torch.float64)
    assert len(waits) == 1


@pytest.mark.parametrize("options", [{}, {"gated": True}, {"act_layer": nn.SiLU, "norm_layer": nn.LayerNorm}])
def test_second_derivatives_are_those_of_the_loop(options):
    experts = make_experts(**options)
    inputs = call()
    wanted = [inputs[0], inputs[2], *experts.parameters()]
    seconds = []
    for forward in (experts.forward_grouped, experts.forward_loop):
        firsts = torch.autograd.grad(forward(*inputs).square().sum(), wanted, create_graph=True)
        seconds.append(torch.autograd.grad(sum(one.square().sum() for one in firsts), wanted))
    torch.testing.assert_close(*seconds)


def test_second_derivatives_of_products_in_float32():
    experts = make_experts(torch.float32)
    inputs = call(dtype=torch.float32)
    wanted = [inputs[0], *experts.parameters()]
    seconds = []
    for forward in (experts.forward_grouped, experts.forward_loop):
        firsts = torch.autograd.grad(forward(*inputs).square().mean(), wanted, create_graph=True)
        seconds.append(torch.autograd.grad(sum(one.square().sum() for one in firsts), wanted))
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5)  # two products of float32 one after another


def test_an_item_that_is_not_finite_reaches_no_other_and_no_expert_from_nowhere():
    experts = make_experts(torch.float32)
    x, indices, weights = call(dtype=torch.float32)
    lost = 0
    with torch.no_grad():
        x[lost] = torch.nan
    indices[lost] = EXPERTS
    output = experts.forward_grouped(x, indices, weights)
    assert output[lost].eq(0).all()
    gradients = torch.autograd.grad(output.square().sum(), (x, *experts.parameters()))
    assert all(one.isfinite().all() for one in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_programs_hold_the_product_in_the_type_that_the_compiler_knows(dtype):
    torch._dynamo.reset()
    experts = make_experts(dtype, act_layer=nn.ReLU, norm_layer=nn.LayerNorm)
    targets = []

    def backend(program, inputs):
        targets.extend(str(node.target) for node in program.graph.nodes)
        return program.forward

    arguments = call(dtype=dtype)
    found = torch.compile(experts, fullgraph=True, backend=backend)(*arguments)
    product = dtype == torch.bfloat16 and wants_the_operator()
    torch.testing.assert_close(found, (experts if product else experts.forward_loop)(*arguments))
    assert any("grouped_mm" in target for target in targets) == product


@pytest.mark.parametrize("asked", ["sorted", "grouped", "loop"])
def test_a_dispatch_is_asked_for_by_name(asked):
    experts = make_experts()
    set_dispatch(nn.Sequential(experts), asked)
    torch.testing.assert_close(experts(*call()), experts.forward_loop(*call()))
    assert dispatch_info(experts) == {"": asked}


def test_what_cannot_be_sorted_is_grouped_even_if_asked_for():
    experts = make_experts(act_layer=nn.ReLU)
    set_dispatch(experts, "sorted")
    experts(*call())
    assert dispatch_info(experts) == {"": "grouped"}


def test_a_dispatch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"dispatch='triton': choose one of auto, sorted, grouped, loop"):
        set_dispatch(nn.Linear(2, 2), "triton")
