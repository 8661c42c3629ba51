"""Routers choose the experts of each item and the weights of their outputs.

A router computes the logits of an item. Its options are the same for all routers: `scores` turns logits into scores,
`choice` chooses experts by scores, and `bias_speed` balances a choice by tokens. See `Router`. The file routers.py has
those that can be chosen by name.

Axes: T items (tokens, or images in MoGE), D features, E experts, K experts per item (top_k).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import RouterError, choices
from .compat import in_backward
from .parameters import OwnParameters, upcast, without_autocast
from .reports import BALANCING_LOSSES, RouterOutput, count_assignments

SCORES = ("softmax", "sigmoid")
CHOICES = ("token", "expert", "threshold")
UNSET_THRESHOLD = 2.0  # above all scores; infinity would stay in exponential averages of a network


def top_k_indices(scores: Tensor, top_k: int) -> Tensor:
    """(T, E) scores -> (T, K) int64 indices of the K largest, best first; the lowest index wins a tie."""
    # Not torch.topk, which leaves the order of ties open. argmax is exported by every exporter.
    picked = [scores.argmax(dim=-1, keepdim=True)]
    for _ in range(top_k - 1):
        scores = scores.scatter(-1, picked[-1], -float("inf"))
        picked.append(scores.argmax(dim=-1, keepdim=True))
    return torch.cat(picked, dim=-1)


def experts_choice(scores: Tensor, top_k: int, valid: Tensor | None = None) -> Tensor:
    """(T, E) scores -> (T, E) bool: each expert takes the max(1, floor(K T / E)) items with its largest scores.

    The lowest index wins a tie. `valid` (T,) is False for items that are left out.
    """
    num_items, num_experts = scores.shape
    if valid is None:
        valid = torch.ones_like(scores[:, 0], dtype=torch.bool)
    order_TE = scores.masked_fill(~valid.unsqueeze(1), -1.0).argsort(dim=0, descending=True, stable=True)
    places_TE = torch.arange(num_items, device=scores.device).unsqueeze(1).expand_as(order_TE)
    ranks_TE = torch.empty_like(order_TE).scatter(0, order_TE, places_TE)
    taken = (valid.sum() * top_k // num_experts).clamp(min=1)  # a tensor, since to read it would wait for a device
    return (ranks_TE < taken) & valid.unsqueeze(1)


class Router(OwnParameters):
    """Noisy top-k routing. Subclasses implement `compute_logits` and `reset_parameters`, and set `undecayed`.

    A subclass may bring its own `loss`, and an `after_step` that moves state without gradients, such as a bias of the
    logits. That state is a buffer. Class attribute `expert_rows`: names of the weights that have a row for each expert,
    for averages of networks.

    `choice` is one of three:

    - "token": each token takes the K experts with the largest scores. With a `bias_speed` above 0, expert e is chosen
      by its score plus a bias b_e, and weighted by the score alone (DeepSeek-V3, arXiv:2412.19437, equations 12 to 16).
      `after_step` adds bias_speed (d_e - mean d) to b_e, with d_e = sign(mean tokens of an expert - tokens of e). To
      subtract the mean is torchtitan's form, and the paper adds bias_speed d_e. The paper has sigmoid scores.
    - "expert": in training each expert takes the max(1, floor(K T / E)) tokens with its largest scores, over all tokens
      of a forward (Zhou et al., 2022, arXiv:2202.09368, section 3.2). A token may get no expert, and leaves the layer
      with 0. In evaluation, tokens choose as above, so no prediction depends on its batch. The paper has raw
      softmax scores as weights (`normalize_weights=False`), and no evaluation by tokens.
    - "threshold": each token takes all experts whose score exceeds the expert's threshold, or else its best one (Expert
      Threshold routing, arXiv:2603.11535, from its abstract). The threshold of an expert is an exponential average of
      the smallest score that expert choice would take: K experts per token on average. It is estimated without noise,
      in `after_step`, from the mean over the parts and processes of a step. Before the first step, each token takes
      one expert. The decay, that fallback and that beginning are ours.

    The last two, and the bias, balance experts by themselves, and their `loss` is 0.

    Args:
        num_experts: E.
        top_k: K, 1 to E.
        normalize_weights: Scale the combine weights of an item to sum 1; otherwise they are the raw scores.
        noise_std: Standard deviation of the Gaussian noise on the logits in training; None means 1/E
            (GMoE, appendix C.3), 0 means none.
        scores: "softmax" over the experts, or "sigmoid" of each logit (DeepSeek-V3, equation 15). The routing mass
            of an item is its scores, scaled to sum 1.
        choice: "token", "expert" or "threshold".
        bias_speed: Step of the bias, such as 0.001; 0 for no bias.
        threshold_decay: Share of a threshold that a step keeps.
        device: Of the buffers.

    >>> timm_moe_dg.layers.CosineRouter(8, num_experts=4, top_k=1)(torch.randn(5, 8)).combine_weights.shape
    torch.Size([5, 1])
    """

    expert_rows: ClassVar[tuple[str, ...]] = ()
    # Buffers, None if not used, and their initial values
    expert_state: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"expert_bias": 0.0, "expert_thresholds": UNSET_THRESHOLD}
    )
    expert_bias: Tensor | None
    expert_thresholds: Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        normalize_weights: bool = True,
        noise_std: float | None = None,
        *,
        scores: str = "softmax",
        choice: str = "token",
        bias_speed: float = 0.0,
        threshold_decay: float = 0.99,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(top_k, int) or not 1 <= top_k <= num_experts:
            raise RouterError.of("top_k", top_k, f"choose 1 to num_experts={num_experts}")
        if noise_std is not None and noise_std < 0:
            raise RouterError.of("router_noise", noise_std, "give a standard deviation of 0 or more, or None for 1/E")
        for name, value, names in (("scores", scores, SCORES), ("choice", choice, CHOICES)):
            if value not in names:
                raise RouterError.of(name, value, choices(names))
        if bias_speed < 0 or (bias_speed and choice != "token"):
            remedy = "give 0 or more" if bias_speed < 0 else f"choice={choice!r} balances experts without; leave it 0"
            raise RouterError.of("bias_speed", bias_speed, remedy)
        if not 0 <= threshold_decay < 1:
            raise RouterError.of("threshold_decay", threshold_decay, "give a share from 0 to below 1")
        self.num_experts = num_experts
        self.top_k = top_k
        self.scores = scores
        self.choice = choice
        self.bias_speed = bias_speed
        self.threshold_decay = threshold_decay
        self.normalize_weights = normalize_weights
        self.noise_std = float(1.0 / num_experts if noise_std is None else noise_std)
        self.loss_form = "vmoe"
        self.frozen = False
        # Since the last `after_step`. No buffer: DDP would overwrite it by that of the first process in each forward
        self.expert_counts = torch.zeros(num_experts, dtype=torch.int64)
        state: dict[str, Any] = {"device": device, "dtype": torch.float32}
        self.register_buffer("expert_bias", torch.empty(num_experts, **state) if bias_speed else None)
        has_thresholds = choice == "threshold"
        self.register_buffer("expert_thresholds", torch.empty(num_experts, **state) if has_thresholds else None)
        # Of the forwards since the last `after_step`: sum of the thresholds that they ask for (E,), and their number
        self.threshold_sums = torch.zeros(num_experts + 1) if has_thresholds else None
        self.reset_state()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Leaves bias and thresholds in float32 in a network of half precision, which would round small steps away."""
        state = {name: buffer for name in self.expert_state if (buffer := getattr(self, name)) is not None}
        super()._apply(fn, recurse)
        for name, before in state.items():
            if (after := getattr(self, name)).dtype.itemsize < 4:
                setattr(self, name, before.to(after.device))
        return self

    def reset_state(self) -> None:
        """Bias 0, and thresholds that no score exceeds; for `reset_parameters` of subclasses."""
        for name, value in self.expert_state.items():
            if (buffer := getattr(self, name)) is not None:
                nn.init.constant_(buffer, value)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) features in float32 or better -> (T, E) logits."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute_logits")

    def score(self, logits: Tensor) -> Tensor:
        """(T, E) logits -> (T, E) scores from 0 to 1."""
        return logits.sigmoid() if self.scores == "sigmoid" else logits.softmax(dim=-1)

    def importance(self, logits: Tensor) -> Tensor:
        """(T, E) logits without noise -> (T, E) routing mass: the scores of all experts, with sum 1."""
        # In logarithms, since small sigmoids underflow
        return F.logsigmoid(logits).softmax(dim=-1) if self.scores == "sigmoid" else self.score(logits)

    def loss(self, routing: RouterOutput) -> Tensor:
        """Auxiliary loss of the last training forward, a scalar: by default the `loss_form` 'vmoe' or 'tutel'."""
        if self.bias_speed or self.choice != "token":
            return routing.logits.new_zeros(())
        return BALANCING_LOSSES[self.loss_form](routing)

    def freeze(self) -> Self:
        """Freezes the weights, the bias and the thresholds."""
        self.frozen = True
        return self.requires_grad_(False)

    def has_after_step(self) -> bool:
        """Whether `after_step` has something to do."""
        moves = self.expert_bias is not None or self.expert_thresholds is not None
        return not self.frozen and (moves or type(self).after_step is not Router.after_step)

    def after_step(self) -> None:
        """Updates buffers after a step of the optimizer: bias and thresholds. `layers.after_step` calls it.

        `expert_counts` (E,) int64 then has the number of each expert's items in the training forwards since the last
        call, in all parts of an accumulated batch and in all processes.
        """
        if self.expert_bias is not None:
            counts = self.expert_counts.to(self.expert_bias)
            directions = (counts.mean() - counts).sign()
            self.expert_bias += self.bias_speed * (directions - directions.mean())
        if self.expert_thresholds is not None and self.threshold_sums is not None:
            sums, before = self.threshold_sums.to(self.expert_thresholds), self.expert_thresholds
            reached = sums[:-1] / sums[-1]
            moved = torch.where(before > 1, reached, before.lerp(reached, 1 - self.threshold_decay))
            before.copy_(torch.where(sums[-1] > 0, moved, before))  # a step without forwards moves nothing

    def reset_counts(self) -> None:
        """Empties what was counted since the last call."""
        self.expert_counts = torch.zeros_like(self.expert_counts)
        if self.threshold_sums is not None:
            self.threshold_sums = torch.zeros_like(self.threshold_sums)

    @torch.no_grad()
    def count(self, routing: RouterOutput) -> None:
        """Adds a training forward to `expert_counts`, for routers that have an `after_step`."""
        # Gradient checkpointing repeats forwards in the backward pass
        if not self.training or not self.has_after_step() or in_backward():
            return
        self.expert_counts = self.expert_counts.to(routing.logits.device) + count_assignments(routing)
        if self.threshold_sums is not None and len(routing.logits):
            scores = self.score(routing.logits)
            taken = experts_choice(scores, self.top_k, routing.routed)
            # 1 is the largest score: what a forward without valid items asks for
            asked = F.pad(scores.masked_fill(~taken, 1.0).amin(0), (0, 1), value=1.0)
            self.threshold_sums = self.threshold_sums.to(asked.device) + asked

    def forward(self, x: Tensor, valid: Tensor | None = None) -> RouterOutput:
        """(T, D) features -> the routing of T items, computed in float32 or better.

        `valid` (T,) is False for items that are not routed.
        """
        # Without autocast: logits rounded to bfloat16 would route items to other experts
        with without_autocast(x.device.type):
            return self._route(self.compute_logits(upcast(x)), valid)

    def _route(self, logits: Tensor, valid: Tensor | None) -> RouterOutput:
        noise_std = self.noise_std if self.training else 0.0
        noisy_logits = logits + torch.randn_like(logits) * noise_std if noise_std > 0 else logits
        scores = self.score(noisy_logits)
        dropped = None
        if self.choice == "threshold" or (self.choice == "expert" and self.training):
            chosen = self._chosen(scores, valid)
            expert_indices = top_k_indices(scores.masked_fill(~chosen, -1.0), self.num_experts)
            dropped = ~chosen.gather(-1, expert_indices)
            combine_weights = scores.gather(-1, expert_indices).masked_fill(dropped, 0.0)
        else:
            biased = scores if self.expert_bias is None else scores + self.expert_bias.to(scores.dtype)
            expert_indices = top_k_indices(biased, self.top_k)
            combine_weights = scores.gather(-1, expert_indices)
        if self.normalize_weights and self.scores == "sigmoid":
            # As below, in logarithms, since small sigmoids underflow. An item without experts has weights of 0
            logs = F.logsigmoid(noisy_logits).gather(-1, expert_indices)
            logs = logs if dropped is None else logs.masked_fill(dropped, -torch.inf)
            combine_weights = logs.softmax(dim=-1).nan_to_num()
        elif self.normalize_weights:
            # The bound is for items without experts
            combine_weights = combine_weights / combine_weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        mass = self.importance(logits)
        return RouterOutput(logits, noisy_logits, mass, expert_indices, combine_weights, noise_std, dropped, valid)

    def _chosen(self, scores: Tensor, valid: Tensor | None) -> Tensor:
        """(T, E) scores -> (T, E) bool, the experts of each item."""
        if self.expert_thresholds is None:
            return experts_choice(scores, self.top_k, valid)
        best = torch.zeros_like(scores).scatter(-1, scores.argmax(dim=-1, keepdim=True), 1.0) > 0
        exceeding = scores > self.expert_thresholds.to(scores.dtype)
        return exceeding | (best & ~exceeding.any(dim=-1, keepdim=True))
