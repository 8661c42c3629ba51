"""Building of registered models, with every option recorded for the saved configuration."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..compat import update_model_args
from ..layers.encoders.geoclip import check_weights
from ._load import upcycle_filter_fn

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
