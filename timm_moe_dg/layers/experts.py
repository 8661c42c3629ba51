"""Expert feed-forward networks with stacked weights, and the choice of their implementation.

Read grouped_experts.py first: one grouped product for each of the two layers computes all experts. The other
implementations give the same results. Conditions are checked from top to bottom. "Simple" experts have GELU or SiLU,
alone or as a gate, and no normalization of the hidden features. Figures: docs/results/speed.md.

| where                        | which experts        | implementation | why                                           |
|------------------------------|----------------------|----------------|-----------------------------------------------|
| TorchScript                  | all                  | loop           | plain operators                               |
| torch.vmap, meta device      | all                  | masked         | no shape depends on values: unused outputs of |
|                              |                      |                | all experts for all items are masked          |
| torch.compile                | simple               | sorted         | one operator without a graph break            |
|                              | others, in bfloat16  | grouped        | the compiler has the product in this type     |
|                              | others               | loop           |                                               |
| export, tracing, torch.func, | all                  | loop           | exported programs run without this package,   |
| forward-mode derivatives     |                      |                | and the others have no such derivatives       |
| quantized weights            | all                  | loop           | their classes have no other products          |
| other device or type         | all                  | loop           | works everywhere; one warning says so         |
| eager, CUDA from 9.0 on      | all, in bfloat16     | grouped        | torch has one kernel for it there             |
| eager, CUDA and CPU          | others               | grouped        | any module between the two products           |
| eager, CPU                   | simple, fewer than   | grouped        | 0.59 to 1.00 of the time of sorted experts    |
|                              | 32 rows per expert   |                | with 2 to 25 rows                             |
| eager, CUDA and CPU          | simple               | sorted         | see fast_experts.py                           |

`set_expert_implementation` sets another implementation for eager calls and torch.compile. `expert_implementation_info`
returns that of eager calls, and why. Nothing was run on CUDA. Its rows follow from torch's sources, and tests/gpu/
rehearses them on the CPU.

Axes: T items, D features, H hidden features, E experts, K experts per item.
"""

import copy
import functools
import warnings
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Optional

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn

from ..compat import in_forward_derivatives, in_transforms, in_vmap
from ..errors import ArgumentError
from .dense.copies import copy_dense, reinitialize
from .dense.feed_forwards import FeedForward, GatedActivation
from .fast_experts import compiled_experts, sorted_activation, sorted_experts
from .grouped_experts import ExpertInputs, grouped_experts, has_grouped_product
from .own_parameters import OwnParameters
from .precision import values_readable

DEVICES = ("cpu", "cuda")  # the second was rehearsed, not run
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
IMPLEMENTATIONS = ("auto", "sorted", "grouped", "loop")
_SORTED_FROM = 32  # rows per expert from which the sorted implementation is the faster one on a CPU
_GROUPED_KERNEL = (9, 0)  # compute capability from which torch has a kernel for the grouped product in bfloat16


def _is_known(device_type: str, dtype: torch.dtype) -> bool:
    return device_type in DEVICES and dtype in DTYPES


@functools.cache  # one warning for each combination
def _is_known_or_warn(device_type: str, dtype: torch.dtype) -> bool:
    if _is_known(device_type, dtype):
        return True
    remark = "only the loop over experts is known to work there, and is used instead"
    warnings.warn(f"experts on {device_type} in {dtype}: {remark}", stacklevel=2)
    return False


def _is_compiled() -> bool:
    """Whether torch.compile records this call; unlike exported programs, its programs may call our operators."""
    exported = torch.compiler.is_exporting() or torch.jit.is_tracing()  # is_compiling is true for export as well
    return torch.compiler.is_compiling() and not exported and not in_transforms()


def expert_implementation_info(model: nn.Module, reasons: bool = False) -> dict[str, str | None]:
    """Returns the implementation in each mixture layer's last eager forward, by the experts' module.

    It is 'sorted', 'grouped' or 'loop', see the table above, or None before the first eager forward. With `reasons`,
    returns why it was chosen instead.

    >>> model = timm.create_model("gmoe_tiny_patch16").eval()
    >>> logits = model(torch.randn(1, 3, 224, 224))
    >>> timm_moe_dg.layers.expert_implementation_info(model)
    {'blocks.8.mlp.experts': 'sorted', 'blocks.10.mlp.experts': 'sorted'}
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, StackedExperts)]
    return {name: module.reason if reasons else module.used for name, module in layers}


def set_expert_implementation(model: nn.Module, implementation: str) -> None:
    """Sets the implementation of all mixture layers: 'sorted', 'grouped', 'loop', or 'auto' for the default choice.

    Experts that cannot be sorted are grouped instead, or looped over under torch.compile.
    """
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

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Optional[Tensor]]:  # noqa: UP045 (TorchScript)
        """Returns weight and bias in a type."""
        # The implementations multiply by themselves. They get the parameters by this call, because adapters, offloading
        # and sharding wrap a module's forward.
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
        self.used: str | None = None  # in the last eager forward
        self.reason: str | None = None

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
        if not torch.jit.is_scripting():
            chosen = self._choose(x, expert_indices)
            if chosen == "masked":
                return self.forward_masked(x, expert_indices, combine_weights)
            if chosen == "sorted":
                return self.forward_sorted(x, expert_indices, combine_weights)
            if chosen == "grouped":
                return self.forward_grouped(x, expert_indices, combine_weights)
        return self.forward_loop(x, expert_indices, combine_weights)

    @torch.jit.unused
    def _choose(self, x: Tensor, expert_indices: Tensor) -> str:
        """Returns the implementation, by the table at the top of this file."""
        if x.is_meta or in_vmap():  # shapes may not depend on values
            return "masked"
        if _is_compiled():
            return self._choose_compiled(x)
        if not values_readable(x) or in_forward_derivatives():  # exported, traced, under torch.func
            return "loop"
        implementation, self.reason = self._choose_eager(x, expert_indices)
        self.used = implementation
        return implementation

    @torch.jit.unused
    def _choose_compiled(self, x: Tensor) -> str:
        if not _is_known(x.device.type, x.dtype) or self._must_loop():
            return "loop"
        if self._can_sort() and self.implementation != "grouped":
            return "sorted"
        # torch's compiler has the grouped product in this type alone
        in_bfloat16 = self._computing_dtype(x) == torch.bfloat16
        return "grouped" if in_bfloat16 and has_grouped_product(self.fc1.weight.shape, torch.bfloat16) else "loop"

    @torch.jit.unused
    def _must_loop(self) -> bool:
        quantized = any(type(layer.weight) not in (Tensor, nn.Parameter) for layer in (self.fc1, self.fc2))
        return quantized or self.implementation == "loop"

    @torch.jit.unused
    def _choose_eager(self, x: Tensor, expert_indices: Tensor) -> tuple[str, str]:
        """Returns the implementation and the reason for it."""
        if not _is_known_or_warn(x.device.type, x.dtype):
            return "loop", f"{x.device.type} in {x.dtype} was not tried"
        if self._must_loop():
            chosen = self.implementation == "loop"
            return "loop", "set_expert_implementation" if chosen else "the weights are of a class of their own"
        if not self._can_sort():
            return "grouped", "another activation than GELU and SiLU, or a normalization of the hidden features"
        if self.implementation != "auto":
            return self.implementation, "set_expert_implementation"
        rows = expert_indices.numel() * x.shape[1:-1].numel()
        if x.device.type == "cpu" and rows < self.num_experts * _SORTED_FROM:
            return "grouped", f"fewer than {_SORTED_FROM} rows per expert"
        if self._has_grouped_kernel(x):
            return "grouped", "the GPU has a kernel for all experts in bfloat16"
        return "sorted", "the fastest for many rows" if x.device.type == "cpu" else "one wait for each layer"

    @torch.jit.unused
    def _has_grouped_kernel(self, x: Tensor) -> bool:
        if x.device.type != "cuda" or self._computing_dtype(x) != torch.bfloat16:
            return False
        shapes = (self.fc1.weight.shape, self.fc2.weight.shape)
        has_product = all(has_grouped_product(shape, torch.bfloat16) for shape in shapes)
        return has_product and torch.cuda.get_device_capability(x.device) >= _GROUPED_KERNEL

    @torch.jit.unused
    def _can_sort(self) -> bool:
        return isinstance(self.norm, nn.Identity) and sorted_activation(self.act) is not None

    @torch.jit.unused
    def forward_sorted(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, by `sorted_experts`; only for activations that it supports, without normalization."""
        activation = sorted_activation(self.act)
        assert activation is not None
        drop = self.drop.p if self.training else 0.0
        compute = compiled_experts if _is_compiled() else sorted_experts
        return compute(self._inputs(x, combine_weights), expert_indices, activation, drop).view(x.shape)

    @torch.jit.unused
    def forward_grouped(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, by `grouped_experts`; for any activation and normalization."""
        return grouped_experts(self._inputs(x, combine_weights), expert_indices, self._between).view(x.shape)

    @torch.jit.unused
    def _between(self, features: Tensor) -> Tensor:
        return self.norm(self.drop(self.act(features)))

    @torch.jit.unused
    def _inputs(self, x: Tensor, combine_weights: Tensor) -> ExpertInputs:
        """Items as (T, N, D), and everything in the type of the computation."""
        dtype = self._computing_dtype(x)
        items = x.flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1)
        return ExpertInputs(items.to(dtype), combine_weights.to(dtype), *self.fc1(dtype), *self.fc2(dtype))

    @torch.jit.unused
    def _computing_dtype(self, x: Tensor) -> torch.dtype:
        device = x.device.type
        # Autocast leaves float64 alone
        if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device):
            return x.dtype
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype

    def forward_loop(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, expert by expert: select its items, compute, add the outputs to the items."""
        weight1, bias1 = self.fc1(x.dtype)
        weight2, bias2 = self.fc2(x.dtype)
        combined = torch.zeros_like(x)
        for expert in range(self.num_experts):
            entries = (expert_indices == expert).nonzero()
            items, choice = entries[:, 0], entries[:, 1]
            hidden = self.norm(self.drop(self.act(_linear(x[items], weight1, bias1, expert))))
            outputs = _linear(hidden, weight2, bias2, expert)
            weights = combine_weights[items, choice].to(outputs.dtype).view([-1] + [1] * (x.dim() - 1))
            combined = combined.index_add(0, items, (outputs * weights).to(combined.dtype))
        return combined

    @torch.jit.unused
    def forward_masked(self, x: Tensor, expert_indices: Tensor, combine_weights: Tensor) -> Tensor:
        """As `forward`, all items through all experts, with unused outputs masked."""
        weight1, bias1 = self.fc1(x.dtype)
        weight2, bias2 = self.fc2(x.dtype)
        combined = torch.zeros_like(x)
        per_item = [-1] + [1] * (x.dim() - 1)
        for expert in range(self.num_experts):
            hidden = self.norm(self.drop(self.act(_linear(x, weight1, bias1, expert))))
            outputs = _linear(hidden, weight2, bias2, expert)
            absent = expert_indices != expert
            weights = combine_weights.masked_fill(absent, 0).sum(1).to(outputs.dtype).view(per_item)
            # Masked as well, since 0 times an infinite output is NaN
            weighted = (outputs * weights).masked_fill(absent.all(1).view(per_item), 0)
            combined = combined + weighted.to(combined.dtype)
        return combined

    @torch.jit.unused
    def forward_all(self, x: Tensor) -> Tensor:
        """(T, D) items through every expert, without dropout -> (E, T, D)."""
        hidden = self.norm(self.act(_linear_all(x, *self.fc1(x.dtype))))
        return _linear_all(hidden, *self.fc2(x.dtype))
