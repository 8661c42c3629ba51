"""Expert feed-forward networks with stacked weights.

All experts of a layer live in one parameter per matrix, (E, ...). A module per expert would leave experts that no
item visited without a gradient, which breaks distributed training and every optimizer that expects one.

Axes: T items, A assignments, D features, H hidden features, E experts, K experts per item.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from .dispatch import sort_assignments
from .initialisation import OwnInitialisation
from .recompute import gelu_linear

Parameters = tuple[Tensor, Tensor | None]  # weight and bias

SORTED_PATH_DEVICES = ("cpu", "cuda")
SORTED_PATH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def portable_path() -> bool:
    """Whether a program is being recorded (export, trace, compile), which rules out sizes that depend on data."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


@functools.cache
def _sorted_path_is_tested(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the fast path runs here; warns once about each combination that it does not run on."""
    if device_type in SORTED_PATH_DEVICES and dtype in SORTED_PATH_DTYPES:
        return True
    message = (
        f"experts on {device_type} in {dtype}: the sorted dispatch is not tested there; looping over experts instead"
    )
    warnings.warn(message, stacklevel=2)
    return False


def dispatch_info(model: nn.Module) -> dict[str, str | None]:
    """Which dispatch each mixture layer took in its last eager forward.

    Args:
        model: Any module that holds `StackedExperts`.

    Returns:
        Name of the experts' module -> 'sorted' (one sort, a matrix product per expert), 'loop' (expert by expert), or
        None before the first eager forward. Exported, traced and compiled programs always hold the loop.
    """
    return {name: module.path for name, module in model.named_modules() if isinstance(module, StackedExperts)}


class StackedLinear(OwnInitialisation, nn.Module):
    """E linear maps, weight (E, out_features, in_features) and bias (E, out_features)."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert drawn on its own: truncated normal (standard deviation 0.02), zero bias."""
        trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def load_linear(self, linear: nn.Linear) -> None:
        """Makes every expert a copy of a dense layer."""
        with torch.no_grad():
            self.weight.copy_(linear.weight)
            if self.bias is not None:
                self.bias.copy_(linear.bias)

    def forward_all(self, x: Tensor) -> Tensor:
        """(T, in_features) or (E, T, in_features) through every expert -> (E, T, out_features)."""
        outputs = x @ self.weight.transpose(1, 2)
        return outputs if self.bias is None else outputs + self.bias.unsqueeze(1)

    def unbind(self) -> list[Parameters]:
        """The (weight, bias) of each expert, as views whose gradients come back in one stack."""
        weights = self.weight.unbind(0)
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind(0)
        return list(zip(weights, biases, strict=True))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """(..., in_features) through one expert -> (..., out_features)."""
        bias = self.bias
        return F.linear(x, self.weight[expert], None if bias is None else bias[expert])


class StackedExperts(nn.Module):
    """E two-layer feed-forward networks, E_i(x) = W2_i act(W1_i x + b1_i) + b2_i (GMoE, equation 2).

    Args:
        num_experts: E.
        in_features: D.
        hidden_features: H.
        act_layer: Activation between the layers.
        norm_layer: Normalisation of the hidden features, one for all experts; None for none.
        bias: Whether the layers have biases; a pair sets them apart.
        hidden_drop: Dropout rate of the hidden activations.
        device: Where the parameters are made.
        dtype: Their type.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] | None = None,
        bias: bool | tuple[bool, bool] = True,
        hidden_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        bias1, bias2 = to_2tuple(bias)
        self.num_experts = num_experts
        self.fc1 = StackedLinear(num_experts, in_features, hidden_features, bias1, device, dtype)
        self.act = act_layer()
        self.drop = nn.Dropout(hidden_drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_features, device=device, dtype=dtype)
        self.fc2 = StackedLinear(num_experts, hidden_features, in_features, bias2, device, dtype)
        self.path: str | None = None

    def forward(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Sends every item through its experts and adds the weighted outputs.

        Args:
            x: (T, ..., D) items.
            expert_indices: (T, K) int64; the value E marks an assignment that goes nowhere.
            combine_weights: (T, K).

        Returns:
            (T, ..., D); zeros for an item that went nowhere.
        """
        if not torch.jit.is_scripting():  # noqa: SIM102 (TorchScript skips the body of this very test only)
            if not portable_path():
                self.path = "sorted" if _sorted_path_is_tested(x.device.type, x.dtype) else "loop"
                if self.path == "sorted":
                    return self.forward_sorted(x, expert_indices, combine_weights)
        return self.forward_loop(x, expert_indices, combine_weights)

    def forward_loop(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """The portable path: expert by expert, find its items and add its outputs. Same contract as `forward`."""
        combined = torch.zeros_like(x)
        for expert in range(self.num_experts):
            found = (expert_indices == expert).nonzero()
            items, choice = found[:, 0], found[:, 1]
            hidden = self.norm(self.drop(self.act(self.fc1(x[items], expert))))
            outputs = self.fc2(hidden, expert)
            weights = combine_weights[items, choice].to(outputs.dtype).view([-1] + [1] * (x.dim() - 1))
            combined = combined.index_add(0, items, (outputs * weights).to(combined.dtype))
        return combined

    @torch.jit.unused
    def forward_all(self, x: Tensor) -> Tensor:
        """(T, D) items, each through every expert and without dropout -> (E, T, D)."""
        return self.fc2.forward_all(self.norm(self.act(self.fc1.forward_all(x))))

    @torch.jit.unused
    def forward_sorted(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """The fast path: one sort, one gather; then per expert two matrix products, and its outputs are added."""
        positions, items_A, counts = sort_assignments(expert_indices, self.num_experts)
        weights_A = combine_weights.flatten().index_select(0, positions)
        columns = [column.split(counts) for column in (x.index_select(0, items_A), items_A, weights_A)]
        combined: Tensor | None = None
        for chunk, items, weights, first, second in zip(*columns, self.fc1.unbind(), self.fc2.unbind(), strict=True):
            outputs = self._feed_forward(chunk, first, second)
            weighted = outputs * weights.to(outputs.dtype).view(-1, *[1] * (outputs.ndim - 1))
            # An expert's items are distinct, so that each sum has one order, on every device
            combined = (outputs.new_zeros(x.shape) if combined is None else combined).index_add_(0, items, weighted)
        assert combined is not None
        return combined

    def _feed_forward(self, x: Tensor, first: Parameters, second: Parameters) -> Tensor:
        """(..., D) through one expert; GELU's output, as large as its input, is not kept for the backward pass."""
        before = F.linear(x, *first)
        if isinstance(self.act, nn.GELU) and isinstance(self.norm, nn.Identity):
            drop = self.drop.p if self.training else 0.0
            return gelu_linear(before.flatten(0, -2), self.act, *second, drop).view(x.shape)
        return F.linear(self.norm(self.drop(self.act(before))), *second)
