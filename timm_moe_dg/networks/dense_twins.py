"""The dense networks that a mixture is measured against, and random inputs for all of them.

Its dense twin is timm's model that its weights come from. The FLOP-equivalent is the twin with a feed-forward K times
as wide in the mixture blocks (1 + K for MoGE), which computes as much without routing.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import timm
import torch
from timm.data import resolve_model_data_config
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp, LocationIdEmbedding, RoutedMlp
from ..layers.feed_forwards import DENSE_FORMS, read_feed_forward

Network: TypeAlias = Any  # a timm model or a feed-forward: to mypy each attribute of a module may be a tensor
Makers: TypeAlias = dict[str, Callable[[], nn.Module]]
TWIN, EQUIVALENT = "dense twin", "FLOP-equivalent"


def mixture_layer(model: Network) -> RoutedMlp:
    """The first mixture layer of a model.

    Raises:
        ArgumentError: There is none.
    """
    for module in model.modules():
        if isinstance(module, RoutedMlp):
            return module
    name = model.pretrained_cfg["architecture"]
    raise ArgumentError.of("model", name, "has no mixture layers; compare with it by --against")


def mixture_and_rivals(name: str, options: dict[str, Any], against: str | None = None) -> Makers:
    """How to make a mixture model and what it is compared with.

    Args:
        name: Of a model with mixture layers.
        options: It is created with.
        against: Any timm model to compare with besides.

    Returns:
        By label, the model's name first, then `TWIN` and `EQUIVALENT`.
    """
    plan: Network = timm.create_model(name, device="meta", **options)
    width = _active_width(mixture_layer(plan))
    makers: Makers = {name: lambda: timm.create_model(name, **options)}
    makers |= {TWIN: lambda: _dense_twin(plan), EQUIVALENT: lambda: _dense_twin(plan, width)}
    if against:
        makers[against] = lambda: timm.create_model(against, num_classes=plan.num_classes)
    return makers


def layer_and_rivals(name: str, options: dict[str, Any]) -> Makers:
    """As `mixture_and_rivals`, one feed-forward of each, without experts' dropout, which the dense ones do not have."""
    plan: Network = timm.create_model(name, device="meta", **options)
    layer = mixture_layer(plan)
    width = _active_width(layer)
    makers: Makers = {name: lambda: mixture_layer(timm.create_model(name, **options, expert_drop=0.0))}
    if hasattr(plan, "mixture_args"):
        place = next(name for name, module in plan.named_modules() if isinstance(module, RoutedMlp))
        makers[TWIN] = lambda: _dense_twin(plan).get_submodule(place)
        makers[EQUIVALENT] = lambda: _dense_twin(plan, width).get_submodule(place)
    else:
        _, hidden, features = layer.fc1.weight.shape
        makers |= {TWIN: lambda: Mlp(features, hidden), EQUIVALENT: lambda: Mlp(features, width * hidden)}
    return makers


def random_inputs(
    model: Network, name: str, options: dict[str, Any], batch_size: int, device: str
) -> tuple[Tensor, ...]:
    """Random input: images, and metadata where a model takes any; tokens for a feed-forward.

    Args:
        model: What `mixture_and_rivals` or `layer_and_rivals` makes.
        name: Of the mixture model.
        options: Likewise.
        batch_size: Images.
        device: Where the tensors are made.

    Returns:
        What the model is called with.
    """
    if isinstance(model, RoutedMlp) or type(model) in DENSE_FORMS:
        # The gradient of the input too: a feed-forward is not the first layer
        shape = _layer_shape(model, batch_size, _num_tokens(name, options))
        x = torch.randn(shape, device=device, requires_grad=True)
        if not isinstance(model, GeoMoeMlp):
            return (x,)
        present = torch.ones(batch_size, dtype=torch.bool, device=device)
        return x, torch.randn(batch_size, model.router.codes.shape[1], device=device), present
    own = getattr(getattr(model, "patch_embed", None), "img_size", None)  # networks of one size; the others take any
    size = own or resolve_model_data_config(model)["input_size"][1:]
    images = torch.randn(batch_size, 3, *size, device=device)
    encoder = getattr(getattr(model, "metadata_encoder", None), "encoder", None)
    if encoder is None:
        return (images,)
    if isinstance(encoder, LocationIdEmbedding):
        return images, torch.randint(encoder.num_locations, (batch_size,), device=device)
    return images, (torch.rand(batch_size, 2, device=device) - 0.5) * torch.tensor([360.0, 180.0], device=device)


def _active_width(layer: RoutedMlp) -> int:
    """How many feed-forwards a token passes in a mixture layer."""
    router: Network = layer.router
    return router.top_k + (isinstance(layer, GeoMoeMlp) and layer.shared is not None)


def _dense_twin(model: Network, widen: int = 1) -> nn.Module:
    """The dense model that `model` is upcycled from, its mixture blocks' feed-forward `widen` times as wide."""
    if hasattr(model, "mixture_args"):
        return _dense_backbone(model, widen)
    name = model.pretrained_cfg["hf_hub_id"].split("/")[1].split(".")[0]
    mixtures = {index for index, block in enumerate(model.blocks) if isinstance(block.mlp, RoutedMlp)}

    def build_block(depth: int, mlp_ratio: float, **kwargs: Any) -> Block:
        return Block(depth=depth, mlp_ratio=mlp_ratio * (widen if depth in mixtures else 1), **kwargs)

    size = model.patch_embed.img_size
    return timm.create_model(name, num_classes=model.num_classes, img_size=size, block_fn=build_block)


def _dense_backbone(model: Network, widen: int) -> nn.Module:
    """The network that a mixture was made of, feed-forwards widened where it has mixtures."""
    own = {"num_classes": model.num_classes} | (
        {"img_size": model._model_args["img_size"]} if "img_size" in model._model_args else {}
    )
    dense = timm.create_model(model.mixture_args["backbone"], **own)
    for name, module in model.named_modules():
        if isinstance(module, RoutedMlp):
            dense.set_submodule(name, _widened(dense.get_submodule(name), widen))
    return dense


def _widened(mlp: nn.Module, factor: int) -> nn.Module:
    """A feed-forward with `factor` times as many hidden features, drawn anew; its inner normalization is left out."""
    parts, wide = read_feed_forward(mlp), copy.deepcopy(mlp)
    for name, layer in mlp.named_children():
        axes = (factor, 1) if layer in parts.first else (1, factor)
        if layer in (*parts.first, parts.second):
            rows, columns = (size * by for size, by in zip(layer.get_parameter("weight").shape, axes, strict=False))
            make: Any = functools.partial(nn.Conv2d, kernel_size=1) if parts.channels_first else nn.Linear
            setattr(wide, name, make(columns, rows, bias=layer.bias is not None))
        elif layer is parts.norm and factor > 1:
            setattr(wide, name, nn.Identity())
    return wide


def _num_tokens(name: str, options: dict[str, Any]) -> int:
    """Tokens per image."""
    plan: Network = timm.create_model(name, device="meta", **options)
    if not hasattr(plan, "patch_embed") or not hasattr(plan.patch_embed, "num_patches"):
        return 14**2  # of the stage with most blocks, at 224 pixels
    return plan.patch_embed.num_patches + getattr(plan, "num_prefix_tokens", 0)


def _layer_shape(layer: Network, batch_size: int, tokens: int) -> tuple[int, ...]:
    """What a feed-forward takes."""
    routed = isinstance(layer, RoutedMlp)
    features = layer.fc1.weight.shape[-1] if routed else read_feed_forward(layer).weights()[0].shape[1]
    first = getattr(layer, "channels_first", False) if routed else read_feed_forward(layer).channels_first
    return (batch_size, features, 1, tokens) if first else (batch_size, tokens, features)
