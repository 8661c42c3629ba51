"""Grouped experts: where torch has the product, that nothing waits for the device, and second derivatives."""

import pytest
import torch
from torch import nn

from tests.layers.test_fast_experts import wants_the_operator
from timm_moe_dg.layers import assignments
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
    """The types of the grouped products that are called."""
    types, product = [], torch.nn.functional.grouped_mm

    def record(rows, *arguments, **options):
        types.append(rows.dtype)
        return product(rows, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", record)
    return types


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_layer_is_one_product(dtype, products):
    make_experts(dtype).forward_grouped(*call(dtype=dtype))
    assert products == [dtype, dtype]


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.float32, 6), (torch.bfloat16, 4)])
def test_where_torch_has_no_such_product_experts_are_multiplied_one_by_one(dtype, width, products):
    experts = StackedExperts(EXPERTS, width, HIDDEN, dtype=dtype)
    x, indices, weights = call(dtype=dtype)
    actual = experts.forward_grouped(x[..., :width], indices, weights)
    assert products == []
    torch.testing.assert_close(actual, experts.forward_loop(x[..., :width], indices, weights))


def on_a_device_without_values(experts, forward, dtype):
    x, indices, weights = call(dtype=dtype, device="meta")
    forward(experts, x, indices, weights).sum().backward()
    assert all(tensor.grad is not None for tensor in (x, weights, *experts.parameters()))


def test_nothing_waits_for_the_device():
    """The meta device has no values to wait for, and refuses whatever asks for one."""
    for options in ({}, {"act_layer": nn.ReLU, "norm_layer": nn.LayerNorm}):
        experts = make_experts(torch.bfloat16, "meta", **options)
        on_a_device_without_values(experts, StackedExperts.forward_grouped, torch.bfloat16)


def test_the_sorted_experts_wait_for_the_counts_alone(monkeypatch):
    waits = []

    def counts(ends):
        waits.append(ends)
        return [4, 4, 0, 4]

    monkeypatch.setattr(assignments, "_counts", counts)
    on_a_device_without_values(make_experts(device="meta"), StackedExperts.forward_sorted, torch.float64)
    assert len(waits) == 1


@pytest.mark.parametrize(
    ("options", "dtype", "tolerance"),
    [
        ({}, torch.float64, {}),
        ({"gated": True}, torch.float64, {}),
        ({"act_layer": nn.SiLU, "norm_layer": nn.LayerNorm}, torch.float64, {}),
        ({}, torch.float32, {"rtol": 1e-4, "atol": 1e-5}),  # two products of float32 one after another
    ],
)
def test_second_derivatives_are_those_of_the_loop(options, dtype, tolerance):
    experts = make_experts(dtype, **options)
    inputs = call(dtype=dtype)
    wanted = [inputs[0], inputs[2], *experts.parameters()]
    seconds = []
    for forward in (experts.forward_grouped, experts.forward_loop):
        firsts = torch.autograd.grad(forward(*inputs).square().mean(), wanted, create_graph=True)
        seconds.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), wanted))
    torch.testing.assert_close(*seconds, **tolerance)


def test_an_item_that_is_not_finite_reaches_no_other_and_no_expert_from_nowhere():
    experts = make_experts(torch.float32)
    x, indices, weights = call(dtype=torch.float32)
    with torch.no_grad():
        x[0] = torch.nan
    indices[0] = EXPERTS
    output = experts.forward_grouped(x, indices, weights)
    assert output[0].eq(0).all()
    gradients = torch.autograd.grad(output.square().sum(), (x, *experts.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_programs_hold_the_product_in_the_type_that_the_compiler_knows(dtype):
    torch._dynamo.reset()
    experts = make_experts(dtype, act_layer=nn.ReLU, norm_layer=nn.LayerNorm)
    targets = []

    def backend(program, inputs):
        targets.extend(str(node.target) for node in program.graph.nodes)
        return program.forward

    arguments = call(dtype=dtype)
    actual = torch.compile(experts, fullgraph=True, backend=backend)(*arguments)
    product = dtype == torch.bfloat16 and wants_the_operator()
    torch.testing.assert_close(actual, (experts if product else experts.forward_loop)(*arguments))
    assert any("grouped_mm" in target for target in targets) == product
