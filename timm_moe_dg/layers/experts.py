"""Expert feed-forward networks with stacked weights.

All experts of a layer live in one parameter per matrix, (E, ...). A module per expert would leave experts that no
item visited without a gradient, which breaks distributed training and every optimizer that expects one.

Axes: T items, A assignments, D features, H hidden features, E experts, K experts per item.
"""

import copy
import functools
import warnings
from collections.abc import Sequence
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from timm.layers.helpers import to_2tuple
from torch import Tensor, nn

from .dispatch import SortedAssignments, sort_assignments
from .feed_forwards import FeedForward, GatedActivation
from .own_parameters import OwnParameters
from .precision import compiled_path, portable_path, values_hidden
from .sorted_path import (
    Operands,
    combine,
    compiled_experts,
    known_weights,
    linear_into,
    sorted_activation,
    sorted_experts,
)

SORTED_PATH_DEVICES = ("cpu", "cuda")
SORTED_PATH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _is_tested(device_type: str, dtype: torch.dtype) -> bool:
    """Whether the fast path is tested here."""
    return device_type in SORTED_PATH_DEVICES and dtype in SORTED_PATH_DTYPES


@functools.cache
def _sorted_path_is_tested(device_type: str, dtype: torch.dtype) -> bool:
    """The same, for eager mode; warns once about each combination that is not."""
    if _is_tested(device_type, dtype):
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
        Name of the experts' module -> 'sorted' (all experts as one function of autograd: GELU, SiLU, and these as
        gates), 'grouped' (sorted too, each expert by itself: other activations, normalized hidden features), 'loop'
        (each expert looks for its items: devices and types without tests), or None before the first eager forward.
        Compiled programs are 'sorted' or hold the loop; exported and traced ones always do, and torch.func takes it; on
        the meta device and inside of torch.vmap every expert answers for every item, and what is not wanted is masked.
    """
    return {name: module.path for name, module in model.named_modules() if isinstance(module, StackedExperts)}


class StackedLinear(OwnParameters):
    """E linear maps, weight (E, out_features, in_features) and bias (E, out_features).

    Its forward hands out the weights and multiplies nothing, since each dispatch does that in its own way. Whoever
    computes with them calls it, so that adapters, offloading and sharding find the forward they wrap.
    """

    undecayed = ("bias",)

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

    @torch.no_grad()
    def load_dense(self, layers: Sequence[nn.Module]) -> None:
        """Makes every expert a copy of dense layers, their outputs one behind another; trained or frozen as they are.

        Args:
            layers: Linear layers or 1x1 convolutions.
        """
        for name, own in self.named_parameters(recurse=False):
            sources = [
                layer.get_parameter(name).flatten(1) if name == "weight" else layer.get_parameter(name)
                for layer in layers
            ]
            own.copy_(torch.cat(sources))
            own.requires_grad_(any(layer.get_parameter(name).requires_grad for layer in layers))

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Optional[Tensor]]:  # noqa: UP045 (TorchScript)
        """Weight and bias in a type."""
        bias = self.bias
        return self.weight.to(dtype), None if bias is None else bias.to(dtype)


def _linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], expert: int) -> Tensor:  # noqa: UP045 (TorchScript)
    """(..., in_features) through one expert -> (..., out_features)."""
    return F.linear(x, weight[expert], None if bias is None else bias[expert])


def _unbound(weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Each expert's weight and bias; their gradients are stacked once, where indexing would add up E sparse stacks."""
    biases = [None] * len(weight) if bias is None else bias.unbind()
    return list(zip(weight.unbind(), biases, strict=True))


def _linear_all(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(T, in_features) or (E, T, in_features) through every expert -> (E, T, out_features)."""
    outputs = x @ weight.transpose(1, 2)
    return outputs if bias is None else outputs + bias.unsqueeze(1)


class StackedExperts(nn.Module):
    """E two-layer feed-forward networks, E_i(x) = W2_i act(W1_i x + b1_i) + b2_i (GMoE, equation 2).

    Args:
        num_experts: E.
        in_features: D.
        hidden_features: H.
        act_layer: Activation between the layers.
        norm_layer: Normalization of the hidden features, one for all experts; None for none.
        bias: Whether the layers have biases; a pair sets them apart.
        hidden_drop: Dropout rate of the hidden activations.
        gated: Multiply by a gate, W2 (act(W1 x) * V1 x) (GLU variants, Shazeer, 2020); W1 and V1 are one matrix of 2 H.
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
        gated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        bias1, bias2 = to_2tuple(bias)
        self.num_experts = num_experts
        self.fc1 = StackedLinear(num_experts, in_features, hidden_features * (1 + gated), bias1, device, dtype)
        self.act: nn.Module = GatedActivation(act_layer()) if gated else act_layer()
        self.drop = nn.Dropout(hidden_drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_features, device=device, dtype=dtype)
        self.fc2 = StackedLinear(num_experts, hidden_features, in_features, bias2, device, dtype)
        self.path: str | None = None

    def load_dense(self, dense: FeedForward, perturbation: float = 0.0) -> None:
        """Makes every expert a copy of a dense feed-forward, its activation and normalization with what they learned.

        Args:
            dense: What it is made of.
            perturbation: Standard deviation of the noise on each expert's weights, relative to that of the matrix.
        """
        self.fc1.load_dense(dense.first)
        self.fc2.load_dense([dense.second])
        self.act, self.norm = copy.deepcopy(dense.act), copy.deepcopy(dense.norm)
        with torch.no_grad():
            for weight in (self.fc1.weight, self.fc2.weight) if perturbation > 0 else ():
                weight.add_(torch.randn_like(weight) * perturbation * weight[0].std())

    def forward(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Sends every item through its experts and adds the weighted outputs.

        Args:
            x: (T, ..., D) items.
            expert_indices: (T, K) int64; the value E marks an assignment that goes nowhere.
            combine_weights: (T, K).

        Returns:
            (T, ..., D); zeros for an item that went nowhere.
        """
        if not torch.jit.is_scripting():
            if values_hidden(x):
                return self.forward_masked(x, expert_indices, combine_weights)
            elif compiled_path():  # noqa: RET505 (likewise)
                if _is_tested(x.device.type, x.dtype) and self._is_sorted():
                    return self.forward_sorted(x, expert_indices, combine_weights)
            elif not portable_path():
                self.path = self._eager_path(x)
                if self.path == "sorted":
                    return self.forward_sorted(x, expert_indices, combine_weights)
                if self.path == "grouped":
                    return self.forward_grouped(x, expert_indices, combine_weights)
        return self.forward_loop(x, expert_indices, combine_weights)

    @torch.jit.unused
    def forward_grouped(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Any activation and normalization: one sort, each expert on its own rows, one sum. As `forward`."""
        assignments = sort_assignments(expert_indices, self.num_experts)
        if not torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            return self._infer_grouped(x, assignments, combine_weights)
        layers = [_unbound(*layer(x.dtype)) for layer in (self.fc1, self.fc2)]
        outputs = []
        for rows, first, second in zip(
            x.index_select(0, assignments.items).split(assignments.counts), *layers, strict=True
        ):
            hidden = self.norm(self.drop(self.act(F.linear(rows, *first))))
            outputs.append(F.linear(hidden, *second))
        rows = torch.cat(outputs)
        weights = combine_weights.flatten().index_select(0, assignments.positions).to(rows.dtype)
        weighted = (rows * weights.view([-1] + [1] * (x.dim() - 1))).to(x.dtype)
        return torch.zeros_like(x).index_add(0, assignments.items, weighted)

    @torch.jit.unused
    def _infer_grouped(self, x: Tensor, assignments: SortedAssignments, combine_weights: Tensor) -> Tensor:
        """The same without a graph: each output is written where it is summed up from."""
        layers = [_unbound(*layer(x.dtype)) for layer in (self.fc1, self.fc2)]
        outputs = x.new_empty(len(assignments.items) + 1, *x.shape[1:])
        outputs[-1] = 0
        for items, own, first, second in zip(
            assignments.items.split(assignments.counts), outputs[:-1].split(assignments.counts), *layers, strict=True
        ):
            hidden = self.norm(self.drop(self.act(F.linear(x.index_select(0, items), *first))))
            linear_into(hidden.flatten(0, -2), second[0].mT, second[1], own.flatten(0, -2))
        return combine(outputs, assignments, known_weights(assignments, combine_weights.to(x.dtype))).view(x.shape)

    def forward_loop(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """The portable path: expert by expert, find its items and add its outputs. Same contract as `forward`."""
        weight1, bias1 = self.fc1(x.dtype)
        weight2, bias2 = self.fc2(x.dtype)
        combined = torch.zeros_like(x)
        for expert in range(self.num_experts):
            found = (expert_indices == expert).nonzero()
            items, choice = found[:, 0], found[:, 1]
            hidden = self.norm(self.drop(self.act(_linear(x[items], weight1, bias1, expert))))
            outputs = _linear(hidden, weight2, bias2, expert)
            weights = combine_weights[items, choice].to(outputs.dtype).view([-1] + [1] * (x.dim() - 1))
            combined = combined.index_add(0, items, (outputs * weights).to(combined.dtype))
        return combined

    @torch.jit.unused
    def forward_masked(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Every item through every expert, masked: for where no program may depend on indices. As `forward`."""
        weight1, bias1 = self.fc1(x.dtype)
        weight2, bias2 = self.fc2(x.dtype)
        combined = torch.zeros_like(x)
        per_item = [-1] + [1] * (x.dim() - 1)
        for expert in range(self.num_experts):
            hidden = self.norm(self.drop(self.act(_linear(x, weight1, bias1, expert))))
            outputs = _linear(hidden, weight2, bias2, expert)
            absent = expert_indices != expert
            weights = combine_weights.masked_fill(absent, 0).sum(1).to(outputs.dtype).view(per_item)
            # A weight of 0 does not keep out what is not finite
            weighted = (outputs * weights).masked_fill(absent.all(1).view(per_item), 0)
            combined = combined + weighted.to(combined.dtype)
        return combined

    @torch.jit.unused
    def forward_all(self, x: Tensor) -> Tensor:
        """(T, D) items, each through every expert and without dropout -> (E, T, D)."""
        hidden = self.norm(self.act(_linear_all(x, *self.fc1(x.dtype))))
        return _linear_all(hidden, *self.fc2(x.dtype))

    @torch.jit.unused
    def _is_sorted(self) -> bool:
        """Whether the fast path knows what is computed here."""
        return isinstance(self.norm, nn.Identity) and sorted_activation(self.act) is not None

    @torch.jit.unused
    def _eager_path(self, x: Tensor) -> str:
        if not _sorted_path_is_tested(x.device.type, x.dtype):
            return "loop"
        return "sorted" if self._is_sorted() else "grouped"

    @torch.jit.unused
    def forward_sorted(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """The fast path, without normalization: one sort, two matrix products per expert; as `forward`."""
        activation = sorted_activation(self.act)
        assert activation is not None
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        items = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        operands = Operands(items.to(dtype), combine_weights.to(dtype), *self.fc1(dtype), *self.fc2(dtype))
        drop = self.drop.p if self.training else 0.0
        if compiled_path():
            return compiled_experts(operands, expert_indices, activation, drop).view(x.shape)
        assignments = sort_assignments(expert_indices, self.num_experts)
        return sorted_experts(operands, assignments, activation, drop).view(x.shape)
