"""Upcycling of a built timm network in place: its feed-forwards become mixtures that compute the same.

A feed-forward is a module of a class in `layers.feed_forwards`, wherever the network holds it. Feed-forwards are
numbered in the order of `named_modules`. Modules of other classes count too if their names differ from those of
feed-forwards in numbers alone.
"""

import copy
import functools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from ..errors import MoeLayersError, RouterError
from ..layers.compat import update_model_args
from ..layers.feed_forwards import DENSE_FORMS, read_feed_forward
from ..layers.geo_moe_mlp import GeoMoeMlp
from ..layers.mixture_options import GeoMixtureOptions, MixtureOptions, build_options, take_options
from ..layers.moe_mlp import MoeMlp, RoutedMlp
from ..layers.parameters import undecayed_parameters
from ..layers.text_head import TextHead
from .gmoe import MoeLayers, resolve_moe_layers
from .metadata_options import MetadataRoutingOptions
from .moge import GeoBlock, GeoMoeVisionTransformer

# Modules of the same classes with another purpose: they mix tokens or pixels (MLP-Mixer, TNT), compute attention
# biases from relative positions (Swin v2, ViT), or refine one pooled token
NOT_FEED_FORWARDS = ("mlp_tokens", "mlp_in", "meta_mlp", "rel_pos.mlp", "attn_pool.mlp")

ModelT = TypeVar("ModelT", bound=nn.Module)
FeedForwards = tuple[nn.Module, list[str]]  # a feed-forward and all its names


def upcycle(model: ModelT, moe_layers: MoeLayers = "last_two", **mixture: Any) -> ModelT:
    """Replaces feed-forwards of any network of timm's by mixtures of experts, each a copy of what it replaces.

    In evaluation the network computes what it did. The exceptions cause a warning: combine weights that do not sum to 1
    (`top_k=1`, or `normalize_weights=False`), `expert_width` and `expert_reinit`. Call it before an optimizer or a
    wrapper of timm's (`features_only=True`) holds the network. Saved by timm, it is loaded again as model 'gmoe'.

    Args:
        model: Changed in place, and returned.
        moe_layers: Which feed-forwards, in the order in which the network holds them, see `resolve_moe_layers`.
        **mixture: Options of `timm_moe_dg.layers.MixtureOptions`.

    Raises:
        MoeLayersError: The network has no feed-forward to copy, or not so many, or one of those asked for is of another
            class, or the network has mixtures already.

    Example:
        >>> model, images = timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(1, 3, 224, 224)
        >>> logits = model(images)
        >>> torch.allclose(timm_moe_dg.upcycle(model)(images), logits, atol=1e-4)
        True
    """
    options = build_options(MixtureOptions, mixture, "upcycle")
    feed_forwards = find_feed_forwards(model)
    if not feed_forwards:
        remedy = "has no feed-forward that experts can be copies of; choose a transformer or ConvNeXt of timm, such as "
        remedy += "deit_small_patch16_224 or convnext_tiny"
        raise MoeLayersError.of("model", name_of(model), remedy)
    layers, chosen = _choose(model, moe_layers, feed_forwards)
    check_token_wise([dense for dense, _ in chosen])
    # All mixtures are made before any is put in its place: an error leaves the network as it was
    mixtures = [MoeMlp.from_dense(dense, options) for dense, _ in chosen]
    if not hasattr(model, "group_matcher"):
        _keep_layer_groups(model, [names[0] for _, names in chosen])
    for mixture_layer, (_, names) in zip(mixtures, chosen, strict=True):
        for name in names:
            model.set_submodule(name, mixture_layer)
            if isinstance(model, NaFlexVit):
                block = model.get_submodule(name.rpartition(".")[0])
                block.register_forward_pre_hook(_mark_padding, with_kwargs=True)
    reasons = mixtures[0].changes_dense()
    if reasons and not mixtures[0].fc1.weight.is_meta:
        change = "the upcycled network does not compute what the dense one did"
        remedy = "give top_k=2 or more and leave normalize_weights, expert_width and expert_reinit alone to keep it"
        warnings.warn(f"{', '.join(reasons)}: {change}; {remedy}", stacklevel=2)
    record_change(model, "gmoe", {"moe_layers": list(layers), **vars(options)})
    return model


def _choose(
    model: nn.Module, moe_layers: MoeLayers, feed_forwards: Mapping[str, FeedForwards]
) -> tuple[tuple[int, ...], list[FeedForwards]]:
    """Returns the numbers of the feed-forwards that become mixtures, and these."""
    forms = {_without_numbers(name) for name in feed_forwards}
    names = [name for name, _ in model.named_modules() if _without_numbers(name) in forms]
    able = [index for index, name in enumerate(names) if name in feed_forwards]
    layers = resolve_moe_layers(moe_layers, len(names), able)
    for name in (names[index] for index in layers if index not in able):
        reason = _refusal(model.get_submodule(name))
        remedy = f"{name} cannot become a mixture ({reason}); choose among {', '.join(map(str, able))}"
        raise MoeLayersError.of("moe_layers", moe_layers, remedy)
    return layers, [feed_forwards[names[index]] for index in layers]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _mark_padding(block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    """Forward hook of a NaFlex block: sets the mixture's mask of tokens that are not padding."""
    valid, mask = None, kwargs.get("attn_mask")
    if mask is not None:
        # (..., N or 1, N): booleans, or numbers that are the smallest of their type for padding
        allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
        valid = allowed.any(-2)
        if valid.ndim == 3:  # heads
            valid = valid.any(1)
        valid = valid.expand(args[0].shape[:2])
    for layer in block.children():
        if isinstance(layer, MoeMlp):
            layer.valid = valid


def _keep_layer_groups(model: Any, names: Sequence[str]) -> None:
    """Keeps the groups for layer decay where timm would count parameters: those of mixtures join the feed-forward's."""
    from timm.optim import auto_group_layers  # `import timm` leaves the optimizers out

    groups = auto_group_layers(model)
    for name in names:
        groups[name] = min(group for parameter, group in groups.items() if parameter.startswith(f"{name}."))
    model.group_matcher = functools.partial(_match_groups, groups)


def _match_groups(groups: Mapping[str, int], coarse: bool = False) -> Callable[[str], float]:
    return functools.partial(_group_of, groups)


def _group_of(groups: Mapping[str, int], name: str) -> float:
    nearest = max((known for known in groups if f"{name}.".startswith(f"{known}.")), key=len, default="")
    return groups.get(nearest, math.inf)


def upcycle_with_metadata(
    model: nn.Module, moe_layers: MoeLayers = "last_two", **mixture: Any
) -> GeoMoeVisionTransformer:
    """Replaces feed-forwards of a vision transformer by shared and metadata-routed experts, all copies of them.

    In evaluation the network computes what it did, with metadata and without, unless `expert_perturbation` is above 0.
    Saved by timm, it is loaded again as model 'moge'.

    Args:
        model: Of timm's class VisionTransformer, exactly, with blocks of its class Block. It is changed in place,
            returned, and takes images and metadata from then on.
        moe_layers: Which blocks, see `resolve_moe_layers`.
        **mixture: Options of `timm_moe_dg.layers.GeoMixtureOptions` and `timm_moe_dg.models.MetadataRoutingOptions`.

    >>> model = timm_moe_dg.models.upcycle_with_metadata(timm.create_model("vit_tiny_patch16_224"))
    >>> model(torch.randn(2, 3, 224, 224), torch.tensor([[13.4, 52.5], [-58.4, -34.6]])).shape
    torch.Size([2, 1000])
    """
    network: Any = check_plain(model)
    layers = resolve_moe_layers(moe_layers, len(network.blocks))
    metadata = take_options(MetadataRoutingOptions, mixture)
    options = build_options(GeoMixtureOptions, mixture, "upcycle_with_metadata")
    weight = network.blocks[0].norm1.weight
    encoder = metadata.build_encoder(weight.device, weight.dtype)
    chosen = [network.blocks[index].mlp for index in layers]
    check_token_wise(chosen)
    mixtures = [GeoMoeMlp.from_dense(dense, encoder.out_features, options) for dense in chosen]
    for index, mixture_layer in zip(layers, mixtures, strict=True):
        network.blocks[index].mlp = mixture_layer
    # Blocks must hand the metadata on, so their forward and the network's are replaced with their classes
    for block in network.blocks:
        block.__class__ = GeoBlock
        block.routed = isinstance(block.mlp, GeoMoeMlp)
    network.__class__ = GeoMoeVisionTransformer
    network.route_by(encoder, metadata.coverage_points, metadata.coverage_radius)
    for part in (network.blocks, encoder):  # new modules, or an encoder would drop metadata in evaluation
        part.train(network.training)
    record_change(network, "moge", {"moe_layers": list(layers), **vars(options), **vars(metadata)})
    return network


def find_feed_forwards(model: nn.Module) -> dict[str, FeedForwards]:
    """Lists the feed-forwards of a network that can become mixtures: first name -> the module and all its names.

    Layers that share a module give it several names. A network with mixtures is refused, since the numbers of
    its feed-forwards would differ.
    """
    if any(isinstance(module, RoutedMlp) for module in model.modules()):
        remedy = "has mixtures of experts already; upcycle a dense network"
        raise MoeLayersError.of("model", name_of(model), remedy)
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) in DENSE_FORMS and not name.endswith(NOT_FEED_FORWARDS) and _refusal(module) is None:
            names.setdefault(module, []).append(name)
    return {module_names[0]: (module, module_names) for module, module_names in names.items()}


def _refusal(module: nn.Module) -> str | None:
    try:
        read_feed_forward(module)
    except RouterError as error:
        return str(error)
    return None


def check_token_wise(chosen: Sequence[nn.Module]) -> None:
    """Checks that feed-forwards compute what experts would, which another release of timm may change.

    One layer of each kind gets random weights and is compared with a mixture of one expert on permuted tokens.
    """
    makes = {(type(dense), str(dense)): dense for dense in chosen if not next(dense.parameters()).is_meta}
    for dense in makes.values():
        difference = _difference_to_experts(dense)
        if not difference < 1e-3:
            remedy = "computes something else in this release of timm than experts would; leave it dense"
            raise RouterError.of("mlp", type(dense).__name__, f"{remedy} (relative difference {difference:.1g})")


@torch.no_grad()
def _difference_to_experts(dense: nn.Module, num_tokens: int = 6) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = copy.deepcopy(dense).cpu().float().eval()
        # Random weights, because layers that start at zero would hide a difference
        for parameter in dense.parameters():
            parameter.normal_(std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.5)
        expert = MoeMlp.from_dense(dense, num_experts=1, top_k=1, router="linear")
        tokens_TD = torch.randn(num_tokens, expert.fc1.weight.shape[-1])
        order = torch.randperm(num_tokens)  # shows whether tokens of the dense layer depend on each other
    if expert.channels_first:
        outputs, copied = (
            layer(tokens.t()[None, :, None])[0, :, 0].t()
            for layer, tokens in ((dense, tokens_TD), (expert, tokens_TD[order]))
        )
    else:
        outputs, copied = dense(tokens_TD[None])[0], expert(tokens_TD[None, order])[0]
    return ((outputs[order] - copied).abs().max() / outputs.abs().max()).item()


def record_change(model: Any, name: str | None, options: dict[str, Any]) -> None:
    """Gives a changed network its `no_weight_decay`, and records what builds it again: a model's name and options.

    Options that are modules are left out. A network that was changed before keeps its backbone and its earlier options,
    and without a name also its name.
    """
    model.no_weight_decay = functools.partial(_no_weight_decay, model)
    cfg = getattr(model, "pretrained_cfg", None)
    if not cfg:
        return
    backbone = ".".join(filter(None, (cfg["architecture"], cfg.get("tag"))))
    model.pretrained_cfg = model.default_cfg = {**cfg, "architecture": name or cfg["architecture"]}
    recorded = {key: value for key, value in options.items() if not isinstance(value, nn.Module)}
    model.mixture_args = {"backbone": backbone, **getattr(model, "mixture_args", {}), **recorded}
    update_model_args(model, **model.mixture_args)
    model.register_state_dict_pre_hook(_record_resolved)


def _record_resolved(model: Any, prefix: str, keep_vars: bool) -> None:
    """Records the resolved options again at saving, since `create_model` has overwritten them with its caller's."""
    if "text_head" in model.mixture_args and not isinstance(model.get_classifier(), TextHead):
        model.mixture_args["text_head"] = None  # after `reset_classifier`
    update_model_args(model, **model.mixture_args)


def _no_weight_decay(model: Any) -> set[str]:
    """Names parameters without weight decay: those of the network's class, and those of experts and routers."""
    of_class = type(model).no_weight_decay(model) if hasattr(type(model), "no_weight_decay") else ()
    return set(of_class) | undecayed_parameters(model)


def name_of(model: nn.Module) -> str:
    """Returns timm's name of a network, or the name of its class."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture", type(model).__name__)


def check_plain(model: nn.Module) -> nn.Module:
    """Refuses a network whose forward is not exactly the one that networks with metadata replace."""
    blocks = sorted({type(block).__name__ for block in getattr(model, "blocks", ()) if type(block) is not Block})
    if type(model) is VisionTransformer and not blocks:
        return model
    is_plain = type(model) is VisionTransformer
    what = f"has blocks of class {', '.join(blocks)}" if is_plain else f"is of class {type(model).__name__}"
    remedy = (
        f"{what}, which would not hand metadata on; choose a network of timm's class VisionTransformer with plain "
        "blocks, such as deit_small_patch16_224 or vit_base_patch16_clip_224, or model 'gmoe', which needs no metadata"
    )
    raise MoeLayersError.of("model", name_of(model), remedy)
