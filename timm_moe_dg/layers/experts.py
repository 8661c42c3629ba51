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

from ..errors import ArgumentError
from .dispatch import group_assignments, sort_assignments
from .feed_forwards import FeedForward, GatedActivation
from .grouped_path import grouped_experts, has_grouped_product
from .own_parameters import OwnParameters
from .sorted_path import Operands, compiled_experts, sorted_activation, sorted_experts

SORTED_PATH_DEVICES = ("cpu", "cuda")
SORTED_PATH_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DISPATCHES = ("auto", "sorted", "grouped", "loop")
_SORTED_FROM = 32  # rows per expert from which it is the faster on a CPU, see docs/speed.md


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


def _is_recorded() -> bool:
    """Whether this call becomes part of a program, or runs under a transform of torch.func."""
    recorded = torch.jit.is_tracing() or torch.compiler.is_compiling()
    return recorded or torch._C._are_functorch_transforms_active()


def _is_compiled() -> bool:
    """Whether torch.compile records this call: unlike exported ones, its programs may hold this package's operators."""
    exported = torch.compiler.is_exporting() or torch.jit.is_tracing()  # exporting counts as compiling too
    return torch.compiler.is_compiling() and not exported and not torch._C._are_functorch_transforms_active()


def _values_hidden(x: Tensor) -> bool:
    """Whether no index may depend on values: on the meta device and inside torch.vmap."""
    if not torch._C._are_functorch_transforms_active():
        return x.is_meta
    levels = torch._C._functorch.get_interpreter_stack() or []
    return x.is_meta or any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def dispatch_info(model: nn.Module) -> dict[str, str | None]:
    """Which dispatch each mixture layer took in its last eager forward.

    Args:
        model: Any module that holds `StackedExperts`.

    Returns:
        Name of the experts' module -> 'sorted' (all experts as one function of autograd: GELU, SiLU, and these as
        gates), 'grouped' (a grouped product for each of the two layers: other activations, normalized hidden features,
        and few rows per expert on a CPU), 'loop' (each expert looks for its items: devices and types without tests), or
        None before the first eager forward. Compiled programs are 'sorted', 'grouped' in bfloat16 where the former
        cannot be, or hold the loop; exported and traced ones always do, and torch.func takes it; on the meta device and
        inside of torch.vmap every expert answers for every item, and what is not wanted is masked.
    """
    return {name: module.path for name, module in model.named_modules() if isinstance(module, StackedExperts)}


def set_dispatch(model: nn.Module, dispatch: str) -> None:
    """Asks every mixture layer for one dispatch, to compare them; what it cannot compute, another one does.

    Args:
        model: Any module that holds `StackedExperts`.
        dispatch: 'sorted', 'grouped' or 'loop', see `dispatch_info`; 'auto' for the one that was measured to be fastest
            on a CPU.

    Raises:
        ArgumentError: There is no such dispatch.
    """
    if dispatch not in DISPATCHES:
        raise ArgumentError.of("dispatch", dispatch, f"choose one of {', '.join(DISPATCHES)}")
    for module in model.modules():
        if isinstance(module, StackedExperts):
            module.dispatch = dispatch


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
        self.dispatch = "auto"
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
            if _values_hidden(x):
                return self.forward_masked(x, expert_indices, combine_weights)
            path = self._path(x, expert_indices)
            if path == "sorted":
                return self.forward_sorted(x, expert_indices, combine_weights)
            if path == "grouped":
                return self.forward_grouped(x, expert_indices, combine_weights)
        return self.forward_loop(x, expert_indices, combine_weights)

    @torch.jit.unused
    def _path(self, x: Tensor, expert_indices: Tensor) -> str:
        """The dispatch to take."""
        if _is_compiled():
            return self._compiled_path(x)
        if _is_recorded():
            return "loop"
        self.path = self._eager_path(x, expert_indices)
        return self.path

    @torch.jit.unused
    def _compiled_path(self, x: Tensor) -> str:
        if not _is_tested(x.device.type, x.dtype) or self.dispatch == "loop":
            return "loop"
        if self._is_sorted() and self.dispatch != "grouped":
            return "sorted"
        # torch's compiler knows the grouped product in this type alone
        in_bfloat16 = self._computing_dtype(x) == torch.bfloat16
        return "grouped" if in_bfloat16 and has_grouped_product(self.fc1.weight.shape, torch.bfloat16) else "loop"

    @torch.jit.unused
    def _eager_path(self, x: Tensor, expert_indices: Tensor) -> str:
        if not _sorted_path_is_tested(x.device.type, x.dtype) or self.dispatch == "loop":
            return "loop"
        if not self._is_sorted() or self.dispatch == "grouped":
            return "grouped"
        rows = expert_indices.numel() * x.shape[1:-1].numel()
        few = x.device.type == "cpu" and rows < self.num_experts * _SORTED_FROM
        return "grouped" if few and self.dispatch == "auto" else "sorted"

    @torch.jit.unused
    def forward_grouped(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """Any activation and normalization: one sort, a grouped product per layer, one sum. As `forward`."""
        assignments = group_assignments(expert_indices, self.num_experts)
        return grouped_experts(self._operands(x, combine_weights), assignments, self._between).view(x.shape)

    @torch.jit.unused
    def _between(self, hidden: Tensor) -> Tensor:
        return self.norm(self.drop(self.act(hidden)))

    @torch.jit.unused
    def _operands(self, x: Tensor, combine_weights: Tensor) -> Operands:
        """What both fast paths compute with: (T, N, D) items, and everything in the type of the computation."""
        dtype = self._computing_dtype(x)
        items = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        return Operands(items.to(dtype), combine_weights.to(dtype), *self.fc1(dtype), *self.fc2(dtype))

    @torch.jit.unused
    def _computing_dtype(self, x: Tensor) -> torch.dtype:
        """The type of autocast where it is on, which leaves float64 alone."""
        device = x.device.type
        if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
            return x.dtype
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

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
    def forward_sorted(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """The fast path, without normalization: one sort, two matrix products per expert; as `forward`."""
        activation = sorted_activation(self.act)
        assert activation is not None
        operands = self._operands(x, combine_weights)
        drop = self.drop.p if self.training else 0.0
        if _is_compiled():
            return compiled_experts(operands, expert_indices, activation, drop).view(x.shape)
        assignments = sort_assignments(expert_indices, self.num_experts)
        return sorted_experts(operands, assignments, activation, drop).view(x.shape)
