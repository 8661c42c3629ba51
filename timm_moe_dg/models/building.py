"""Building of the registered vision transformers, and loading of their checkpoints.

Checkpoints are those of dense networks, which are upcycled, of mixtures, and of the GMoE authors' released code. Every
key is checked. Every option is recorded for the saved configuration.
"""

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar, cast

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..errors import CheckpointError
from ..layers.compat import update_model_args
from ..layers.encoders.pretrained import check_weights
from ..layers.feed_forwards import copy_dense, reinitialize
from ..layers.moe_mlp import RoutedMlp
from ..layers.router import Router
from .tutel import convert_tutel_state_dict, is_tutel_state_dict

ModelT = TypeVar("ModelT", bound=VisionTransformer)

IMAGENET_CFG: dict[str, object] = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 0.9,
    "interpolation": "bicubic",
    "fixed_input_size": True,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
    "license": "apache-2.0",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
}


def deit_cfg(size: str, **more: object) -> dict[str, object]:
    """Returns the configuration of a model that starts from DeiT's weights of a size: tiny, small or base."""
    return {**IMAGENET_CFG, "hf_hub_id": f"timm/deit_{size}_patch16_224.fb_in1k", **more}


# timm records these itself, at the time of saving
_TRACKED_BY_TIMM = {"img_size", "in_chans", "num_classes", "global_pool"}
# Initialization and device do not matter to a network with weights
_NOT_ARCHITECTURE = {"weight_init", "fix_init", "device", "dtype"}

_logger = logging.getLogger(__name__)

# No dense checkpoint holds these: they keep their initial values
_ROUTER_NAMES = ("router.", "gamma")
_METADATA_PREFIX = "metadata_encoder."
_INDEX_PREFIX = f"{_METADATA_PREFIX}coverage."


def upcycle_filter_fn(state_dict: dict[str, Tensor], model: VisionTransformer) -> dict[str, Tensor]:
    """Fits a checkpoint to a mixture model; the `pretrained_filter_fn` of this package.

    If the checkpoint has a dense feed-forward in place of a mixture layer, each expert (and the shared expert of MoGE)
    gets a copy of it, and the router keeps its initial values. Checkpoints of mixture models, and of the GMoE authors'
    released code, pass through. The result is complete, except for the classifier, which timm fits afterwards.
    """
    if is_tutel_state_dict(state_dict):
        state_dict = convert_tutel_state_dict(state_dict)
    loaded, model_state = fit_dense(state_dict, model, ()), model.state_dict()
    # The index of another run's coordinates is loaded only into a model that was built with one
    loaded = {key: value for key, value in loaded.items() if key in model_state or not key.startswith(_INDEX_PREFIX)}
    upcycled: list[RoutedMlp] = [
        module
        for name, module in model.named_modules()
        if isinstance(module, RoutedMlp) and _upcycle_layer(f"{name}.", loaded, model_state, module)
    ]
    if upcycled:
        encoder = {key: value for key, value in model_state.items() if key.startswith(_METADATA_PREFIX)}
        loaded = encoder | loaded
    start_router_state(loaded, model_state)
    check_complete(loaded, model)
    _report(cast(dict[str, Any], model.pretrained_cfg), upcycled)
    return loaded


def start_router_state(loaded: dict[str, Tensor], model_state: Mapping[str, Tensor]) -> None:
    """Adds the routers' biases and thresholds that a checkpoint lacks, with their initial values, in place."""
    names = {key: key.rpartition(".")[2] for key in model_state.keys() - loaded.keys()}
    missing = sorted(key for key, name in names.items() if name in Router.expert_state)
    # By their names, since a model on the meta device has no values
    loaded |= {key: torch.full(model_state[key].shape, Router.expert_state[names[key]]) for key in missing}
    if missing:
        _logger.info(f"The checkpoint lacks {', '.join(missing)}: they start at their initial values.")


def _upcycle_layer(prefix: str, loaded: dict[str, Tensor], model_state: dict[str, Tensor], layer: RoutedMlp) -> bool:
    """Fills one mixture layer from its dense counterpart, in place; False if the checkpoint has the layer itself."""
    if any(key.startswith((f"{prefix}router.", f"{prefix}experts.")) for key in loaded):
        return False
    options, width = layer.options, layer.fc2.weight.shape[-1]
    dense = {key.removeprefix(prefix): loaded.pop(key) for key in list(loaded) if key.startswith(prefix)}
    # Parts are cut along the hidden axis. A source of any other width stays as it is, and is reported
    hidden = dense["fc2.weight"].shape[1] if "fc2.weight" in dense else 0
    is_part = options.expert_width != 1 and width == round(options.expert_width * hidden)
    axes = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1} if is_part else {}
    for key in [key for key in model_state if key.startswith(prefix)]:
        name = key.removeprefix(prefix)
        part, _, source = name.partition(".")
        if name.startswith(_ROUTER_NAMES):
            loaded[key] = model_state[key]
        elif source in dense:
            stacked = part == "experts" and model_state[key].ndim == dense[source].ndim + 1
            value = dense[source]
            if stacked:
                value = copy_dense(value, len(model_state[key]), axes.get(source), width)
            loaded[key] = value.clone()  # safetensors refuses an expanded view, in which experts share storage
            if stacked and value.ndim == 3 and options.expert_perturbation > 0:
                loaded[key] += torch.randn_like(value) * options.expert_perturbation * dense[source].std()
    if options.expert_reinit:
        first = [loaded[key] for name in ("weight", "bias") if (key := f"{prefix}experts.fc1.{name}") in loaded]
        reinitialize(options.expert_reinit, first, loaded[f"{prefix}experts.fc2.weight"])
    return True


def fit_dense(state_dict: dict[str, Tensor], model: VisionTransformer, new: tuple[str, ...]) -> dict[str, Tensor]:
    """Fits a checkpoint as timm does for a vision transformer.

    Modules with `new` prefixes, which a dense network lacks, keep their values unless the checkpoint has any of them.
    """
    loaded, model_state = checkpoint_filter_fn(state_dict, model, adapt_layer_scale=True), model.state_dict()
    # With average pooling, the final normalization acts after the pool, under another name
    source, target = ("norm", "fc_norm") if "fc_norm.weight" in model_state else ("fc_norm", "norm")
    for kind in ("weight", "bias"):
        if f"{target}.{kind}" in model_state and f"{target}.{kind}" not in loaded and f"{source}.{kind}" in loaded:
            loaded[f"{target}.{kind}"] = loaded.pop(f"{source}.{kind}")
    if not any(key.startswith(new) for key in loaded):
        loaded |= {key: value for key, value in model_state.items() if key.startswith(new)}
    return loaded


def check_complete(loaded: dict[str, Tensor], model: Any) -> None:
    """Checks that a filtered checkpoint holds exactly what the model needs, apart from its classifier."""
    model_state = model.state_dict()
    # timm loads without `strict` once the number of classes differs, which in fine-tuning is always
    classifier, first_conv = (f"{model.pretrained_cfg[key]}." for key in ("classifier", "first_conv"))
    expected = [key for key in model_state if not key.startswith(classifier)]
    missing = [key for key in expected if key not in loaded]
    misfits = [
        f"{key}: {tuple(loaded[key].shape)} in the checkpoint, {tuple(model_state[key].shape)} in the model"
        for key in expected
        # timm sums or repeats the first convolution's input channels after this filter
        if key in loaded and loaded[key].shape != model_state[key].shape and not key.startswith(first_conv)
    ]
    surplus = [key for key in loaded if key.startswith("blocks.") and key not in model_state]
    problems = {"missing from the checkpoint": missing, "of another shape": misfits, "not in the model": surplus}
    lists = [f"{problem} ({len(keys)}): {'; '.join(keys)}" for problem, keys in problems.items() if keys]
    if lists:
        remedy = "give a checkpoint of this model or of its dense counterpart"
        raise CheckpointError(f"{type(model).__name__} cannot load this checkpoint: {remedy}. {'. '.join(lists)}")


def _report(cfg: Mapping[str, Any], upcycled: list[RoutedMlp]) -> None:
    """Logs where the experts come from."""
    given = "the given state dict" if cfg.get("state_dict") else cfg.get("hf_hub_id") or cfg.get("url") or "checkpoint"
    source = cfg.get("file") or given
    if not upcycled:
        _logger.info(f"Loaded a mixture-of-experts checkpoint from {source}: no expert upcycled.")
        return
    filled = sum(layer.experts.num_experts for layer in upcycled)
    changes = upcycled[0].changes_dense()
    note = f"; {', '.join(changes)} changes what they compute" if changes else ""
    _logger.info(f"Upcycled from {source}: {filled} experts filled in {len(upcycled)} mixture layers{note}.")


def create_moe_vit(
    model_cls: type[ModelT],
    variant: str,
    pretrained: bool = False,
    filter_fn: Callable[..., dict[str, Tensor]] = upcycle_filter_fn,
    **kwargs: Any,
) -> ModelT:
    """Builds a registered model by timm's builder, upcycles dense weights, and records all options."""
    out_indices = kwargs.pop("out_indices", 3)
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
    check_weights(model)
    record_options(model, model_cls, kwargs)
    return model


def record_options(model: nn.Module, model_cls: type[VisionTransformer], given: Mapping[str, object]) -> None:
    """Records every option that shaped a network, for timm's `save_for_hf`.

    Options are the constructor arguments of the class and its bases. Two kinds are left out: classes and modules, which
    JSON cannot hold, and the rates of timm's own dropouts (`*drop_rate`), which belong to a training run.
    """
    # timm records only the caller's arguments. Defaults would be looked up again at loading, and a checkpoint would no
    # longer fit, or silently compute something else, once a default changes.
    options = _constructor_defaults(model_cls)
    options |= {name: given[name] for name in options if name in given}
    update_model_args(model, **{name: value for name, value in options.items() if _is_recorded(name, value)})


def _constructor_defaults(model_cls: type[VisionTransformer]) -> dict[str, object]:
    defaults: dict[str, object] = {}
    for cls in reversed(model_cls.__mro__):
        if issubclass(cls, VisionTransformer):
            parameters = inspect.signature(cls.__init__).parameters.values()
            defaults |= {item.name: item.default for item in parameters if item.default is not item.empty}
            for options in vars(cls).get("option_classes", ()):
                defaults |= {field.name: field.default for field in fields(options)}
    return defaults


def _is_recorded(name: str, value: object) -> bool:
    if name in _TRACKED_BY_TIMM | _NOT_ARCHITECTURE or name.endswith(("drop_rate", "drop_path_rate")):
        return False
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
