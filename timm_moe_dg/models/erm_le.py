"""ERM+LE, the baseline that concatenates a location encoding to the features, before a two-layer classifier.

MoGE, table 1, after Yao et al., 2024. The comparison shows the gain of routing by location over knowing the location.
"""

from typing import Any, ClassVar

import torch
from timm.models import generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..layers.mixture_options import build_options, take_options
from .building import check_complete, create_moe_vit, deit_cfg, fit_dense
from .gmoe import check_vit_options
from .metadata_options import MetadataOptions
from .upcycling import check_plain, record_change

default_cfgs = generate_default_cfgs({"erm_le_tiny_patch16.deit_in1k": deit_cfg("tiny")})


class LocationVisionTransformer(VisionTransformer):
    """Vision transformer with logits = head(gelu(fuse([feature, phi(metadata)]))).

    For images without metadata phi is zero. `forward_features` takes the image alone, `forward_head` the metadata.
    Arguments are those of timm's VisionTransformer and options of `timm_moe_dg.models.MetadataOptions`.

    >>> model = timm.create_model("erm_le_tiny_patch16", num_classes=62).eval()
    >>> model(torch.randn(1, 3, 224, 224), torch.tensor([[13.4, 52.5]])).shape
    torch.Size([1, 62])
    """

    option_classes: ClassVar[tuple[type, ...]] = (MetadataOptions,)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = take_options(MetadataOptions, kwargs)
        check_vit_options(type(self), kwargs)
        super().__init__(*args, **kwargs)
        self.add_encoder(options)

    def add_encoder(self, options: MetadataOptions) -> None:
        """Adds the metadata encoder, and the layer that joins its embeddings with the features."""
        features, weight = self.num_features, next(self.parameters())
        encoder = options.build_encoder(weight.device, weight.dtype)
        sizes = (features + encoder.out_features, features)
        self.fuse: nn.Linear | None = nn.Linear(*sizes, device=weight.device, dtype=weight.dtype)
        self.fuse_act = nn.GELU()
        self.metadata_encoder = encoder

    def forward_head(self, x: Tensor, pre_logits: bool = False, metadata: Tensor | None = None) -> Tensor:
        """Pools (B, N, D) features, concatenates the location encoding of (B, ...) metadata or None, and classifies.

        Returns (B, num_classes) logits, or with `pre_logits` the (B, D) classifier inputs. Without pooling, both keep
        N.
        """
        x = self.head_drop(self.fc_norm(self.pool(x)))
        if self.fuse is None:  # pruned
            return x
        context, present = self.metadata_encoder(x, metadata)
        context = context.to(x.dtype) * present.unsqueeze(1)
        if self.global_pool == "":  # not x.dim(), whose value torch.fx does not know when it traces
            context = context.unsqueeze(1).expand(-1, x.shape[1], -1)
        x = self.fuse_act(self.fuse(torch.cat([x, context], dim=-1)))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor, metadata: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(B, C, height, width) images and their metadata -> (B, num_classes) logits."""
        return self.forward_head(self.forward_features(x), metadata=metadata)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Prunes as timm does. Without the head, the location encoding goes too."""
        remaining: list[int] = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.fuse = None
            self.metadata_encoder.encoder = nn.Identity()
        return remaining


def classify_with_metadata(model: nn.Module, **metadata: Any) -> LocationVisionTransformer:
    """Makes a vision transformer concatenate a location encoding to its features, before a two-layer classifier.

    The encoder and the first of the two layers start at random. Saved by timm, the network is loaded again as model
    'erm_le'.

    Args:
        model: Of timm's class VisionTransformer, exactly, with blocks of its class Block. It is changed in place,
            returned, and takes images and metadata from then on.
        **metadata: Options of `timm_moe_dg.models.MetadataOptions`.

    >>> model = timm_moe_dg.models.classify_with_metadata(timm.create_model("vit_tiny_patch16_224"))
    >>> model(torch.randn(2, 3, 224, 224), torch.tensor([[13.4, 52.5], [-58.4, -34.6]])).shape
    torch.Size([2, 1000])
    """
    network: Any = check_plain(model)
    options = build_options(MetadataOptions, metadata, "classify_with_metadata")
    LocationVisionTransformer.add_encoder(network, options)
    network.__class__ = LocationVisionTransformer
    network.train(network.training)  # new modules, or the encoder would drop metadata in evaluation
    record_change(network, "erm_le", vars(options))
    return network


def _filter_fn(state_dict: dict[str, Tensor], model: LocationVisionTransformer) -> dict[str, Tensor]:
    loaded = fit_dense(state_dict, model, ("fuse.", "metadata_encoder."))
    check_complete(loaded, model)
    return loaded


@register_model
def erm_le_tiny_patch16(pretrained: bool = False, **kwargs: Any) -> LocationVisionTransformer:
    """DeiT-Ti/16 with coordinates, the counterpart of moge_tiny. Options are those of `LocationVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return create_moe_vit(LocationVisionTransformer, "erm_le_tiny_patch16", pretrained, _filter_fn, **model_args)
