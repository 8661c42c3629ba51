"""Expert feed-forward networks with stacked weights, and the choice of their implementation.

Two implementations give the same results. Conditions are checked from top to bottom.

| where                          | implementation | why                                                               |
|--------------------------------|----------------|-------------------------------------------------------------------|
| export, tracing, torch.func,   | loop           | exported programs run without this package, and `grouped_linear`  |
| forward-mode derivatives       |                | has no such derivatives                                           |
| quantized weights              | loop           | their classes have no other products                              |
| devices but CPU, CUDA and meta | loop           | plain operations; `grouped_linear` was not tried there            |
| all else, and torch.compile    | grouped        | two calls of `grouped_linear`, see grouped_linear.py              |

`set_expert_implementation` sets loop or grouped for the last two rows. Nothing was run on CUDA.

Axes: T items of N tokens each, D features, H hidden features, E experts, K experts per item, A assignments.
"""

import copy
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn

from ..errors import ArgumentError
from .assignments import Assignments
from .compat import in_forward_derivatives, in_transforms
from .feed_forwards import FeedForward, GatedActivation, copy_dense, reinitialize
from .grouped_linear import grouped_linear, has_grouped_kernel
from .parameters import OwnParameters

DEVICES = ("cpu", "cuda", "meta")  # the second was not run
IMPLEMENTATIONS = ("auto", "grouped", "loop")


def expert_implementation_info(model: nn.Module) -> dict[str, str | None]:
    """Returns the implementation in each mixture layer's last forward, by the experts' module.

    It is 'grouped' or 'loop', see the table above, or None before the first forward. Compiled and exported
    programs are not counted.

    >>> model = timm.create_model("gmoe_tiny_patch16").eval()
    >>> logits = model(torch.randn(1, 3, 224, 224))
    >>> timm_moe_dg.layers.expert_implementation_info(model)
    {'blocks.8.mlp.experts': 'grouped', 'blocks.10.mlp.experts': 'grouped'}
    """
    return {name: module.used for name, module in model.named_modules() if isinstance(module, StackedExperts)}


def set_expert_implementation(model: nn.Module, implementation: str) -> None:
    """Sets the implementation of all mixture layers: 'grouped', 'loop', or 'auto' for the default choice."""
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError.of("implementation", implementation, f"choose one of {', '.join(IMPLEMENTATIONS)}")
    for module in model.modules():
        if isinstance(module, StackedExperts):
            module.implementation = implementation


class StackedLinear(OwnParameters):
    """E linear maps, weight (E, out_features, in_features) and bias (E, out_features).

    One parameter for all experts rather than a module each: experts without items then get a zero gradient, not None,
    which distributed training and many optimizers require.
    """

    undecayed = ("bias",)
    stacked = MappingProxyType({"weight": 0, "bias": 0})

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal with standard deviation 0.02, independent for each expert; zero bias."""
        trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @torch.no_grad()
    def load_dense(self, layers: Sequence[nn.Module], axis: int, width: int, halves: int) -> None:
        """Copies linear layers or 1x1 convolutions to every expert, concatenated by outputs, with `requires_grad`.

        The other arguments are those of `copy_dense`, for the weight.
        """
        for name, stack in self.named_parameters(recurse=False):
            sources = [layer.get_parameter(name) for layer in layers]
            # A convolution's weight is (out_features, in_features, 1, 1)
            dense = torch.cat([source.flatten(1) if name == "weight" else source for source in sources])
            of_units = name == "weight" or axis == 0
            stack.copy_(copy_dense(dense, len(stack), axis if of_units else None, width, halves))
            stack.requires_grad_(any(source.requires_grad for source in sources))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias in a type."""
        # The implementations multiply by themselves. They get the parameters by this call, because adapters, offloading
        # and sharding wrap a module's forward.
        bias = self.bias
        return self.weight.to(dtype), None if bias is None else bias.to(dtype)


def _linear(x: Tensor, stacks: tuple[Tensor, Tensor | None], expert: int) -> Tensor:
    """(..., in_features) through one expert's weight and bias -> (..., out_features)."""
    weight, bias = stacks
    return F.linear(x, weight[expert], None if bias is None else bias[expert])


def _linear_all(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(T, in_features) or (E, T, in_features) through every expert -> (E, T, out_features)."""
    outputs = x @ weight.transpose(1, 2)
    return outputs if bias is None else outputs + bias.unsqueeze(1)


class StackedExperts(nn.Module):
    """E two-layer feed-forward networks, E_i(x) = W2_i act(W1_i x + b1_i) + b2_i (GMoE, equation 2).

    Args:
        num_experts, in_features, hidden_features: E, D and H.
        norm_layer: Normalization of the hidden features, shared by all experts; None for none.
        bias: Whether the layers have biases; a pair for each layer separately.
        hidden_drop: Dropout rate of the hidden features.
        gated: Multiply by a gate, W2 (act(W1 x) * V1 x) (GLU variants, Shazeer, 2020); W1 and V1 are one matrix of 2 H.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] | None = None,
        bias: bool | tuple[bool, bool] = True,
        hidden_drop: float = 0.0,
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        bias1, bias2 = to_2tuple(bias)
        self.num_experts = num_experts
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = StackedLinear(num_experts, in_features, hidden_features * (1 + gated), bias=bias1, **dd)
        self.act: nn.Module = GatedActivation(act_layer()) if gated else act_layer()
        self.drop = nn.Dropout(hidden_drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_features, **dd)
        self.fc2 = StackedLinear(num_experts, hidden_features, in_features, bias=bias2, **dd)
        self.implementation = "auto"
        self.used: str | None = None  # the implementation in the last eager forward

    def load_dense(self, dense: FeedForward, perturbation: float = 0.0, reinit: float = 0.0) -> None:
        """Copies a dense feed-forward into every expert, with its trained activation and normalization.

        Narrower experts get parts, see `copy_dense`. `perturbation` is the standard deviation of noise on each expert's
        weights, relative to that of the matrix. `reinit` is the share in `reinitialize`.
        """
        width = self.fc2.weight.shape[-1]
        halves = len(self.fc1.weight[0]) // width
        self.fc1.load_dense(dense.first, 0, width, halves)
        self.fc2.load_dense([dense.second], 1, width, 1)
        reinitialize(reinit, list(self.fc1.parameters()), self.fc2.weight, halves)
        self.act, self.norm = copy.deepcopy(dense.act), copy.deepcopy(dense.norm)
        with torch.no_grad():
            for weight in (self.fc1.weight, self.fc2.weight) if perturbation > 0 else ():
                weight.add_(torch.randn_like(weight) * perturbation * weight[0].std())

    def forward(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Computes each item's experts and adds their outputs, weighted: (T, ..., D) items -> (T, ..., D).

        Expert indices (T, K) are int64. The index E marks an assignment that goes nowhere, and an item without experts
        gets zeros.
        """
        implementation = self._choose(x.device)
        if not torch.compiler.is_compiling():
            self.used = implementation
        if implementation == "loop":
            return self.forward_loop(x, expert_indices, combine_weights)
        return self.forward_grouped(x, expert_indices, combine_weights)

    def _choose(self, device: torch.device) -> str:
        """Returns the implementation, by the table at the top of this file."""
        recorded = torch.compiler.is_exporting() or torch.jit.is_tracing()
        if recorded or in_transforms() or in_forward_derivatives() or self._is_quantized():
            return "loop"
        if self.implementation == "auto":
            return "grouped" if device.type in DEVICES else "loop"
        return self.implementation

    def _is_quantized(self) -> bool:
        return any(type(layer.weight) not in (Tensor, nn.Parameter) for layer in (self.fc1, self.fc2))

    def forward_grouped(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, by one grouped product for each layer: sort the assignments, compute, and add the outputs."""
        dtype = self._computing_dtype(x)
        items = (x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)).to(dtype)  # (T, N, D)
        # Weights of assignments that go nowhere may be NaN
        weights = combine_weights.to(dtype).masked_fill(expert_indices == self.num_experts, 0)
        (weight1, bias1), (weight2, bias2) = self.fc1(dtype), self.fc2(dtype)
        has_kernel = has_grouped_kernel(weight1) and has_grouped_kernel(weight2)
        assignments = Assignments.of(expert_indices, self.num_experts, counts_on_cpu=not has_kernel)
        rows, counts = assignments.gather(items), assignments.counts * items.shape[1]
        hidden = self.act(grouped_linear(rows.flatten(0, 1), weight1, bias1, counts))
        hidden = self.norm(sampled_dropout(hidden, self.drop.p) if self.drop.training else hidden)
        outputs = grouped_linear(hidden.to(dtype), weight2, bias2, counts).view_as(rows)
        return assignments.combine(outputs, weights).view(x.shape)

    def _computing_dtype(self, x: Tensor) -> torch.dtype:
        device = x.device.type
        # Autocast leaves float64 alone
        if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
            return x.dtype
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def forward_loop(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, expert by expert: select its items, compute, add the outputs to the items."""
        first, second = self.fc1(x.dtype), self.fc2(x.dtype)
        combined = torch.zeros_like(x)
        for expert in range(self.num_experts):
            entries = (expert_indices == expert).nonzero()
            items, choice = entries[:, 0], entries[:, 1]
            hidden = self.norm(self.drop(self.act(_linear(x[items], first, expert))))
            outputs = _linear(hidden, second, expert)
            weights = combine_weights[items, choice].to(outputs.dtype).view([-1] + [1] * (x.dim() - 1))
            combined = combined.index_add(0, items, (outputs * weights).to(combined.dtype))
        return combined

    def forward_all(self, x: Tensor) -> Tensor:
        """(T, D) items through every expert, without dropout -> (E, T, D)."""
        hidden = self.norm(self.act(_linear_all(x, *self.fc1(x.dtype))))
        return _linear_all(hidden, *self.fc2(x.dtype))


def sampled_dropout(x: Tensor, rate: float) -> Tensor:
    """As `F.dropout`. On a CPU it is faster, because random numbers are drawn for the dropped features alone."""
    if x.device.type != "cpu" or not 0 < rate < 1:
        return F.dropout(x, rate)
    return x * dropout_factors(x.detach(), rate)


# An operator, because torch.compile cannot trace positions whose number is random. The tag keeps two calls from
# becoming one. A checkpointed block repeats the call with the generator's saved state.
@torch.library.custom_op("timm_moe_dg::dropout_factors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_factors(like: Tensor, rate: float) -> Tensor:
    """Draws a factor for each feature: 0 with probability `rate`, else 1 / (1 - rate)."""
    factors = torch.full_like(like, 1 / (1 - rate), memory_format=torch.contiguous_format)
    factors.view(-1).index_fill_(0, dropped_positions(factors.numel(), rate), 0)
    return factors


@dropout_factors.register_fake
def _(like: Tensor, rate: float) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def dropped_positions(size: int, rate: float) -> Tensor:
    """Draws the positions 0..size - 1 that are dropped, each independently with probability `rate`; ascending int64."""
    # The distance from one dropped position to the next has a geometric distribution
    expected = size * rate
    count = int(expected + 8 * math.sqrt(expected) + 16)  # beyond 8 standard deviations, also for small `expected`
    uniform = torch.rand(count, dtype=torch.float32, device="cpu").clamp_(min=2**-25)  # avoids log(0)
    steps = uniform.log_().div_(math.log1p(-rate)).ceil_().clamp_(max=2.0 * size + 2).long()  # avoids overflow
    steps[0] -= 1
    positions = steps.cumsum(0)
    return positions[: int(torch.searchsorted(positions, size))]
