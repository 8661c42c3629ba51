"""config.json of a saved network, as timm writes and reads it; whoever made the checkpoint may have written anything.

timm takes its fields as they come: a list where it expects a table is an error somewhere inside, and a standard
deviation of 0 one at the first image. Here each field that this package or timm makes use of is looked at first.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from timm.models import parse_model_name
from timm.models._hub import download_from_hf

from ..data.pixels import RGB
from ..errors import CheckpointError
from .reach import hub_or_cache

CONFIG = "config.json"
Config = dict[str, Any]  # JSON of timm's
_SHOWN = 80  # characters of a value in a message


def read_config(path: Path) -> Config:
    """Reads a configuration and checks the types and ranges of its fields.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is no such file; the message names it, and the field.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refusal(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise _refusal(path, "holds no JSON object")
    if not isinstance(config.get("architecture"), str):
        raise _refusal(path, f"architecture={_shown(config.get('architecture'))}: must be a model's name")
    for name in ("model_args", "pretrained_cfg"):  # timm looks into them where they are there at all
        if not isinstance(config.get(name, {}), dict):
            raise _refusal(path, f"{name}={_shown(config[name])}: must be a table")
    _check(path, config, _FIELDS)
    images = config.get("pretrained_cfg", config)  # older files have no table of their own for it
    _check(path, images, _IMAGES)
    bands = config.get("model_args", {}).get("in_chans") or (images.get("input_size") or (RGB,))[0]
    _check(path, images, {name: _one_for_each(bands) for name in ("mean", "std")})
    return config


def saved_config(name: str) -> Config:
    """Reads the configuration of a `local-dir:` or `hf-hub:` source; empty for a model that is no source.

    Raises:
        CheckpointError: See `read_config`.
    """
    source, place = parse_model_name(name)
    if source is None:
        return {}
    with hub_or_cache() if source == "hf-hub" else nullcontext():
        return read_config(Path(place, CONFIG) if source == "local-dir" else Path(download_from_hf(place, CONFIG)))


def _check(path: Path, table: Config, fields: Mapping[str, tuple[Callable[[object], bool], str]]) -> None:
    for name, (fits, wanted) in fields.items():
        value = table.get(name)
        if value is not None and not fits(value):
            raise _refusal(path, f"{name}={_shown(value)}: must be {wanted}")


def _refusal(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r}: {reason}; give a folder or repository that timm's save_for_hf wrote")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _is_above_zero(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value > 0


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _are_deviations(value: object) -> bool:
    return isinstance(value, list) and _are_numbers(value) and min(value) > 0


def _are_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_number, value))


def _one_for_each(channels: int) -> tuple[Callable[[object], bool], str]:
    """Numbers of channels; timm takes the mean of those of RGB for a model of others."""
    return lambda value: isinstance(value, list) and len(value) in (1, RGB, channels), f"1 number, or {channels}"


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(isinstance(side, int) and side > 0 for side in value)


def _are_names(value: object) -> bool:
    if isinstance(value, dict):  # position -> name
        return all(key.isdecimal() for key in value) and _are_names(list(value.values()))
    return isinstance(value, list) and all(isinstance(name, str | int) for name in value)


def _are_layers(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


_NAMES = (_are_names, "a list of class names, or a table of them by position")
_FIELDS = MappingProxyType(
    {
        "num_classes": (_is_count, "a whole number of 0 or more"),
        "label_names": _NAMES,
        "expert_mode": (lambda value: value in ("routed", "shared"), "'routed' or 'shared'"),
    }
)
_IMAGES = MappingProxyType(
    {
        "mean": (_are_numbers, "one finite number for each channel"),
        "std": (_are_deviations, "one number above 0 for each channel"),
        "input_size": (_are_sizes, "channels, height and width, whole numbers above 0"),
        "crop_pct": (_is_above_zero, "a number above 0"),
        "interpolation": (lambda value: isinstance(value, str), "a name"),
        "label_names": _NAMES,
        "first_conv": (_are_layers, "a layer's name, or a list of them"),
        "classifier": (_are_layers, "a layer's name, or a list of them"),
    }
)
