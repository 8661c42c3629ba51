"""Whether a program answers as its network does, told on a few images; tokens between two experts are known for it.

Rounding differs between two runtimes. It moves logits by some 1e-6 of the largest, unless a token's K-th and next
expert are so near to each other that it decides between them: then the token gets another expert's output, a small but
visible difference, and neither answer is the right one. An image may differ where its routing was that near, and no
other may.
"""

import logging
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..losses.router import record_routing, router_outputs
from .programs import Inputs

CHECKED = 8  # images; their forward in PyTorch is what the check costs
TOLERANCE = 1e-4  # of the largest value of each output, or of 1: fifty times what rounding gave in the models here
TIE = 1e-4  # likewise, of the logits of a router
Outputs: TypeAlias = tuple[Tensor, ...]
_logger = logging.getLogger(__name__)


@torch.no_grad()
def check_agreement(network: nn.Module, found: Outputs, inputs: Inputs) -> None:
    """Compares a program's answers with the network's, on the first `CHECKED` images.

    Args:
        network: Gives logits, or logits and features.
        found: What the program answered about all images.
        inputs: Images (B, C, H, W), and their metadata.

    Raises:
        ExportError: An image whose routing is no near tie differs beyond `TOLERANCE`, or more than half of them differ.
    """
    inputs, found = (tuple(one[:CHECKED] for one in part) for part in (inputs, found))
    with record_routing(network):
        expected = in_tuple(network(*inputs))
    differing = torch.stack([_differ(*pair) for pair in zip(found, expected, strict=True)]).any(0)
    number, largest = len(differing), float((found[0] - expected[0]).abs().max())
    if (differing & ~near_ties(network, number)).any() or 2 * differing.sum() > number:
        remedy = (
            f"answers about {int(differing.sum())} of {number} images differ from PyTorch's, logits by up to "
            f"{largest:.1e}, which is more than rounding explains; give --engine torch"
        )
        raise ExportError.of("engine", "onnxruntime", remedy)
    if differing.any():
        shown = f"{int(differing.sum())} of {number} images, by up to {largest:.1e}"
        _logger.warning(f"onnxruntime sends tokens that lie between two experts to the other one: {shown}")


def in_tuple(answers: Tensor | Outputs) -> Outputs:
    """A network's answers in the form that a program gives them in."""
    return answers if isinstance(answers, tuple) else (answers,)


def near_ties(network: nn.Module, number: int) -> Tensor:
    """(B,) bool: whether the last recorded routing of an image's tokens could have been decided by rounding."""
    near = torch.zeros(number, dtype=torch.bool)
    for routing in router_outputs(network).values():
        top_k = routing.expert_indices.shape[1]
        logits = routing.logits.float()
        if top_k < logits.shape[1]:
            best = logits.topk(top_k + 1).values
            margins = (best[:, -2] - best[:, -1]) / logits.abs().amax(1).clamp(min=1.0)
            near |= (margins <= TIE).reshape(number, -1).any(1).cpu()
    return near


def _differ(found: Tensor, expected: Tensor) -> Tensor:
    """(B,) bool, on CPU: which rows differ by more than rounding; what is not finite has to be the same."""
    largest = expected.abs().nan_to_num(0.0, posinf=0.0).max().clamp(min=1.0)
    return (~torch.isclose(found, expected, rtol=0, atol=float(TOLERANCE * largest), equal_nan=True)).any(1).cpu()
