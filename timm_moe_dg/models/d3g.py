"""D3G, the baseline with a head for each training domain (Yao et al., 2024; MoGE, table 1).

The form is that of Crasto (2025), whose D3G+WRAP is the other row of the table. A prediction is the mean of the heads'
logits, weighted by the relations of the image's place to their domains. In training, an image's own head predicts, and
the mean of the other heads has a loss of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from ..compat import update_model_args
from ..errors import ArgumentError
from ..layers.encoders.metadata import MetadataEncoder
from ..layers.heads import DomainHeads, DomainRelations
from ..layers.mixture_options import take_options
from ..layers.own_parameters import undecayed_parameters
from ..layers.precision import upcast
from ..layers.reports import LossWeights, ReportedLoss
from .building import check_complete, create_moe_vit, deit_cfg, fit_dense
from .gmoe import check_vit_options

default_cfgs = generate_default_cfgs({"d3g_tiny_patch16.deit_in1k": deit_cfg("tiny")})


@dataclass(frozen=True, kw_only=True)
class DomainHeadOptions:
    """Options of `DomainHeadsVisionTransformer`."""

    num_domains: int = 5  # training domains, each with a head
    relation_beta: float = 0.8  # weight of the fixed relation beside the learned one
    relation_query: str = "domain"  # or 'wrap' to learn relations from the coordinates (D3G+WRAP)
    consistency_coef: float = 0.5  # weight of the loss of the other heads
    index_points: int = 0  # size of the index of training coordinates that comes with the weights

    def __post_init__(self) -> None:
        if self.num_domains < 2:
            raise ArgumentError.of("num_domains", self.num_domains, "D3G needs at least two training domains")


class DomainHeadsVisionTransformer(VisionTransformer):
    """Vision transformer with a classifier for each training domain.

    For an image without metadata, all heads count alike. `forward_features` takes the image alone, `forward_head` the
    metadata. Arguments are those of timm's VisionTransformer and options of `DomainHeadOptions`.
    """

    option_classes: ClassVar[tuple[type, ...]] = (DomainHeadOptions,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = take_options(DomainHeadOptions, kwargs)
        check_vit_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        relations = DomainRelations(
            options.num_domains,
            options.index_points,
            beta=options.relation_beta,
            query=options.relation_query,
            device=kwargs.get("device"),
            dtype=kwargs.get("dtype"),
        )
        self.num_domains, self.consistency_coef = options.num_domains, options.consistency_coef
        self.metadata_encoder = MetadataEncoder(relations)
        self.head: Any  # timm declares a linear layer
        self.other_logits: Tensor | None = None  # of the last forward in training
        self.reset_classifier(self.num_classes)

    def no_weight_decay(self) -> set[str]:
        """Names timm's parameters without weight decay, and the heads' biases."""
        return super().no_weight_decay() | undecayed_parameters(self)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces all heads."""
        super().reset_classifier(num_classes, global_pool)
        if num_classes:
            weight = self.patch_embed.proj.weight
            sizes = (self.num_features, self.num_domains, num_classes)
            self.head = DomainHeads(*sizes, device=weight.device, dtype=weight.dtype)

    def set_domains(self, lonlat: Sequence[Tensor]) -> None:
        """Makes the index that finds the domain of a place from the (N, 2) training coordinates of each domain."""
        if len(lonlat) != self.num_domains:
            remedy = f"the run has {len(lonlat)} training domains; give --model-kwargs num_domains={len(lonlat)}"
            raise ArgumentError.of("num_domains", self.num_domains, remedy)
        update_model_args(self, index_points=self.metadata_encoder.encoder.set_domains(lonlat))

    def forward_head(self, x: Tensor, pre_logits: bool = False, metadata: Tensor | None = None) -> Tensor:
        """Pools (B, N, D) features and weights the heads by the relations of the metadata, or None.

        Metadata are (B, 2) longitude and latitude, and in training (B, 3) with the number of the image's domain.
        Returns (B, num_classes) logits, or with `pre_logits` the (B, D) classifier inputs. Without pooling, both keep
        N.
        """
        x = super().forward_head(x, pre_logits=True)
        if pre_logits or not self.num_classes:
            return x
        logits = self.head(x)
        encoded, present = self.metadata_encoder(x, metadata)
        known = present.unsqueeze(1)
        if self.global_pool == "":
            encoded, known = encoded.unsqueeze(1), known.unsqueeze(1)
        relations, own = encoded.chunk(2, dim=-1)
        if not self.training:
            return self._mean(logits, torch.where(known, relations, 1.0))
        self.other_logits = self._mean(logits, torch.where(known, relations * (1 - own), 1.0))
        return self._mean(logits, torch.where(known, own, 1.0))

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        """Returns the cross-entropy of the heads of other domains (D3G, equation 3)."""
        logits, self.other_logits = self.other_logits, None  # the next forward must not find an old graph
        if logits is None:
            return {}
        return {"consistency_loss": ReportedLoss(F.cross_entropy(upcast(logits), targets), self.consistency_coef)}

    def _mean(self, logits: Tensor, weights: Tensor) -> Tensor:
        """(..., M, C) and (..., M) -> (..., C)."""
        return (logits * weights.unsqueeze(-1)).sum(-2) / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor, metadata: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, height, width) images and their metadata -> (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x), metadata=metadata)


def _filter_fn(state_dict: dict[str, Tensor], model: DomainHeadsVisionTransformer) -> dict[str, Tensor]:
    """Fits a checkpoint to the model; every head starts as a copy of a dense classifier."""
    loaded = fit_dense(state_dict, model, ("metadata_encoder.",))
    for name, dims in (("head.weight", 2), ("head.bias", 1)):
        if name in loaded and loaded[name].ndim == dims:
            loaded[name] = torch.stack([loaded[name]] * model.num_domains, dim=1)
    check_complete(loaded, model)
    return loaded


@register_model
def d3g_tiny_patch16(pretrained: bool = False, **kwargs: Any) -> DomainHeadsVisionTransformer:
    """DeiT-Ti/16 with five heads, a baseline of moge_tiny. Options are those of `DomainHeadsVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return create_moe_vit(DomainHeadsVisionTransformer, "d3g_tiny_patch16", pretrained, _filter_fn, **model_args)
