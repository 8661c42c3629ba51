"""The sorted implementation of experts, faster training on a CPU. No other file needs this one to be understood.

A training step with `grouped_experts` takes 1.04 to 1.08 of the time (docs/results/speed.md), with the same results.
Here one autograd function computes all experts, with two matrix products per expert.

Forward:
1. Sort the assignments by expert and gather their rows.
2. For each expert: a = W1 x + b1, mark the features that dropout drops, h = act(a), y = W2 h + b2.
3. Add the outputs of each item, weighted by its combine weights.

Backward: for each expert, compute h again from a, and write the gradients into the stacked ones.

Every result is written into a buffer. Autograd over slices of the stacked weights would copy each expert's gradient
into the stack and save h beside a.

`sorted_experts` is the eager form. `compiled_experts` is the same as operators for torch.compile.

Axes: T items of N tokens each, A assignments, K experts per item, D features, H hidden features, G features before the
activation (H, or 2 H with a gate), E experts.
"""

import math
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import is_batch_of_gradients
from .assignments import SortedAssignments, sort_assignments
from .dense.feed_forwards import GatedActivation
from .grouped_experts import ExpertInputs
from .precision import without_autocast

aten = torch.ops.aten  # the functions that write GELU, SiLU and their derivatives into a given tensor

# Written over the features that dropout drops, before the activation. GELU, SiLU and their derivatives are exactly 0 at
# this value in every floating type. The backward pass therefore needs no mask, neither stored nor applied.
DROPPED = -(2.0**13)


class SortedActivation(NamedTuple):
    """h = f(a); or with a gate (GLU variants, Shazeer, 2020) f(a1) * a2 or a1 * f(a2) for the halves of a."""

    function: str = "gelu"  # f, 'gelu' (Hendrycks and Gimpel, 2016) or 'silu'
    approximate: str = "none"  # GELU's form, 'none' or 'tanh'
    gate: int | None = None  # the half that f is applied to, 0 or 1, or None for no gate

    def halves(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """(..., G) -> the argument of f, and its factor."""
        if self.gate is None:
            return features, None
        halves = features.chunk(2, dim=-1)
        return halves[self.gate], halves[1 - self.gate]

    def __call__(self, features: Tensor) -> Tensor:
        """(..., G) -> (..., H), by functions that autograd supports."""
        argument, factor = self.halves(features)
        activated = F.gelu(argument, approximate=self.approximate) if self.function == "gelu" else F.silu(argument)
        return activated if factor is None else activated * factor

    def write(self, features: Tensor, out: Tensor) -> None:
        """Writes h; `out` may be the argument of f itself."""
        argument, factor = self.halves(features)
        self._write_function(argument, out)
        if factor is not None:
            out *= factor

    def write_gradient(
        self, features: Tensor, grad: Tensor, hidden: Tensor, grad_features: Tensor, needs_hidden: bool
    ) -> None:
        """Writes the (rows, G) gradient of the features before the activation, and h where it is needed.

        `grad` and `hidden` (rows, H) are overwritten in any case. `grad_features` may be `grad` if there is no gate.
        """
        argument, factor = self.halves(features)
        grad_argument, grad_factor = self.halves(grad_features)
        if needs_hidden or factor is not None:
            self._write_function(argument, hidden)
        if factor is not None and grad_factor is not None:
            torch.mul(grad, hidden, out=grad_factor)
            hidden *= factor
            grad *= factor
        if self.function == "gelu":
            aten.gelu_backward.grad_input(grad, argument, approximate=self.approximate, grad_input=grad_argument)
        else:
            aten.silu_backward.grad_input(grad, argument, grad_input=grad_argument)

    def _write_function(self, argument: Tensor, out: Tensor) -> None:
        if self.function == "gelu":
            aten.gelu.out(argument, approximate=self.approximate, out=out)
        else:
            aten.silu.out(argument, out=out)


def sorted_activation(act: nn.Module) -> SortedActivation | None:
    """Returns the activation that a module computes, or None if this file does not support it."""
    # Exact types: a subclass may compute anything
    if type(act) is GatedActivation:
        inner = sorted_activation(act.act)
        return inner._replace(gate=int(act.gate_last)) if inner is not None and inner.gate is None else None
    if type(act) is nn.GELU:
        return SortedActivation("gelu", act.approximate)
    return SortedActivation("silu") if type(act) is nn.SiLU else None


class HiddenDropout(NamedTuple):
    """Dropout of hidden features as a function of a seed."""

    rate: float  # probability of dropping a feature, 0 to 1
    seed: int  # of a generator on the features' device

    @property
    def scale(self) -> float:
        """Factor of the remaining features; 0 if none remains."""
        return 1 / (1 - self.rate) if self.rate < 1 else 0.0

    def sample(self, sizes: list[int], width: int, device: torch.device) -> list[Tensor]:
        """Draws what each expert's (rows, H) features lose: flat positions on a CPU, masks on other devices."""
        generator = torch.Generator(device).manual_seed(self.seed)
        if device.type != "cpu":
            mask = torch.empty(sum(sizes), width, dtype=torch.bool, device=device)
            return list(mask.bernoulli_(self.rate, generator=generator).split(sizes))
        starts = list(accumulate((size * width for size in sizes), initial=0))
        positions = dropped_positions(starts[-1], self.rate, generator)
        bounds = torch.searchsorted(positions, torch.tensor(starts, device=device)).tolist()
        return [
            positions[begin:end].sub_(start) for start, (begin, end) in zip(starts[:-1], pairwise(bounds), strict=True)
        ]


def mark_dropped(features: Tensor, dropped: Tensor) -> None:
    """Writes `DROPPED` into (rows, H) features, contiguous along the last axis, at flat positions or under a mask."""
    if dropped.dtype == torch.bool:
        features.masked_fill_(dropped, DROPPED)
    elif len(dropped):
        (rows, width), stride = features.shape, features.stride(0)
        if stride != width:  # one half of a gated activation's features
            dropped = dropped + dropped.div(width, rounding_mode="floor") * (stride - width)
        features.as_strided(((rows - 1) * stride + width,), (1,)).index_fill_(0, dropped, DROPPED)


def draw_seed() -> Tensor:
    """Draws a seed () int64 from torch's default generator, on the CPU so that reading it never waits for a device."""
    return torch.randint(2**63 - 1, (), device="cpu")


def dropped_positions(size: int, rate: float, generator: torch.Generator) -> Tensor:
    """Draws the positions 0..size - 1 that are dropped, each independently with probability `rate`; ascending int64."""
    if rate >= 1:
        return torch.arange(size, device=generator.device)
    # The distance from one dropped position to the next has a geometric distribution. One random number for each
    # dropped position is much faster on a CPU than one for each position.
    expected = size * rate
    count = int(expected + 8 * math.sqrt(expected) + 16)  # beyond 8 standard deviations, also for small `expected`
    uniform = torch.rand(count, generator=generator, dtype=torch.float32, device=generator.device)
    uniform = uniform.clamp_(min=2**-25)  # avoids log(0); half the distance between possible values
    steps = uniform.log_().div_(math.log1p(-rate)).ceil_().clamp_(max=2.0 * size + 2).long()  # avoids overflow
    steps[0] -= 1
    positions = steps.cumsum(0)
    return positions[: int(torch.searchsorted(positions, size))]


class _Constants(NamedTuple):
    """The inputs without gradients."""

    assignments: SortedAssignments
    activation: SortedActivation
    dropout: HiddenDropout | None

    @property
    def scale(self) -> float:
        """Factor of the hidden features that dropout leaves."""
        return 1.0 if self.dropout is None else self.dropout.scale

    def sizes(self, num_tokens: int) -> list[int]:
        """Number of each expert's rows, of A * N."""
        return [count * num_tokens for count in self.assignments.counts]


class _Saved(NamedTuple):
    """The tensors that the forward pass fills for the backward pass."""

    rows: Tensor  # (A * N, D) tokens in expert order
    pre_activation: Tensor | None  # (A * N, G), with dropout's marks; None without a backward pass
    outputs: Tensor  # (A + 1, N, D), the last one zeros, which assignments that go nowhere read

    @classmethod
    def gather(
        cls, assignments: SortedAssignments, x: Tensor, pre_activation: Tensor | None, outputs: Tensor
    ) -> "_Saved":
        """Gathers the rows, and cuts buffers that may be for more than A assignments."""
        rows = x.index_select(0, assignments.items).flatten(0, 1)
        features = None if pre_activation is None else pre_activation[: len(rows)]
        return cls(rows, features, outputs[: len(assignments.items) + 1])


def allocate_buffers(x: Tensor, weight1: Tensor, num_assignments: int) -> tuple[Tensor, Tensor]:
    """Allocates the features before the activation and the experts' outputs, see `_Saved`."""
    features = x.new_empty(num_assignments * x.shape[1], weight1.shape[1])
    return features, x.new_empty(num_assignments + 1, *x.shape[1:])


def sorted_experts(
    inputs: ExpertInputs,
    expert_indices: Tensor,
    activation: SortedActivation = SortedActivation(),  # noqa: B008 (immutable)
    drop: float = 0.0,
) -> Tensor:
    """Sum over an item's experts of w * (W2 dropout(act(W1 x + b1)) + b2) (GMoE, equation 2).

    Expert indices (T, K) int64 -> (T, N, D), with zeros for an item without experts. The index E marks an assignment
    that goes nowhere. `drop` is the dropout rate of the hidden features, 0 in evaluation. Supports second derivatives
    and batched gradients. On CUDA it waits for the device once.
    """
    seed = draw_seed() if drop > 0 else None
    assignments = sort_assignments(expert_indices, len(inputs.weight1))
    constants, inputs = _prepare(inputs, assignments, seed, drop, activation)
    if gradients_needed(inputs):
        sums: Tensor = _SortedExperts.apply(constants, *inputs)
    else:
        sums = _forward_only(constants, inputs)
    return sums.view(inputs.x.shape)


def gradients_needed(inputs: ExpertInputs) -> bool:
    """Returns whether a backward pass may follow."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)


def _prepare(
    inputs: ExpertInputs, assignments: SortedAssignments, seed: Tensor | None, drop: float, activation: SortedActivation
) -> tuple[_Constants, ExpertInputs]:
    constants = _Constants(assignments, activation, None if seed is None else HiddenDropout(drop, int(seed)))
    number = len(assignments.items)
    if number < inputs.combine_weights.numel():
        # Weights of assignments that go nowhere, since NaN times a zero output is NaN
        inputs = inputs._replace(combine_weights=inputs.combine_weights.masked_fill(assignments.ranks == number, 0))
    return constants, inputs


class _SortedExperts(torch.autograd.Function):
    # ctx: Any, since torch's class does not declare the attributes
    @staticmethod
    def forward(ctx: Any, constants: _Constants, *tensors: Any) -> Tensor:
        inputs = ExpertInputs(*tensors)
        buffers = allocate_buffers(inputs.x, inputs.weight1, len(constants.assignments.items))
        saved = _Saved.gather(constants.assignments, inputs.x, *buffers)
        sums = _forward(constants, inputs, saved)
        ctx.constants = constants
        ctx.save_for_backward(*inputs, *saved)
        return sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # read once: under gradient checkpointing, each access computes the forward again
        inputs, saved = ExpertInputs(*tensors[:6]), _Saved(*tensors[6:])
        needed = ctx.needs_input_grad[1:]
        with without_autocast(grad.device.type):
            # A batch of gradients cannot be written into buffers
            portable = torch.is_grad_enabled() or is_batch_of_gradients(grad)
            backward = _differentiable_backward if portable else _backward
            return None, *backward(ctx.constants, inputs, saved, grad, needed)


def _split(tensor: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    """Each expert's rows of a tensor that may be absent."""
    return (None,) * len(sizes) if tensor is None else tensor.split(sizes)


def _unbind(stack: Tensor | None, sizes: list[int]) -> tuple[Tensor | None, ...]:
    """Each expert's part of a stack (E, ...) that may be absent."""
    return (None,) * len(sizes) if stack is None else stack.unbind()


def _combine(outputs: Tensor, assignments: SortedAssignments, weights: Tensor | None) -> Tensor:
    """(A + 1, N, D), zeros at the end -> (T, N * D) sum over each item's experts, with weights (T, K) or without."""
    rows = outputs.flatten(1)
    if rows.shape[1] == 0:  # embedding_bag refuses items without tokens
        return rows.new_zeros(len(assignments.ranks), 0)
    # embedding_bag adds in the same order on every device and by all threads, unlike index_add_
    return F.embedding_bag(assignments.ranks, rows, mode="sum", per_sample_weights=weights)


def _forward_only(constants: _Constants, inputs: ExpertInputs) -> Tensor:
    """Sums (T, N * D), without saving anything for a backward pass."""
    x, assignments = inputs.x, constants.assignments
    outputs = x.new_empty(len(assignments.items) + 1, *x.shape[1:])
    return _forward(constants, inputs, _Saved.gather(assignments, x, None, outputs))


def _forward(constants: _Constants, inputs: ExpertInputs, saved: _Saved) -> Tensor:
    """Sums (T, N * D); fills the saved tensors."""
    x, combine_weights, weight1, bias1, weight2, bias2 = inputs
    assignments, activation, dropout = constants
    sizes = constants.sizes(x.shape[1])
    outputs = saved.outputs
    outputs[-1] = 0
    # The hidden features of one expert at a time. Without a backward pass the features before the activation take the
    # buffer first, and the activation is applied in place.
    width = weight2.shape[2] if saved.pre_activation is not None else weight1.shape[1]
    buffer = x.new_empty(max(sizes), width)
    dropped = (None,) * len(sizes) if dropout is None else dropout.sample(sizes, weight2.shape[2], x.device)
    for rows, pre_activation, expert_dropped, expert_outputs, w1, b1, w2, b2 in zip(
        saved.rows.split(sizes),
        _split(saved.pre_activation, sizes),
        dropped,
        outputs[:-1].flatten(0, 1).split(sizes),
        weight1.mT,
        _unbind(bias1, sizes),
        weight2.mT,
        _unbind(bias2, sizes),
        strict=True,
    ):
        hidden = buffer[: len(rows)]
        if pre_activation is None:
            pre_activation, (hidden, _) = hidden, activation.halves(hidden)
        _write_linear(rows, w1, b1, pre_activation)
        if expert_dropped is not None:
            mark_dropped(activation.halves(pre_activation)[0], expert_dropped)
        activation.write(pre_activation, hidden)
        # Dropout's scale is a factor of the product: no pass of its own over the hidden features
        _write_linear(hidden, w2, b2, expert_outputs, constants.scale)
    return _combine(outputs, assignments, combine_weights)


def _write_linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    if bias is None:
        torch.addmm(out, x, weight, beta=0, alpha=scale, out=out)
    else:
        torch.addmm(bias, x, weight, alpha=scale, out=out)


class _ExpertSlices(NamedTuple):
    """One expert's part of each tensor of the backward pass; None for absent tensors and gradients not needed."""

    grad_outputs: Tensor
    rows: Tensor
    pre_activation: Tensor
    weight1: Tensor
    weight2: Tensor
    grad_x: Tensor | None
    grad_weight1: Tensor | None
    grad_bias1: Tensor | None
    grad_weight2: Tensor | None
    grad_bias2: Tensor | None


def _backward(
    constants: _Constants, inputs: ExpertInputs, saved: _Saved, grad: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, given that of the sums; None where not needed, except for biases."""
    x, combine_weights, weight1, bias1, weight2, bias2 = inputs
    needs_x, needs_combine, needs_weight1, _, needs_weight2, _ = needed
    assignments, activation, _ = constants
    grad_outputs = grad.reshape(x.shape).index_select(0, assignments.items)
    grad_combine = _grad_combine(assignments, grad_outputs, saved.outputs, combine_weights) if needs_combine else None
    grad_outputs *= combine_weights.flatten().index_select(0, assignments.positions).view(-1, 1, 1)
    assert saved.pre_activation is not None
    sizes = constants.sizes(x.shape[1])
    grad_rows = torch.empty_like(saved.outputs) if needs_x else None
    grad_weight1 = torch.empty_like(weight1) if needs_weight1 else None
    grad_weight2 = torch.empty_like(weight2) if needs_weight2 else None
    grad_bias1, grad_bias2 = (None if bias is None else torch.empty_like(bias) for bias in (bias1, bias2))
    widths = (weight2.shape[2], weight2.shape[2], weight1.shape[1])
    buffers = [x.new_empty(max(sizes), width) for width in widths[: 2 if activation.gate is None else 3]]
    for slices in map(
        _ExpertSlices,
        grad_outputs.flatten(0, 1).split(sizes),
        saved.rows.split(sizes),
        saved.pre_activation.split(sizes),
        weight1.unbind(),
        weight2.unbind(),
        _split(None if grad_rows is None else grad_rows[:-1].flatten(0, 1), sizes),
        _unbind(grad_weight1, sizes),
        _unbind(grad_bias1, sizes),
        _unbind(grad_weight2, sizes),
        _unbind(grad_bias2, sizes),
    ):
        _expert_backward(constants, slices, *(buffer[: len(slices.rows)] for buffer in buffers))
    grad_x = None
    if grad_rows is not None:
        grad_rows[-1] = 0
        grad_x = _combine(grad_rows, assignments, None).view(x.shape)
    return grad_x, grad_combine, grad_weight1, grad_bias1, grad_weight2, grad_bias2


def _grad_combine(
    assignments: SortedAssignments, grad_outputs: Tensor, outputs: Tensor, combine_weights: Tensor
) -> Tensor:
    """(T, K): each assignment's output times the gradient of its item's sum; 0 for one that goes nowhere."""
    products = torch.linalg.vecdot(grad_outputs.flatten(1), outputs[:-1].flatten(1))
    grad_combine = products.new_zeros(combine_weights.numel()).index_copy_(0, assignments.positions, products)
    return grad_combine.view(combine_weights.shape)


def _expert_backward(
    constants: _Constants,
    slices: _ExpertSlices,
    hidden: Tensor,
    grad_hidden: Tensor,
    grad_pre_activation: Tensor | None = None,
) -> None:
    """Writes one expert's gradients; the buffers are (rows, H), (rows, H) and, with a gate, (rows, G)."""
    grad_outputs, rows, pre_activation, weight1, weight2, *grads = slices
    grad_x, grad_weight1, grad_bias1, grad_weight2, grad_bias2 = grads
    if grad_bias2 is not None:
        torch.sum(grad_outputs, 0, out=grad_bias2)
    _write_linear(grad_outputs, weight2, None, grad_hidden, constants.scale)
    if grad_pre_activation is None:
        grad_pre_activation = grad_hidden
    constants.activation.write_gradient(
        pre_activation, grad_hidden, hidden, grad_pre_activation, needs_hidden=grad_weight2 is not None
    )
    if grad_weight2 is not None:
        _write_linear(grad_outputs.t(), hidden, None, grad_weight2, constants.scale)
    if grad_bias1 is not None:
        torch.sum(grad_pre_activation, 0, out=grad_bias1)
    if grad_weight1 is not None:
        _write_linear(grad_pre_activation.t(), rows, None, grad_weight1)
    if grad_x is not None:
        _write_linear(grad_pre_activation, weight1, None, grad_x)


def _differentiable_backward(
    constants: _Constants, inputs: ExpertInputs, saved: _Saved, grad: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """As `_backward`, but by operations with batching rules and gradients of their own, for second derivatives."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, because one input may be computed from another, and autograd has to stop at each of them
        views = ExpertInputs._make(None if tensor is None else tensor.view_as(tensor) for tensor in inputs)
        wanted = [view for view, need in zip(views, needed, strict=True) if view is not None and need]
        sums = _forward_by_autograd(constants, views, saved)
    gradients = iter(torch.autograd.grad(sums, wanted, grad, create_graph=create_graph))
    return tuple(next(gradients) if need else None for need in needed)


def _forward_by_autograd(constants: _Constants, inputs: ExpertInputs, saved: _Saved) -> Tensor:
    """The sums again, by operations that autograd supports."""
    x, combine_weights, weight1, bias1, weight2, bias2 = inputs
    sizes = constants.sizes(x.shape[1])
    outputs = []
    for rows, pre_activation, w1, b1, w2, b2 in zip(
        x.index_select(0, constants.assignments.items).flatten(0, 1).split(sizes),
        _split(saved.pre_activation, sizes),
        weight1,
        _unbind(bias1, sizes),
        weight2,
        _unbind(bias2, sizes),
        strict=True,
    ):
        hidden = constants.activation(F.linear(rows, w1, b1))
        if constants.scale != 1:
            is_dropped = constants.activation.halves(pre_activation)[0] == DROPPED
            hidden = hidden.masked_fill(is_dropped, 0) * constants.scale
        outputs.append(F.linear(hidden, w2, b2))
    outputs.append(x.new_zeros(x.shape[1:]))
    chosen = torch.cat(outputs).view(-1, *x.shape[1:])[constants.assignments.ranks]
    return (chosen * combine_weights[..., None, None]).sum(1).flatten(1)


# ---- torch.compile ----
# No program can be traced through the experts' counts, which depend on values. Compiled programs therefore call the
# functions above as operators. Their buffers are for all T * K assignments, since shapes may not depend on counts. The
# first operator hands the order on to the second, with the counts on the host, so that only one waits for the device.

# A CUDA graph cannot contain the operators, because the counts are copied to the host
_TAGS = (torch.Tag.cudagraph_unsafe,)


def compiled_experts(inputs: ExpertInputs, expert_indices: Tensor, activation: SortedActivation, drop: float) -> Tensor:
    """Same as `sorted_experts`, for torch.compile, and differentiable once."""
    seed = _draw_seed(torch.device("cpu")) if drop > 0 else None
    sums, *_ = _sorted_experts(*inputs, expert_indices, seed, drop, *activation, gradients_needed(inputs))
    return sums.view(inputs.x.shape)


# An operator of its own: a checkpointed block repeats it with the generator's saved state and so drops the same
# features. torch saves the state for the device among the arguments. The tag keeps two calls from becoming one.
@torch.library.custom_op("timm_moe_dg::draw_seed", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _draw_seed(device: torch.device) -> Tensor:
    return draw_seed()


@_draw_seed.register_fake
def _(device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


# Optional instead of |: torch reads the operators' schemas from these annotations
@torch.library.custom_op("timm_moe_dg::sorted_experts", mutates_args=(), tags=_TAGS)
def _sorted_experts(
    x: Tensor,
    combine_weights: Tensor,
    weight1: Tensor,
    bias1: Optional[Tensor],  # noqa: UP045
    weight2: Tensor,
    bias2: Optional[Tensor],  # noqa: UP045
    expert_indices: Tensor,
    seed: Optional[Tensor],  # noqa: UP045
    drop: float,
    function: str,
    approximate: str,
    gate: Optional[int],  # noqa: UP045
    save: bool,
) -> list[Tensor]:
    """Sums (T, N * D). If `save`, also `allocate_buffers` for T * K assignments, filled; order, ranks and counts."""
    with without_autocast(x.device.type):
        inputs = ExpertInputs(x, combine_weights, weight1, bias1, weight2, bias2)
        activation = SortedActivation(function, approximate, gate)
        assignments = sort_assignments(expert_indices, len(weight1))
        constants, inputs = _prepare(inputs, assignments, seed, drop, activation)
        if not save:
            return [_forward_only(constants, inputs)]
        buffers = allocate_buffers(x, weight1, expert_indices.numel())
        sums = _forward(constants, inputs, _Saved.gather(assignments, x, *buffers))
        return [sums, *buffers, assignments.order, assignments.ranks, torch.tensor(assignments.counts)]


@_sorted_experts.register_fake
def _(x: Tensor, combine_weights: Tensor, weight1: Tensor, *rest: Any) -> list[Tensor]:
    expert_indices, save = rest[3], rest[-1]
    sums = x.new_empty(x.shape[0], x.shape[1] * x.shape[2])
    if not save:
        return [sums]
    order, ranks = expert_indices.new_empty(expert_indices.numel()), torch.empty_like(expert_indices)
    counts = torch.empty(weight1.shape[0], dtype=torch.int64, device="cpu")
    return [sums, *allocate_buffers(x, weight1, expert_indices.numel()), order, ranks, counts]


@torch.library.custom_op("timm_moe_dg::sorted_experts_backward", mutates_args=(), tags=_TAGS)
def _sorted_experts_backward(
    grad: Tensor,
    x: Tensor,
    combine_weights: Tensor,
    weight1: Tensor,
    bias1: Optional[Tensor],  # noqa: UP045
    weight2: Tensor,
    bias2: Optional[Tensor],  # noqa: UP045
    seed: Optional[Tensor],  # noqa: UP045
    pre_activation: Tensor,
    outputs: Tensor,
    order: Tensor,
    ranks: Tensor,
    counts: Tensor,
    drop: float,
    function: str,
    approximate: str,
    gate: Optional[int],  # noqa: UP045
    needed: list[bool],
) -> list[Tensor]:
    """Gradients of the inputs in their order; without elements where not needed."""
    with without_autocast(x.device.type):
        inputs = ExpertInputs(x, combine_weights, weight1, bias1, weight2, bias2)
        activation = SortedActivation(function, approximate, gate)
        assignments = SortedAssignments.of(order, counts.tolist(), ranks)
        constants, inputs = _prepare(inputs, assignments, seed, drop, activation)
        saved = _Saved.gather(constants.assignments, x, pre_activation, outputs)
        gradients = _backward(constants, inputs, saved, grad, tuple(needed))
    return [
        grad.new_empty(0) if gradient is None or not need else gradient.contiguous()
        for gradient, need in zip(gradients, needed, strict=True)
    ]


@_sorted_experts_backward.register_fake
def _(grad: Tensor, *rest: Any) -> list[Tensor]:
    inputs, needed = rest[:6], rest[-1]
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if need else grad.new_empty(0)
        for tensor, need in zip(inputs, needed, strict=True)
    ]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, _, seed, drop, function, approximate, gate, _ = inputs
    ctx.options = (drop, function, approximate, gate)
    ctx.save_for_backward(*tensors, seed, *output[1:])
    ctx.set_materialize_grads(False)


def _compiled_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Tensor | None, ...]:
    needed = list(ctx.needs_input_grad[:6])
    assert grads[0] is not None
    gradients = _sorted_experts_backward(grads[0].contiguous(), *ctx.saved_tensors, *ctx.options, needed)
    return *(gradient if need else None for gradient, need in zip(gradients, needed, strict=True)), *[None] * 7


_sorted_experts.register_autograd(_compiled_backward, setup_context=_setup_context)
