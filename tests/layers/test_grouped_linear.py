"""The grouped linear layer: values and derivatives, the functions for CUDA, and which products are computed."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from timm_moe_dg.layers import grouped_linear as module
from timm_moe_dg.layers.grouped_linear import grouped_gradients, grouped_linear, has_grouped_kernel

COUNTS = torch.tensor([3, 0, 4])
ROWS, IN, OUT = 9, 8, 16  # two rows belong to no expert


def make_inputs(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, IN), (3, OUT, IN), (3, OUT)]
    rows, weight, b = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return rows.requires_grad_(), weight.requires_grad_(), b.requires_grad_() if bias else None


def by_expert(rows, weight, bias):
    parts = [
        F.linear(part, weight[expert], None if bias is None else bias[expert])
        for expert, part in enumerate(rows.split([3, 0, 4, 2])[:3])
    ]
    return torch.cat([*parts, rows.new_zeros(2, OUT)])


@pytest.mark.parametrize("bias", [True, False])
def test_each_expert_multiplies_its_rows_and_the_others_are_zero(bias):
    inputs = make_inputs(bias=bias)
    outputs = grouped_linear(*inputs, COUNTS)
    torch.testing.assert_close(outputs, by_expert(*inputs))
    wanted, grad = [tensor for tensor in inputs if tensor is not None], torch.randn_like(outputs)
    expected = torch.autograd.grad(by_expert(*inputs), wanted, grad)
    torch.testing.assert_close(torch.autograd.grad(outputs, wanted, grad), expected)


def test_torchs_own_checks_of_operators_pass():
    rows, weight, bias = make_inputs()
    torch.library.opcheck(grouped_linear, (rows, weight, bias, COUNTS))
    torch.library.opcheck(grouped_linear, (rows, weight, None, COUNTS))
    torch.library.opcheck(grouped_gradients, (torch.randn(ROWS, OUT).double().requires_grad_(), rows, COUNTS))


def test_nothing_is_read_before_it_is_written():
    inputs = make_inputs()
    torch.use_deterministic_algorithms(True)  # fills fresh tensors with NaN
    try:
        outputs = grouped_linear(*inputs, COUNTS)
        outputs.square().sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(outputs, by_expert(*inputs))
    assert all(tensor.grad.isfinite().all() for tensor in inputs)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("frozen", "linears", "gradients"), [((), 1, 1), ((0,), 0, 1), ((1,), 1, 1), ((1, 2), 1, 0), ((2,), 1, 1)]
)
def test_a_frozen_input_gets_no_gradient_and_costs_no_product(frozen, linears, gradients):
    full, part = make_inputs(), make_inputs()
    grouped_linear(*full, COUNTS).square().sum().backward()
    for index in frozen:
        part[index].requires_grad_(False)
    loss = grouped_linear(*part, COUNTS).square().sum()
    with Calls() as calls:
        loss.backward()
    assert calls.counts[torch.ops.timm_moe_dg.grouped_linear.default] == linears
    assert calls.counts[torch.ops.timm_moe_dg.grouped_gradients.default] == gradients
    for index, (tensor, expected) in enumerate(zip(part, full, strict=True)):
        if index in frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, expected.grad)


@pytest.mark.parametrize("bias", [True, False])
def test_the_functions_for_cuda_compute_the_same_even_if_other_rows_are_not_finite(bias):
    rows, weight, b = make_inputs(torch.float32, bias)
    with torch.no_grad():
        rows[-2:] = torch.nan
        grad = torch.randn(ROWS, OUT)
        torch.testing.assert_close(
            module._linear_by_kernel(rows, weight, b, COUNTS), grouped_linear(rows, weight, b, COUNTS)
        )
        grad[-1] = torch.inf
        expected = grouped_gradients(grad, rows, COUNTS)
        torch.testing.assert_close(module._gradients_by_kernel(grad, rows, COUNTS), expected)
    assert all(part.isfinite().all() for part in expected)


def test_the_kernel_is_for_aligned_bfloat16_on_recent_devices(monkeypatch):
    class OnCuda(torch.Tensor):
        is_cuda = True

    def weight(dtype, width=8):
        return torch.zeros(2, 8, width, dtype=dtype).as_subclass(OnCuda)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert has_grouped_kernel(weight(torch.bfloat16))
    assert not has_grouped_kernel(weight(torch.bfloat16, width=4))
    assert not has_grouped_kernel(weight(torch.float32))
    assert not has_grouped_kernel(torch.zeros(2, 8, 8, dtype=torch.bfloat16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert not has_grouped_kernel(weight(torch.bfloat16))
