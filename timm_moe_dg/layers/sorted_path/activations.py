"""Activations that the sorted experts write into given tensors, and their derivatives.

GELU (Hendrycks and Gimpel, 2016), SiLU, and either as a gate (GLU variants, Shazeer, 2020). Others take another path.

Axes: H hidden features; a gated form reads 2 H of them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..feed_forwards import GatedActivation

aten = torch.ops.aten  # these functions have no other name for writing into a given tensor

# Both functions and their derivatives are zero there in every type: what dropout loses is put there, and no mask has to
# be kept or applied in the backward pass
LOST = -(2.0**13)


class SortedActivation(NamedTuple):
    """h = f(a), or f(a) * b of features [a, b], or a * f(b).

    Attributes:
        function: f, 'gelu' or 'silu'.
        approximate: GELU's form, 'none' or 'tanh'.
        gate: Which half of the features passes through f, 0 or 1; None for no gate.
    """

    function: str = "gelu"
    approximate: str = "none"
    gate: int | None = None

    def halves(self, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """(..., H) or (..., 2 H) -> what passes through f, and what that is multiplied by."""
        if self.gate is None:
            return before, None
        halves = before.chunk(2, dim=-1)
        return halves[self.gate], halves[1 - self.gate]

    def __call__(self, before: Tensor) -> Tensor:
        """(..., H) or (..., 2 H) -> (..., H), by functions that autograd knows."""
        passed, factor = self.halves(before)
        after = F.gelu(passed, approximate=self.approximate) if self.function == "gelu" else F.silu(passed)
        return after if factor is None else after * factor

    def lost(self, before: Tensor) -> Tensor:
        """(..., H), true where dropout has put `LOST`."""
        return self.halves(before)[0] == LOST

    def into(self, before: Tensor, out: Tensor) -> None:
        """Writes h; `out` may be the part of `before` that passes through f."""
        passed, factor = self.halves(before)
        self._function_into(passed, out)
        if factor is not None:
            out *= factor

    def backward_into(
        self, before: Tensor, grad: Tensor, hidden: Tensor, grad_before: Tensor, wants_hidden: bool
    ) -> None:
        """Writes the gradient of the features before, and h.

        Args:
            before: (rows, H or 2 H).
            grad: (rows, H) gradient of h; used up.
            hidden: (rows, H), where h goes; used up otherwise.
            grad_before: As `before`, where its gradient goes; may be `grad` if there is no gate.
            wants_hidden: Whether h is needed.
        """
        passed, factor = self.halves(before)
        grad_passed, grad_factor = self.halves(grad_before)
        if wants_hidden or factor is not None:
            self._function_into(passed, hidden)
        if factor is not None and grad_factor is not None:
            torch.mul(grad, hidden, out=grad_factor)
            hidden *= factor
            grad *= factor
        if self.function == "gelu":
            aten.gelu_backward.grad_input(grad, passed, approximate=self.approximate, grad_input=grad_passed)
        else:
            aten.silu_backward.grad_input(grad, passed, grad_input=grad_passed)

    def _function_into(self, passed: Tensor, out: Tensor) -> None:
        if self.function == "gelu":
            aten.gelu.out(passed, approximate=self.approximate, out=out)
        else:
            aten.silu.out(passed, out=out)


def sorted_activation(act: nn.Module) -> SortedActivation | None:
    """What the sorted experts compute for a module; None for what they do not know, subclasses among it."""
    if type(act) is GatedActivation:
        inner = sorted_activation(act.act)
        return inner._replace(gate=int(act.gate_last)) if inner is not None and inner.gate is None else None
    if type(act) is nn.GELU:
        return SortedActivation("gelu", act.approximate)
    return SortedActivation("silu") if type(act) is nn.SiLU else None
