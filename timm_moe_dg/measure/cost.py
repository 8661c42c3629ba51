"""Cost of a forward pass, counted and not timed: multiply-accumulates."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def _grouped_flops(rows: Sequence[int], stack: Sequence[int], *rest: object, **options: object) -> int:
    """(A, D) rows times (E, D, H): each row meets one matrix."""
    return 2 * prod(rows) * stack[-1]


_UNKNOWN: dict[Any, Callable[..., int]] = {torch.ops.aten._grouped_mm: _grouped_flops}  # to torch's counter


def count_macs(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Multiply-accumulates of one forward pass in convolutions, matrix products and attention.

    Attention is computed by torch's reference kernel while it is counted: that one consists of matrix products, which
    torch's counter knows on every device. Of the fused kernels it knows some in some releases, and takes the others for
    free. A layer that is one fused operator as a whole (torch.nn.TransformerEncoderLayer in evaluation mode) counts
    nothing; timm's models have none.

    Args:
        model: Any; left in evaluation mode.
        inputs: Tensors of the forward pass.

    Returns:
        The count for the whole batch.
    """
    model.eval()
    counting = FlopCounterMode(display=False, custom_mapping=_UNKNOWN)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counting as counter:
        model(*inputs)
    return counter.get_total_flops() // 2
