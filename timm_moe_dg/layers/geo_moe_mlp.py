"""MoGE feed-forward layer: a shared expert and experts that are routed by metadata.

Axes: B images, N tokens per image, D features, E routed experts, K experts per image, R metadata embedding.
"""

from typing import Any, NamedTuple, Self

import torch
from timm.layers import Mlp
from timm.models import register_notrace_module
from torch import Tensor, nn

from ..errors import MetadataError, RouterError
from .compat import assert_async, values_readable
from .experts import StackedExperts
from .feed_forwards import GatedActivation, read_feed_forward
from .mixture_options import GeoMixtureOptions, build_options
from .moe_mlp import RoutedMlp, combined_rate
from .reports import LossWeights, ReportedLoss, cka_diversity_loss, discovered_domains, supcon_invariance_loss
from .routers import MetadataRouter


class ExpertReport(NamedTuple):
    """Outputs of a training forward, for the losses that compare experts."""

    shared: Tensor | None  # (B, D) output for the first token (a ViT's class token), or None without a shared expert
    forced: Tensor | None  # (E, T, D) outputs of the routed experts for T random tokens, or None with `forced_tokens` 0


@register_notrace_module
class GeoMoeMlp(RoutedMlp):
    """f(x, m) = g f_0(x) + (1 - g) sum_k alpha_k(phi(m)) f_k(x), g = sigmoid(gamma) (MoGE, equation 1).

    The routing is per image: all its tokens visit the same K experts. An image without metadata gets f_0(x) alone
    (MoGE, section 2.2, invariant fallback). With `shared_expert=False` the layer is the routed sum alone (MoGE, Figures
    2c and 3), and an image without metadata is an error.

    Takes timm's `Mlp` arguments, so that it can be a block's `mlp_layer`. Each forward in training replaces `report`.
    For that report, `forced_tokens` random tokens of the batch visit all experts (token forcing, section 2.1 B); 0 for
    none.

    Args:
        in_features: D.
        hidden_features: Hidden width of each expert; None means `in_features`.
        norm_layer: Normalization of the hidden features, one for the routed experts and one for the shared.
        bias: Whether the experts' layers have biases; a pair sets them apart.
        drop: timm's projection dropout: after the activation and after the layer, in training.
        context_features: R.
        options: All options of the mixture, in place of single ones.
        **mixture: Single options of `GeoMixtureOptions`: `num_experts`, `top_k`, `shared_expert`, ...
    """

    router: MetadataRouter

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer: type[nn.Module] | None = None,
        bias: bool | tuple[bool, bool] = True,
        drop: float = 0.0,
        context_features: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        options: GeoMixtureOptions | None = None,
        **mixture: Any,
    ) -> None:
        options = options or build_options(GeoMixtureOptions, mixture, type(self).__name__)
        hidden_features = hidden_features or in_features
        layers: dict[str, Any] = {"act_layer": act_layer, "norm_layer": norm_layer, "bias": bias}
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        further: dict[str, Any] = {"hidden_drop": combined_rate(drop, options.expert_drop), **layers, **dd}
        super().__init__(StackedExperts(options.num_experts, in_features, hidden_features, **further))
        self.options: GeoMixtureOptions = options
        # The shared expert has no second dropout: the layer's own acts once, behind the sum
        has_shared = options.shared_expert
        self.shared = Mlp(in_features, hidden_features, **layers, drop=(drop, 0.0), **dd) if has_shared else None
        routed = context_features, options.num_experts, options.top_k
        self.router = MetadataRouter(*routed, noise_std=options.router_noise, **dd)
        self.gamma = nn.Parameter(torch.zeros(1, **dd)) if has_shared else None
        self.drop = nn.Dropout(drop)
        self.shared_only = False
        self.forced_expert: int | None = None
        self.forced_tokens = 0
        self.report: ExpertReport | None = None

    @classmethod
    def from_dense(
        cls, mlp: nn.Module, context_features: int = 256, options: GeoMixtureOptions | None = None, **mixture: Any
    ) -> Self:
        """Upcycles a dense feed-forward: it becomes the shared expert, and every routed expert starts as a copy of it.

        The other arguments are those of the layer. `expert_drop` acts besides that of `mlp`. The evaluation output
        equals the dense one, unless `expert_perturbation` is above 0. A feed-forward that takes features first or
        normalizes its input is a `RouterError`, as are those that `read_feed_forward` refuses.
        """
        dense = read_feed_forward(mlp)
        if dense.channels_first or not isinstance(dense.pre_norm, nn.Identity):
            remedy = "give a feed-forward of tokens, features last, without a normalization of its input"
            raise RouterError.of("mlp", type(mlp).__name__, remedy)
        first, second = dense.weights()
        options = options or build_options(GeoMixtureOptions, mixture, cls.__name__)
        features, hidden = second.shape
        dd: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
        moe = cls(features, hidden, context_features=context_features, options=options, **dd)
        moe.experts = StackedExperts(
            options.num_experts,
            features,
            hidden,
            act_layer=nn.Identity,
            bias=(dense.first[0].bias is not None, dense.second.bias is not None),
            hidden_drop=combined_rate(dense.hidden_drop, options.expert_drop),
            gated=isinstance(dense.act, GatedActivation),
            **dd,
        )
        moe.experts.load_dense(dense, options.expert_perturbation)
        moe.take_shared(mlp)
        moe.drop.p = dense.drop
        return moe.train(mlp.training)

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the router's loss, and MoGE's diversity and invariance losses (equations 2 to 4)."""
        losses = super().training_losses(targets, weights)
        if self.report is None or self.routing is None:
            return losses
        if self.report.forced is not None:
            losses["cka_loss"] = ReportedLoss(cka_diversity_loss(self.report.forced), weights.cka_coef, "mean")
        if self.report.shared is not None:
            domains = discovered_domains(self.routing)
            supcon = supcon_invariance_loss(self.report.shared, targets, domains, weights.supcon_temperature)
            losses["supcon_loss"] = ReportedLoss(supcon, weights.supcon_coef, "last")
        return losses

    def __getstate__(self) -> dict[str, object]:
        return dict(super().__getstate__(), report=None)  # belongs to a graph, as the recorded routing does

    def set_expert_mode(self, mode: str | int) -> None:
        """Sets which experts compute: 'routed' by metadata, 'shared' alone, or a routed expert by its index."""
        num_experts = self.experts.num_experts
        index = mode if isinstance(mode, int) and not isinstance(mode, bool) else None
        if mode not in ("routed", "shared") and (index is None or not 0 <= index < num_experts):
            raise RouterError.of("expert mode", mode, f"choose 'routed', 'shared' or an index 0..{num_experts - 1}")
        if mode == "shared" and self.shared is None:
            remedy = "shared_expert=False leaves none; choose 'routed' or an expert's index"
            raise RouterError.of("expert mode", mode, remedy)
        self.shared_only = mode == "shared"
        self.forced_expert = index

    def forward(self, x: Tensor, context: Tensor, present: Tensor) -> Tensor:
        """Mixes the shared and the routed experts: (B, N, D) tokens and (B, R) metadata embedding -> (B, N, D).

        `present` (B,) is False for images without metadata.
        """
        routing = self.router(context)
        expert_indices, combine_weights = routing.expert_indices, routing.combine_weights
        if self.forced_expert is not None:
            present = torch.ones_like(present)
            expert_indices = torch.full_like(expert_indices[:, :1], self.forced_expert)
            combine_weights = torch.ones_like(combine_weights[:, :1])
        if self.shared_only:
            present = torch.zeros_like(present)
        if self.shared is None:
            self._require_metadata(present)
        # Index E is no expert: its assignments are skipped
        expert_indices = expert_indices.masked_fill(~present.unsqueeze(1), self.experts.num_experts)
        output = self.experts(x, expert_indices, combine_weights)
        self.record(routing._replace(routed=present))
        shared = None
        if self.shared is not None and self.gamma is not None:
            shared = self.shared(x)
            gate = self.gamma.sigmoid().where(present, torch.ones_like(self.gamma)).view(-1, 1, 1)
            output = gate * shared + (1.0 - gate) * output
        if self.training:
            self._report(x, shared)
        return self.drop(output)

    def _require_metadata(self, present: Tensor) -> None:
        """Refuses images without metadata, unless a program is being recorded or values cannot be read."""
        if not values_readable(present):
            return
        if present.device.type != "cpu":  # ends the program without a wait for the device
            assert_async(present.all(), "images without metadata, and shared_expert=False")
        elif not present.all():
            samples = (~present).nonzero().flatten().tolist()
            remedy = (
                "have none, and shared_expert=False leaves none for them; leave them out, or keep the shared expert"
            )
            raise MetadataError.of("metadata of samples", samples, remedy)

    def _report(self, x: Tensor, shared: Tensor | None) -> None:
        forced = None
        if self.forced_tokens > 0:
            tokens = x.flatten(0, 1)
            chosen = torch.randperm(len(tokens), device=x.device)[: self.forced_tokens]
            forced = self.experts.forward_all(tokens[chosen])
        self.report = ExpertReport(None if shared is None else shared[:, 0], forced)


def answers_without_metadata(network: nn.Module) -> bool:
    """Whether all metadata-routed layers of a network have a shared expert, which answers for unknown metadata."""
    return all(layer.shared is not None for layer in network.modules() if isinstance(layer, GeoMoeMlp))
