"""How a registered model is built, and what it says about its architecture once it is saved: every option.

timm records a caller's arguments in `config.json`. What the registered name or the class filled in would be looked up
again at loading, and a checkpoint would stop fitting, or silently compute something else, once such a default changes.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from timm.models import build_model_with_cfg
from timm.models._input import update_model_args
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

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
}

# timm records these itself, as they are when the model is saved
_TRACKED_BY_TIMM = {"img_size", "in_chans", "num_classes", "global_pool"}
# How a network is drawn and where it lies is over once there are weights
_NOT_ARCHITECTURE = {"weight_init", "fix_init", "device", "dtype"}


def create_moe_vit(
    model_cls: type[ModelT],
    variant: str,
    pretrained: bool = False,
    filter_fn: Callable[..., dict[str, Tensor]] = upcycle_filter_fn,
    **kwargs: Any,
) -> ModelT:
    """Builds a registered model through timm's builder, upcycling what it loads, and records all of its options.

    Args:
        model_cls: The model's class.
        variant: Registered name.
        pretrained: Load the weights that the model's cfg names.
        filter_fn: Fits a checkpoint to the model; timm calls it with both.
        **kwargs: Of the class and of timm's builder.

    Returns:
        The model, or timm's feature wrapper around it with `features_only=True`.
    """
    out_indices = kwargs.pop("out_indices", 3)
    model = build_model_with_cfg(
        model_cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **kwargs,
    )
    record_options(model, model_cls, kwargs)
    return model


def record_options(model: nn.Module, model_cls: type[VisionTransformer], given: Mapping[str, object]) -> None:
    """Writes down, for timm's `save_for_hf`, every option that shaped a network.

    Layers given as classes or modules cannot be written to JSON and are left out, as are the rates of timm's own
    dropouts (`*drop_rate`), which belong to a training run.

    Args:
        model: The network.
        model_cls: Its class; options are the constructor arguments of the class and its bases, up to timm's.
        given: What the constructor was given, other arguments among it.
    """
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
