"""Mixtures of experts that nobody wrote down."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.references.weighted_experts import ACTIVATIONS, Gate, magnitude, weighted_experts
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.layers.feed_forwards import GatedActivation

MODULES: dict[str, nn.Module] = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
}
GATES: tuple[Gate, ...] = (None, "first", "last")
SEEDS = st.integers(0, 2**31 - 1)


@dataclass(frozen=True)
class Mixture:
    """Experts, and what they are asked for.

    Attributes:
        experts: Random parameters.
        act: Name of their activation.
        gate: Which half of the features passes through it, if any.
        x: (T, ..., D) items.
        expert_indices: (T, K), in which an expert may come twice, and none at all.
        combine_weights: (T, K).
    """

    experts: StackedExperts
    act: str
    gate: Gate
    x: Tensor
    expert_indices: Tensor
    combine_weights: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of the experts' forward."""
        return self.x, self.expert_indices, self.combine_weights

    @property
    def ways(self) -> list[str]:
        """Names of the methods that can compute it."""
        return ["forward_grouped", "forward_loop"]

    def expected(self) -> Tensor:
        """The output in float64."""
        return weighted_experts(self.experts, self.act, self.gate, *self.arguments)

    def tolerance(self) -> float:
        """What rounding may change: eight rounding units of the largest sum, for as many steps one after another."""
        return 8 * torch.finfo(self.x.dtype).eps * magnitude(self.experts, self.gate, *self.arguments) + 1e-12


@st.composite
def mixtures(draw: st.DrawFn, dtype: torch.dtype | None = None, gates: Sequence[Gate] = GATES) -> Mixture:
    """Draws one, of any floating type unless one is given.

    Args:
        draw: Hypothesis's.
        dtype: Of the items and the parameters.
        gates: What to choose the gate from.
    """
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    dtype = dtype or draw(st.sampled_from(types))
    act, gate = draw(st.sampled_from(sorted(ACTIVATIONS))), draw(st.sampled_from(gates))
    # Normalized features have no such bound of rounding
    norm: Any = nn.LayerNorm if dtype == torch.float64 and draw(st.booleans()) else None
    # A grouped product takes rows of whole 16 bytes, such as 8 features
    widths = st.sampled_from([1, 2, 3, 4, 5, 8])
    num_experts, features = draw(st.integers(1, 5)), draw(widths)
    bias = draw(st.tuples(st.booleans(), st.booleans()))
    experts = StackedExperts(
        num_experts, features, draw(widths), norm_layer=norm, bias=bias, gated=gate is not None, dtype=dtype
    )
    module = MODULES[act]
    experts.act = module if gate is None else GatedActivation(module, gate_last=gate == "last")
    generator = torch.Generator().manual_seed(draw(SEEDS))
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    items, top_k = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    inner = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    x = torch.randn(items, *inner, features, generator=generator).to(dtype)
    indices = torch.randint(0, num_experts + 1, (items, top_k), generator=generator)
    weights = torch.rand(items, top_k, generator=generator)
    return Mixture(experts, act, gate, x, indices, weights if dtype != torch.float64 else weights.double())


def random_parameters(layer: nn.Module, seed: int, scale: float = 1.0) -> None:
    """Draws every parameter of a layer, whose own initialization makes experts and codes nearly alike."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
