"""Settings in effect: the values that a run spells out, and the defaults of its data set, method and model."""

from contextlib import suppress
from functools import cache

import timm
import torch
from timm.data.model_config import get_model_input_config

from ..algorithms import ALGORITHMS, AVERAGING
from ..data import BENCHMARKS
from ..errors import MoeLayersError
from ..models._moe_vit import resolve_moe_layers
from ..networks.build import default_drop_path
from .options import DEFAULTS, Arguments
from .run_identity import OPEN, setting_text, settings
from .search_space import LOSS_COEFFICIENTS


def in_effect(args: Arguments, *, drawn: bool = False) -> dict[str, object]:
    """Returns the settings of a run by name: options, hyper-parameters and model arguments.

    Hyper-parameters that were drawn have their defaults here, or no value with `drawn`.
    """
    given = spelled_out(args)
    recorded = ("num_classes",) if drawn or args["hparams_seed"] else OPEN
    followed = {name: args[name] for name in recorded if args.get(name) is not None}
    values = {**default_settings(args), **followed, **given}
    if "epochs" in given:
        values.pop("steps")  # which follow from them
    left_out = default_hparams(args).keys() - given.keys() if drawn else ()
    return {name: value for name, value in values.items() if name not in left_out}


def spelled_out(args: Arguments) -> dict[str, object]:
    """Returns the settings that a run has other than None, which stands for the default."""
    return {name: value for name, value in settings(args).items() if value is not None}


def default_settings(args: Arguments) -> dict[str, object]:
    """Returns the settings that a run has by its data set, method and model, unless it spells out others."""
    benchmark = BENCHMARKS.get(args["dataset"])
    of_data: dict[str, object] = {"split_by_photograph": bool(benchmark and benchmark.split_by_photograph)}
    of_data |= {"steps": benchmark.steps, "img_size": benchmark.image_size} if benchmark else {}
    of_data = {name: value for name, value in of_data.items() if value is not None}
    return {**settings(DEFAULTS), **model_defaults(str(args.get("model"))), **of_data, **default_hparams(args)}


def default_hparams(args: Arguments) -> dict[str, object]:
    """Returns the hyper-parameters that a run has by its data set and method."""
    benchmark = BENCHMARKS.get(args["dataset"])
    methods = (ALGORITHMS.get(args["algorithm"]), AVERAGING.get(str(args.get("averaging"))))
    tables = [LOSS_COEFFICIENTS, benchmark.hparams if benchmark else {}, *(m.HPARAMS for m in methods if m)]
    return {name: value for table in tables for name, value in table.items()}


@cache
def model_defaults(name: str) -> dict[str, object]:
    """Returns the arguments that a registered model is built with by default. Saved networks have none here."""
    architecture = name.partition(".")[0]
    if ":" in name or not timm.is_model(architecture):
        return {}
    with torch.device("meta"):
        network = timm.create_model(architecture)
    size = get_model_input_config(network)["input_size"][-1]
    return {"img_size": size, "drop_path": default_drop_path(name), **getattr(network, "_model_args", {})}


def comparable(name: str, values: dict[str, object]) -> str:
    """Returns text that is equal for settings with the same effect, such as moe_layers='last_two' and (8, 10) of 12."""
    value, depth = values.get(name), values.get("depth")
    if name == "moe_layers" and isinstance(depth, int):
        with suppress(MoeLayersError):  # of a network that is read from a file
            value = resolve_moe_layers(value, depth)  # type: ignore[arg-type]
    if name == "initial_checkpoint" and values.get("weights_sha256"):
        value = None  # the same file may have several names
    return setting_text(name, value)
