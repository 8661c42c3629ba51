"""What a saved model says about its architecture: every option, not only those that its caller gave.

timm records a caller's arguments in `config.json`. What the registered name or the class filled in would be looked up
again at loading, and a checkpoint would stop fitting, or silently compute something else, once such a default changes.
"""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from timm.models._input import update_model_args
from timm.models.vision_transformer import VisionTransformer
from torch import nn

# timm records these itself, as they are when the model is saved
_TRACKED_BY_TIMM = {"img_size", "in_chans", "num_classes", "global_pool"}
# How a network is drawn and where it lies is over once there are weights
_NOT_ARCHITECTURE = {"weight_init", "fix_init", "device", "dtype"}


def record_options(model: nn.Module, model_cls: type[VisionTransformer], given: Mapping[str, Any]) -> None:
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


def _constructor_defaults(model_cls: type[VisionTransformer]) -> dict[str, Any]:
    defaults: dict[str, Any] = {}
    for cls in reversed(model_cls.__mro__):
        if issubclass(cls, VisionTransformer):
            parameters = inspect.signature(cls.__init__).parameters.values()
            defaults |= {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults


def _is_recorded(name: str, value: Any) -> bool:
    if name in _TRACKED_BY_TIMM | _NOT_ARCHITECTURE or name.endswith(("drop_rate", "drop_path_rate")):
        return False
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True
