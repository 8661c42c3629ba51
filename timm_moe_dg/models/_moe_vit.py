"""Vision transformer with token-routed experts in some blocks, the class of GMoE and SF-MoE."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from ..errors import MoeLayersError
from ..layers.mixture_options import MixtureOptions, check_options, option_names, take_options
from ..layers.moe_mlp import MoeMlp
from ..layers.own_parameters import undecayed_parameters

MoeLayers = str | Sequence[int]


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
        kwargs["block_fn"] = mixture_block(Block, layers, MoeMlp, vars(options))
        super().__init__(*args, **kwargs)
