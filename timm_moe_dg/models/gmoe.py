"""GMoE and SF-MoE: vision transformers with token-routed experts in some blocks.

Sparse Mixture-of-Experts are Domain Generalizable Learners (Li et al., ICLR 2023), https://arxiv.org/abs/2206.04046

GMoE's 33.8 M parameters in the paper are those at DomainNet's 345 classes. Its 4.8 GMACs are those of the released
code, top-1 routing with capacity factor 1.5 and padded places: 4.83 without the router, 4.87 with it. The text's top-2
routing, the default, takes 5.06 and 5.10. The released configuration is `top_k=1, capacity_factor=1.5` (raw gate, batch
prioritized). Its capacity also holds in evaluation, so a prediction depends on its batch. This is not reproduced.

Sparse Fusion Mixture-of-Experts are Domain Generalizable Learners (Li et al., 2022), an earlier form of GMoE,
alternates sparse (mixture) and fusion (dense) blocks, linearly routed. Its released code differs from the paper:
distilled DeiT-S, mixtures in blocks 5 and 11, 4 experts. That placement is `moe_layers=(5, 11), num_experts=4`.

"R26-S/16" is the paper's label of the hybrid (section 2.4), with a ResNet-26 stem in front. Its code loads AugReg's
`vit_small_r26_s32_224`, whose stem has stride 32 (7 x 7 tokens at 224 px). So does the registered name. With
`output_stride=16` the same weights give a grid of 14 x 14, with the position embedding resampled.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.layers import HybridEmbed, StdConv2dSame
from timm.models import generate_default_cfgs, register_model
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..errors import MoeLayersError
from ..layers.mixture_options import MixtureOptions, check_options, option_names, take_options
from ..layers.moe_mlp import MoeMlp
from ..layers.parameters import undecayed_parameters
from .building import IMAGENET_CFG, create_moe_vit, deit_cfg

MoeLayers = str | Sequence[int]
_PAPER = "arXiv:2206.04046"

default_cfgs = generate_default_cfgs(
    {
        "gmoe_tiny_patch16.deit_in1k": deit_cfg("tiny", paper_ids=_PAPER),
        "gmoe_small_patch16.deit_in1k": deit_cfg("small", paper_ids=_PAPER),
        "gmoe_base_patch16.deit_in1k": deit_cfg("base", paper_ids=_PAPER),
        "sfmoe_small.deit_in1k": deit_cfg("small", paper_ids=_PAPER),
        "hybrid_sfmoe_r26_s16.augreg_in21k_ft_in1k": {
            **IMAGENET_CFG,
            "hf_hub_id": "timm/vit_small_r26_s32_224.augreg_in21k_ft_in1k",
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.backbone.stem.conv",
            "paper_ids": _PAPER,
        },
    }
)


def resolve_moe_layers(moe_layers: MoeLayers, depth: int, able: Collection[int] | None = None) -> tuple[int, ...]:
    """Lists the 0-based blocks whose feed-forward becomes a mixture of experts, sorted and without repetition.

    Args:
        moe_layers: 'every_two' (0, 2, 4, ...), 'last_two' (the last two of these: 8 and 10 of 12), one letter per block
            ('S' sparse, 'F' fusion, that is dense: 'FFFFFFFFSFSF', SF-MoE section 2.3), or the indices themselves.
        depth: Number of blocks.
        able: Blocks among which 'every_two' and 'last_two' choose, leaving out others; None for all.
    """
    every_two = tuple(index for index in range(0, depth, 2) if able is None or index in able)
    if isinstance(moe_layers, str):
        named = {"every_two": every_two, "last_two": every_two[-2:]}
        if moe_layers in named:
            if not every_two:
                remedy = "no even-numbered block can become a mixture; give block indices"
                raise MoeLayersError.of("moe_layers", moe_layers, remedy)
            return named[moe_layers]
        if set(moe_layers) - set("SF") or len(moe_layers) != depth:
            remedy = f"choose one of {sorted(named)}, block indices, or one letter S or F for each of {depth} blocks"
            raise MoeLayersError.of("moe_layers", moe_layers, remedy)
        indices = [index for index, letter in enumerate(moe_layers) if letter == "S"]
    else:
        indices = list(moe_layers) if isinstance(moe_layers, list | tuple | range) else []
    integers = all(isinstance(index, int) and not isinstance(index, bool) for index in indices)
    if not indices or not integers or not all(0 <= index < depth for index in indices):
        remedy = f"name at least one block, in a tuple of indices from 0 to {depth - 1}"
        raise MoeLayersError.of("moe_layers", moe_layers, remedy)
    return tuple(sorted(set(indices)))


def mixture_block(
    block: type[Block], moe_layers: tuple[int, ...], moe_layer: type[nn.Module], moe_args: Mapping[str, object]
) -> Callable[..., Block]:
    """Makes a `block_fn` for timm: blocks `moe_layers` get a `moe_layer`, from timm's Mlp arguments and `moe_args`."""

    def build(depth: int, mlp_layer: type[nn.Module], **kwargs: Any) -> Block:
        layer: Any = partial(moe_layer, **moe_args) if depth in moe_layers else mlp_layer  # Block wants a class
        return block(depth=depth, mlp_layer=layer, **kwargs)

    return build


def check_vit_options(network: Any, given: Mapping[str, Any]) -> None:
    """Refuses keyword arguments for timm's VisionTransformer that it does not take. `network` is a class."""
    timms = inspect.signature(VisionTransformer.__init__).parameters
    check_options(given, (*option_names(*network.option_classes), *timms), network.__name__)


class MixtureVisionTransformer(VisionTransformer):
    """Base of vision transformers with mixtures in some blocks: initialization and weight decay."""

    @torch.no_grad()
    def fix_init_weight(self) -> None:
        """Divides output layers by sqrt(2 depth) as timm does, and those of the shared experts, which timm misses."""
        super().fix_init_weight()
        blocks: Any = self.blocks
        for depth, block in enumerate(blocks, start=1):
            if getattr(block.mlp, "shared", None) is not None:
                block.mlp.shared.fc2.weight.div_(math.sqrt(2.0 * depth))

    def no_weight_decay(self) -> set[str]:
        """Names timm's parameters without weight decay, and biases, codes, scales and gates of the mixtures."""
        return super().no_weight_decay() | undecayed_parameters(self)


class MoeVisionTransformer(MixtureVisionTransformer):
    """Vision transformer whose feed-forward is a `MoeMlp` in some blocks (GMoE, section 4.1; SF-MoE, section 2.3).

    Everything else is timm's VisionTransformer, arguments included.

    Args:
        moe_layers: Which blocks, see `resolve_moe_layers`.
        **kwargs: Options of `timm_moe_dg.layers.MixtureOptions` (`num_experts`, `top_k`, `router`, ...), and arguments
            of timm's VisionTransformer.

    >>> model = timm.create_model("gmoe_tiny_patch16", moe_layers=(9, 11), num_experts=4, top_k=1)
    >>> model.blocks[11].mlp.router.num_experts
    4
    """

    option_classes: ClassVar[tuple[type, ...]] = (MixtureOptions,)

    def __init__(self, *args: Any, moe_layers: MoeLayers = "last_two", **kwargs: Any) -> None:
        options = take_options(MixtureOptions, kwargs)
        check_vit_options(type(self), kwargs)
        layers = resolve_moe_layers(moe_layers, kwargs.get("depth", 12))
        kwargs["block_fn"] = mixture_block(Block, layers, MoeMlp, {"options": options})
        super().__init__(*args, **kwargs)


class HybridMoeVisionTransformer(MoeVisionTransformer):
    """`MoeVisionTransformer` on the feature map of a pre-activation-free ResNetV2-26.

    `patch_size` counts pixels of the feature map, each of which is `output_stride` pixels of the image: 32 or 16 (8
    also works).
    """

    def __init__(
        self,
        in_chans: int = 3,
        patch_size: int = 1,
        output_stride: int = 32,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        backbone = ResNetV2(
            layers=[2, 2, 2, 2],
            num_classes=0,
            global_pool="",
            in_chans=in_chans,
            output_stride=output_stride,
            preact=False,
            stem_type="same",
            conv_layer=partial(StdConv2dSame, eps=1e-8),
            **dd,
        )
        embed_layer = partial(HybridEmbed, backbone=backbone)
        super().__init__(in_chans=in_chans, patch_size=patch_size, embed_layer=embed_layer, **kwargs, **dd)


@register_model
def gmoe_tiny_patch16(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """GMoE on DeiT-Ti/16 for small machines and tests, not the paper's. Options are those of `MoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3, **kwargs}
    return create_moe_vit(MoeVisionTransformer, "gmoe_tiny_patch16", pretrained, **model_args)


@register_model
def gmoe_small_patch16(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """GMoE-S/16, the paper's main model, on DeiT-S/16. Options are those of `MoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    return create_moe_vit(MoeVisionTransformer, "gmoe_small_patch16", pretrained, **model_args)


@register_model
def gmoe_base_patch16(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """GMoE-B/16 (Table 13) on DeiT-B/16. Options are those of `MoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12, **kwargs}
    return create_moe_vit(MoeVisionTransformer, "gmoe_base_patch16", pretrained, **model_args)


@register_model
def sfmoe_small(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """SF-MoE on DeiT-S/16: [S, F] x 6, six experts, top-2. Options are those of `MoeVisionTransformer`."""
    model_args = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    model_args = {"moe_layers": "every_two", "router": "linear", **model_args}
    return create_moe_vit(MoeVisionTransformer, "sfmoe_small", pretrained, **model_args)


@register_model
def hybrid_sfmoe_r26_s16(pretrained: bool = False, **kwargs: Any) -> MoeVisionTransformer:
    """R26 stem of stride 32 (or `output_stride=16`), then SF-MoE. Options are those of `MoeVisionTransformer`."""
    model_args = {"embed_dim": 384, "depth": 12, "num_heads": 6, **kwargs}
    model_args = {"moe_layers": "every_two", "router": "linear", **model_args}
    return create_moe_vit(HybridMoeVisionTransformer, "hybrid_sfmoe_r26_s16", pretrained, **model_args)
