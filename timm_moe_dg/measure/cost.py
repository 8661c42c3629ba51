"""Cost of a forward pass, counted and not timed: multiply-accumulates."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


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
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*inputs)
    return counter.get_total_flops() // 2
