"""Changed timm networks: `create_model("gmoe", backbone=...)`, `"moge"`, `"erm_le"`, `"text_classifier"`.

timm builds and loads the dense network with that family's filter, position resampling, channels and classifier. Then
the network is upcycled, or its classifier reads metadata, and it may get a text head. Checkpoints of changed networks
are loaded in the same two steps: the dense part, then what was added.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import (
    generate_default_cfgs,
    load_state_dict,
    load_state_dict_from_hf,
    parse_model_name,
    register_model,
    split_model_name_tag,
)
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError, OptionError, check_name, did_you_mean
from ..layers.compat import load_state_dict_from_path
from ..layers.encoders.metadata import MetadataEncoder
from ..layers.encoders.pretrained import check_weights
from ..layers.mixture_options import GeoMixtureOptions, MixtureOptions, option_names
from ..layers.moe_mlp import RoutedMlp
from ..layers.text_head import TextHead, layer_names
from .building import deit_cfg, start_router_state
from .erm_le import classify_with_metadata
from .metadata_options import MetadataOptions, MetadataRoutingOptions
from .text_head import put_text_head
from .upcycling import upcycle, upcycle_with_metadata

Keywords = dict[str, Any]  # arguments of timm's models, and its pretrained configurations

DEFAULT_BACKBONE, DEFAULT_TAG = "deit_small_patch16_224.fb_in1k", "deit_in1k"

_SAVED = ("local-dir", "hf-hub")  # sources with a config.json that names the mixture

# Of the default backbone. Every other one has its own.
default_cfgs = generate_default_cfgs(
    {f"{name}.{DEFAULT_TAG}": deit_cfg("small") for name in ("gmoe", "moge", "erm_le", "text_classifier")}
)


class Mixture(NamedTuple):
    """A registered model that takes `backbone=`."""

    name: str  # registered
    change: Callable[..., nn.Module]  # changes a built network in place
    options: tuple[str, ...]  # names of those that `change` takes


class Source(NamedTuple):
    """Configuration and weights that a network is built from."""

    cfg: Keywords | None  # pretrained configuration of a saved mixture, or None for the backbone's
    overlay: Keywords  # replaces parts of the configuration
    weights: dict[str, Tensor] | None  # given or saved, or None to let timm find the backbone's
    text_head: Keywords | None = None  # arguments of `TextHead`, if there is one

    @property
    def mixtures(self) -> set[str]:
        """Names of the mixture layers in the weights."""
        return {key.partition(".experts.")[0] for key in self.weights or () if ".experts.fc1." in key}

    def is_changed(self, kind: Mixture) -> bool:
        """Whether the weights are those of a changed network."""
        # `gmoe` on erm_le_tiny_patch16 has a dense backbone with this layer
        located = kind.name == "erm_le" and "fuse.weight" in (self.weights or ())
        return bool(self.mixtures or located or (self.weights and self.text_head))


def create_on_backbone(
    kind: Mixture,
    pretrained: bool = False,
    backbone: str = DEFAULT_BACKBONE,
    pretrained_cfg: str | Keywords | None = None,
    pretrained_cfg_overlay: Keywords | None = None,
    cache_dir: str | Path | None = None,
    features_only: bool = False,
    feature_cls: str = "getter",
    text_head: Keywords | None = None,
    **kwargs: Any,
) -> nn.Module:
    """Builds a registered model that takes `backbone=`: a timm model with a tag or without, or a source of one.

    Sources are `local-dir:` and `hf-hub:`. `pretrained` loads the backbone's weights, or those of a mixture that were
    given or saved. `pretrained_cfg` comes from timm's factory: that of the registered model, or of a saved mixture.
    `features_only` gives feature maps, as the backbone's with timm's `feature_cls="getter"`. `text_head` describes the
    one that `put_text_head` recorded. Further arguments are options of the mixture and of the backbone.
    """
    if feature_cls != "getter":
        raise ArgumentError.of("feature_cls", feature_cls, "give 'getter', or read features by hooks")
    mixture = {name: kwargs.pop(name) for name in kind.options if name in kwargs}
    features = {"out_indices": kwargs.pop("out_indices")} if features_only and "out_indices" in kwargs else {}
    saved = isinstance(pretrained_cfg, dict) and pretrained_cfg.get("source") in _SAVED
    check_name(backbone, "backbone", saved)
    if pretrained_cfg == DEFAULT_TAG and backbone == DEFAULT_BACKBONE:
        pretrained_cfg = None
    if isinstance(pretrained_cfg, str):
        remedy = f"name weights by their backbone, as backbone='NAME.{pretrained_cfg}'"
        raise ArgumentError.of("model", f"{kind.name}.{pretrained_cfg}", remedy)
    source = _source(pretrained, pretrained_cfg, pretrained_cfg_overlay or {}, cache_dir)
    model = _build(kind, backbone, pretrained, source._replace(text_head=text_head), cache_dir, mixture, kwargs)
    if not features_only:
        return model
    # The backbone's wrapper, without storage, knows its default feature maps
    options = {**kwargs, **features, "features_only": True, "feature_cls": feature_cls}
    return _put_into_wrapper(model, _without_storage(kind, backbone, options))


def _source(pretrained: bool, cfg: Keywords | None, overlay: Keywords, cache_dir: str | Path | None) -> Source:
    """Finds the weights in the configurations that timm's factory hands over."""
    if cfg is not None and cfg.get("source") not in _SAVED:
        # Of the registered configuration, which is the default backbone's, only weights put there by a script matter
        given = {key: cfg[key] for key in ("file", "state_dict", "num_classes") if cfg.get(key)}
        cfg, overlay = None, (given if given.keys() - {"num_classes"} else {}) | overlay
    if not pretrained:
        return Source(cfg, overlay, None)
    if overlay.get("state_dict") or overlay.get("file"):
        custom = str(overlay.get("file", "")).endswith(".npz")
        return Source(cfg, overlay, None if custom else overlay.get("state_dict") or load_state_dict(overlay["file"]))
    if cfg is None:
        return Source(cfg, overlay, None)
    if cfg["source"] == "local-dir":
        return Source(cfg, overlay, load_state_dict_from_path(Path(cfg["file"])))
    return Source(cfg, overlay, load_state_dict_from_hf(cfg["hf_hub_id"], weights_only=True, cache_dir=cache_dir))


def _build(
    kind: Mixture,
    backbone: str,
    pretrained: bool,
    source: Source,
    cache_dir: str | Path | None,
    mixture: Keywords,
    kwargs: Keywords,
) -> nn.Module:
    """Builds the dense network with its weights, changes it, and loads the weights of the changed parts."""
    cfg, overlay = source.cfg, dict(source.overlay)
    if source.weights is not None:
        dense = _dense_part(kind, backbone, source, mixture, kwargs) if source.is_changed(kind) else source.weights
        overlay |= {"state_dict": dense, "source": ""}
    text_head = source.text_head
    if text_head:
        classes = kwargs.get("num_classes", (cfg or text_head)["num_classes"])
        if classes == text_head["num_classes"]:
            kwargs = {**kwargs, "num_classes": 0}
        else:
            text_head = None  # a new linear classifier, as timm does with other numbers of classes
    architecture = split_model_name_tag(parse_model_name(backbone)[1])[0]
    if cfg is not None:
        cfg, backbone = {**cfg, "architecture": architecture}, architecture
    options = {"pretrained_cfg": cfg, "pretrained_cfg_overlay": overlay or None, "cache_dir": cache_dir, **kwargs}
    network = _create(kind, backbone, pretrained=pretrained, **options)
    with warnings.catch_warnings():
        if source.mixtures:  # a mixture's own weights follow, so nothing of the dense network is lost
            warnings.filterwarnings("ignore", message=".*the upcycled network does not compute")
        model: Any = kind.change(network, **mixture)
    model.pretrained_cfg.pop("state_dict", None)
    if text_head:
        put_text_head(model, TextHead(**text_head))
    if source.is_changed(kind):
        _load_changed(model, source)
    check_weights(model)
    return model


def _create(kind: Mixture, backbone: str, **options: Any) -> Any:
    """Calls timm's factory, with a named error for an option that the backbone does not have."""
    try:
        return timm.create_model(backbone, **options)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        question = did_you_mean(str(error).rpartition(" ")[2].strip("'"), kind.options)
        remedy = f"{question} the options of {kind.name} are {', '.join(kind.options)}".lstrip()
        raise OptionError.of("backbone", backbone, f"does not take it ({error}); {remedy}") from error


def _without_storage(kind: Mixture, backbone: str, kwargs: Keywords) -> Any:
    with torch.device("meta"):
        return _create(kind, backbone, **{name: kwargs[name] for name in kwargs if name not in ("device", "dtype")})


def _put_into_wrapper(model: Any, wrapper: Any) -> nn.Module:
    """Replaces the network of timm's `features_only=True`; blocks that are not needed are dropped."""
    model.prune_intermediate_layers(wrapper.out_indices, prune_norm=True)
    wrapper.model = model
    wrapper.pretrained_cfg = wrapper.default_cfg = model.pretrained_cfg
    return wrapper


def _dense_part(kind: Mixture, backbone: str, source: Source, mixture: Keywords, kwargs: Keywords) -> dict[str, Tensor]:
    """Makes a checkpoint loadable into the dense network: zeros for feed-forwards that change, and no text head."""
    assert source.weights is not None
    structure = split_model_name_tag(parse_model_name(backbone)[1])[0] if source.cfg else backbone
    plan = _without_storage(kind, structure, kwargs)
    dense = plan.state_dict()
    with torch.device("meta"):
        mixed = kind.change(plan, **mixture).state_dict()
    start_router_state(source.weights, mixed)
    classifier = tuple(f"{name}." for name in layer_names(plan.pretrained_cfg["classifier"]))
    expected = {key for key in mixed if not key.startswith(classifier)}
    present = {key for key in source.weights if not key.startswith(classifier)}
    problems = {"missing from the checkpoint": expected - present, "not in the model": present - expected}
    lists = [f"{problem} ({len(keys)}): {'; '.join(sorted(keys)[:8])}" for problem, keys in problems.items() if keys]
    if lists:
        remedy = "give the backbone and the moe_layers that it was trained with"
        raise CheckpointError(f"backbone={backbone!r} cannot load this checkpoint: {remedy}. {'. '.join(lists)}")
    outside = {key: value for key, value in source.weights.items() if key in dense or key not in mixed}
    if source.text_head:
        outside = {key: value for key, value in outside.items() if not key.startswith(classifier)}
    return outside | {key: torch.zeros_like(dense[key], device="cpu") for key in dense.keys() - mixed.keys()}


def _load_changed(model: nn.Module, source: Source) -> None:
    """Loads the weights of every mixture layer, of what reads metadata and of a text head."""
    assert source.weights is not None
    for name, layer in model.named_modules():
        if isinstance(layer, RoutedMlp | MetadataEncoder | TextHead) or name == "fuse":
            names = {key: f"{name}.{key}" for key in layer.state_dict() if f"{name}.{key}" in source.weights}
            try:
                layer.load_state_dict({key: source.weights[names[key]] for key in names})
            except RuntimeError as error:
                remedy = "give the options that it was trained with"
                raise CheckpointError(f"{name} does not fit the checkpoint; {remedy}: {error}") from error


@register_model
def gmoe(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """GMoE on any timm network with token-wise feed-forwards: CLIP, DINOv2 and v3, SigLIP, EVA, Swin, ConvNeXt.

    Options are `backbone='vit_base_patch16_clip_224.openai'`, those of `timm_moe_dg.upcycle`, and the backbone's own.
    """
    mixture = Mixture("gmoe", upcycle, ("moe_layers", *option_names(MixtureOptions)))
    return create_on_backbone(mixture, pretrained, **kwargs)


@register_model
def moge(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """MoGE on any of timm's plain vision transformers: CLIP, DINOv2, SigLIP, DeiT, AugReg.

    Options are `backbone='vit_base_patch16_clip_224.openai'`, those of `timm_moe_dg.models.upcycle_with_metadata`, and
    the backbone's own.
    """
    options = ("moe_layers", *option_names(GeoMixtureOptions, MetadataRoutingOptions))
    return create_on_backbone(Mixture("moge", upcycle_with_metadata, options), pretrained, **kwargs)


@register_model
def erm_le(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """ERM+LE, the baseline of MoGE without experts, on any of timm's plain vision transformers.

    Options are `backbone='vit_base_patch16_clip_224.openai'`, those of `timm_moe_dg.models.classify_with_metadata`, and
    the backbone's own.
    """
    mixture = Mixture("erm_le", classify_with_metadata, option_names(MetadataOptions))
    return create_on_backbone(mixture, pretrained, **kwargs)


@register_model
def text_classifier(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """A dense timm network with a text head. Saved configurations name it; `use_text_head` makes one.

    Options are `backbone='vit_base_patch16_clip_224.openai'`, `text_head`, the arguments of `TextHead`, and the
    backbone's own.
    """
    return create_on_backbone(Mixture("text_classifier", lambda network: network, ()), pretrained, **kwargs)
