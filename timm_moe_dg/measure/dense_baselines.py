"""Dense models that a mixture is compared with, and random inputs for all of them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import timm
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp, LocationIdEmbedding, RoutedMlp
from ..layers.dense.feed_forwards import DENSE_FORMS, read_feed_forward
from ..networks.averages import dense_name

Network: TypeAlias = Any  # mypy types module attributes as Tensor or Module
Options: TypeAlias = dict[str, Any]
Makers: TypeAlias = dict[str, Callable[[], nn.Module]]
TWIN = "dense twin"  # the timm model that the mixture's weights come from
# The twin with a feed-forward K times as wide in the mixture blocks (1 + K for MoGE): as much arithmetic, no routing
EQUIVALENT = "FLOP-equivalent"


def mixture_layers(model: Network) -> dict[str, Network]:
    """The mixture layers of a model by name. A model without any is an `ArgumentError`."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RoutedMlp)}
    if not layers:
        name = model.pretrained_cfg["architecture"]
        raise ArgumentError.of("model", name, "has no mixture layers; compare with it by --against")
    return layers


def model_and_baselines(name: str, options: Options, against: str | None = None) -> Makers:
    """Functions that build a mixture model and its dense baselines, by label: `name`, `TWIN`, `EQUIVALENT`, `against`.

    The options are keyword arguments of `timm.create_model` for the mixture model.
    """
    plan = timm.create_model(name, device="meta", **options)
    layer = next(iter(mixture_layers(plan).values()))
    # The feed-forwards that a token passes
    width = layer.router.top_k * getattr(layer, "expert_width", 1) + (layer.shared is not None)
    makers: Makers = {
        name: partial(timm.create_model, name, **options),
        TWIN: partial(_dense_model, plan, options),
        EQUIVALENT: partial(_dense_model, plan, options, width),
    }
    if against:
        makers[against] = partial(timm.create_model, against, num_classes=plan.num_classes)
    return makers


def layer_and_baselines(name: str, options: Options) -> Makers:
    """As `model_and_baselines`, for the first mixture layer alone."""
    place = next(iter(mixture_layers(timm.create_model(name, device="meta", **options))))
    # The dense feed-forwards have no dropout of hidden features either
    makers = model_and_baselines(name, options) | {name: partial(timm.create_model, name, **options, expert_drop=0.0)}
    return {label: lambda make=make: make().get_submodule(place) for label, make in makers.items()}  # type: ignore[misc]


def random_inputs(model: Network, name: str, options: Options, batch_size: int, device: str) -> tuple[Tensor, ...]:
    """Random images, and metadata for a model that reads any, or tokens for a layer of the mixture model `name`."""
    if isinstance(model, RoutedMlp) or type(model) in DENSE_FORMS:
        return _layer_inputs(model, timm.create_model(name, device="meta", **options), batch_size, device)
    # Networks of one size; the others take any
    fixed_size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = fixed_size or resolve_model_data_config(model)["input_size"][1:]
    images = torch.randn(batch_size, 3, *size, device=device)
    encoder = getattr(getattr(model, "metadata_encoder", None), "encoder", None)
    if encoder is None:
        return (images,)
    if isinstance(encoder, LocationIdEmbedding):
        return images, torch.randint(encoder.num_locations, (batch_size,), device=device)
    degrees = torch.tensor([360.0, 180.0], device=device)
    return images, (torch.rand(batch_size, 2, device=device) - 0.5) * degrees


def _layer_inputs(layer: Network, plan: Network, batch_size: int, device: str) -> tuple[Tensor, ...]:
    if hasattr(plan, "patch_embed") and hasattr(plan.patch_embed, "num_patches"):
        tokens = plan.patch_embed.num_patches + getattr(plan, "num_prefix_tokens", 0)
    else:
        tokens = 14**2  # convolutional networks: the stage with the most blocks, at 224 pixels
    if isinstance(layer, RoutedMlp):
        features, channels_first = layer.fc1.weight.shape[-1], getattr(layer, "channels_first", False)
    else:
        parts = read_feed_forward(layer)
        features, channels_first = parts.weights()[0].shape[1], parts.channels_first
    shape = (batch_size, features, 1, tokens) if channels_first else (batch_size, tokens, features)
    # The backward pass includes the gradient of the input: a feed-forward is not the first layer of a network
    x = torch.randn(shape, device=device, requires_grad=True)
    if not isinstance(layer, GeoMoeMlp):
        return (x,)
    present = torch.ones(batch_size, dtype=torch.bool, device=device)
    return x, torch.randn(batch_size, layer.router.codes.shape[1], device=device), present


def _dense_model(plan: Network, options: Options, factor: float = 1) -> nn.Module:
    """The dense model that `plan` is upcycled from, its mixture blocks' feed-forwards `factor` times as wide."""
    size = {key: options[key] for key in ("img_size",) if key in options}
    dense = timm.create_model(dense_name(plan), num_classes=plan.num_classes, **size)
    for place in mixture_layers(plan) if factor > 1 else ():
        dense.set_submodule(place, _widened(dense.get_submodule(place), factor))
    return dense


def _widened(mlp: nn.Module, factor: float) -> nn.Module:
    """A new feed-forward with `factor` times as many hidden features, without its inner normalization."""
    parts, wide = read_feed_forward(mlp), copy.deepcopy(mlp)
    for name, layer in mlp.named_children():
        if layer in (*parts.first, parts.second):
            rows, columns = layer.get_parameter("weight").shape[:2]
            is_second = layer is parts.second
            rows, columns = (rows, round(columns * factor)) if is_second else (round(rows * factor), columns)
            make: Any = partial(nn.Conv2d, kernel_size=1) if parts.channels_first else nn.Linear
            setattr(wide, name, make(columns, rows, bias=layer.bias is not None))
        elif layer is parts.norm:
            setattr(wide, name, nn.Identity())
    return wide
