"""A linear layer of all experts, for rows in the order of the experts.

    grouped_linear(rows, weight, bias, counts)

The first `counts[0]` rows pass through expert 0, the next `counts[1]` through expert 1, and so on. Rows after those of
the last expert belong to none, and give zeros.

The layer is an operator of torch, because torch.compile cannot trace products whose sizes depend on values. Two
operators are each other's derivatives, so second derivatives need no other code:

| operator            | for each expert          | computes                                            |
|---------------------|--------------------------|-----------------------------------------------------|
| `grouped_linear`    | rows W^T + b             | the layer, and the gradient of its rows             |
| `grouped_gradients` | grad^T rows, sum of grad | the gradients of weight and bias                    |

The device of the counts decides how:

| counts on     | products                                                                                    |
|---------------|---------------------------------------------------------------------------------------------|
| the CPU       | one for each expert, written into one tensor                                                |
| a CUDA device | one for all experts, `torch.nn.functional.grouped_mm`, and nothing waits for the device     |

Axes: R rows, E experts, I features of the rows, O features of the outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_KERNEL_CAPABILITY = (9, 0)  # from which torch has one kernel for the product of all experts in bfloat16
_KERNEL_BYTES = 16  # every row of the kernel's operands is a multiple of it


def has_grouped_kernel(weight: Tensor) -> bool:
    """Returns whether torch has one kernel for all experts, for the device and the type of weights (E, O, I)."""
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    aligned = all(width * weight.itemsize % _KERNEL_BYTES == 0 for width in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(weight.device) >= _KERNEL_CAPABILITY


@torch.library.custom_op("timm_moe_dg::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """(R, I) rows in the order of the experts -> (R, O), by weight (E, O, I) and bias (E, O).

    Counts (E,) int64 are the numbers of each expert's rows, on the CPU, or on a device with `has_grouped_kernel`.
    """
    if counts.is_cuda:
        return _linear_by_kernel(rows, weight, bias, counts)
    outputs = rows.new_empty(len(rows), weight.shape[1])
    *expert_rows, _ = rows.split(_sizes(rows, counts))
    *expert_outputs, unused = outputs.split(_sizes(rows, counts))
    for expert, (x, output) in enumerate(zip(expert_rows, expert_outputs, strict=True)):
        if bias is None:
            torch.mm(x, weight[expert].t(), out=output)
        else:
            torch.addmm(bias[expert], x, weight[expert].t(), out=output)
    unused.zero_()
    return outputs


@torch.library.custom_op("timm_moe_dg::grouped_gradients", mutates_args=())
def grouped_gradients(grad: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (R, O) of the outputs, and rows (R, I) -> gradients of weight (E, O, I) and bias (E, O)."""
    if counts.is_cuda:
        return _gradients_by_kernel(grad, rows, counts)
    grad_weight = rows.new_empty(len(counts), grad.shape[1], rows.shape[1])
    grad_bias = rows.new_empty(len(counts), grad.shape[1])
    *expert_grads, _ = grad.split(_sizes(rows, counts))
    *expert_rows, _ = rows.split(_sizes(rows, counts))
    for expert, (expert_grad, x) in enumerate(zip(expert_grads, expert_rows, strict=True)):
        torch.mm(expert_grad.t(), x, out=grad_weight[expert])
        torch.sum(expert_grad, 0, out=grad_bias[expert])
    return grad_weight, grad_bias


def _sizes(rows: Tensor, counts: Tensor) -> list[int]:
    """Numbers of each expert's rows, and of those that belong to none."""
    sizes = counts.tolist()
    return [*sizes, len(rows) - sum(sizes)]


def _linear_by_kernel(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    ends, experts = _find_experts(rows, counts)
    outputs = F.grouped_mm(rows, weight.mT, offs=ends)
    if bias is not None:
        outputs += F.embedding(experts, F.pad(bias, (0, 0, 0, 1)))
    # The kernel does not write the rows that belong to no expert
    return outputs.masked_fill_((experts == len(counts)).unsqueeze(1), 0)


def _gradients_by_kernel(grad: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    ends, experts = _find_experts(rows, counts)
    # The gradient of the embedding of biases, which is added in a fixed order, unlike index_add_
    sums = torch.ops.aten.embedding_dense_backward(grad, experts, len(counts) + 1, -1, False)
    return F.grouped_mm(grad.mT, rows, offs=ends), sums[:-1].clone()


def _find_experts(rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the end of each expert's rows, (E,) int32, and the expert of each row, (R,), which is E for none."""
    ends = counts.cumsum(0, dtype=torch.int32)
    positions = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return ends, torch.searchsorted(ends, positions, right=True)


@grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_gradients.register_fake
def _(grad: Tensor, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    stack = counts.shape[0], grad.shape[1]
    return rows.new_empty(*stack, rows.shape[1]), rows.new_empty(stack)


@register_flop_formula([torch.ops.timm_moe_dg.grouped_linear, torch.ops.timm_moe_dg.grouped_gradients], get_raw=True)
def _count_operations(first: Tensor, second: Tensor, *further: Any, **_: object) -> int:
    """Counts for torch's FlopCounterMode, by rows and weight, or gradients and rows. Rows of no expert are left out."""
    counts = further[-1]
    return 2 * (len(first) if counts.is_meta else int(counts.sum())) * first.shape[1] * second.shape[1]


def _save_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: object) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, weight, _, counts = ctx.saved_tensors
    needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
    grad_rows = grouped_linear(grad, weight.mT, None, counts) if needs_rows else None
    if not (needs_weight or needs_bias):
        return grad_rows, None, None, None
    grad_weight, grad_bias = grouped_gradients(grad, rows, counts)
    return grad_rows, grad_weight, grad_bias if needs_bias else None, None


def _gradients_backward(ctx: Any, grad_weight: Tensor, grad_bias: Tensor) -> tuple[Tensor | None, ...]:
    grad, rows, counts = ctx.saved_tensors
    grad_grad = grouped_linear(rows, grad_weight, grad_bias, counts)
    return grad_grad, grouped_linear(grad, grad_weight.mT, None, counts), None


grouped_linear.register_autograd(_linear_backward, setup_context=_save_inputs)
grouped_gradients.register_autograd(_gradients_backward, setup_context=_save_inputs)
