"""Identity of a run: its format, its recorded arguments, their comparison with others, and the settings in effect.

Settings in effect are the values that a run spells out, and the defaults of its data set, method and model.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data.model_config import get_model_input_config
from torch import nn

from .. import __version__
from ..algorithms import ALGORITHMS, AVERAGING
from ..algorithms.hparams import LOSS_COEFFICIENTS
from ..cli.arguments import read_yaml
from ..cli.values import LOCAL, TEXT
from ..data import BENCHMARKS, Benchmark
from ..data.bands import band_settings
from ..data.inspection import difference, is_fingerprint
from ..errors import ArgumentError, FormatError, MoeLayersError
from ..layers import RoutedMlp
from ..layers.compat import BatchNorm
from ..models.gmoe import resolve_moe_layers
from ..networks.build import default_drop_path, sha256
from .options import (
    DEFAULTS,
    FILLED_IN,
    IDENTITY,
    MEASURED,
    NO_EFFECT_ON_RESULTS,
    ONCE,
    Arguments,
    canonical_names,
    mistyped,
    options_with,
)

# Options that follow from the data set and the hyper-parameter seed unless they are given
OPEN = frozenset(("lr", "weight_decay", "batch_size", "num_classes", *LOSS_COEFFICIENTS))
FORMAT = 3  # of args.yaml, records and checkpoints; raised when their content changes
_WORLD_SIZES = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # of launchers
VERSIONS = {"torch": str(torch.__version__), "timm": timm.__version__, "timm_moe_dg": __version__}


def stamp() -> dict[str, object]:
    """Returns the format number, and the versions that a result may depend on."""
    return {"format": FORMAT, "versions": dict(VERSIONS)}


def check_format(stamped: Arguments, source: str) -> None:
    """Refuses a table with another format than `FORMAT`. DomainBed's records and handwritten files have none."""
    number = stamped.get("format", FORMAT)
    if number != FORMAT:
        versions = stamped.get("versions")
        version = versions.get("timm_moe_dg", "unknown") if isinstance(versions, dict) else "unknown"
        raise FormatError(
            f"{source}: has format {number!r}, written by timm_moe_dg {version}, and this version reads format "
            f"{FORMAT} alone; use the version that wrote it"
        )


def read_arguments(path: Path, argument: str) -> Arguments:
    """Reads the arguments of a run from its args.yaml. `argument` is the one that named it, for the error message."""
    table = _read_table(str(path), argument)
    if wrong := mistyped(table):
        raise ArgumentError.of(argument, str(path), f"{wrong}; restore the file")
    digests = table.get("domain_digests", [])
    if not is_fingerprint(digests) or (not digests and "format" in table):
        raise ArgumentError.of(argument, str(path), "domain_digests: must be tables with names; restore the file")
    return table


def _read_table(path: str, argument: str) -> Arguments:
    table = read_yaml(path, argument)
    check_format(table, f"{argument}={path!r}")
    return canonical_names(table)


def read_repeatable(path: str, argument: str) -> Arguments:
    """Reads option values from a configuration file, or from a run's args.yaml those that its user gave."""
    table = _read_table(path, argument)
    if "format" not in table:  # written by hand, so that all entries are meant
        return table
    filled_in = table.get("filled_in")
    # Values that were filled in are left out, because another seed or data set fills in others
    left_out = [*options_with(ONCE | MEASURED), *(filled_in if isinstance(filled_in, list) else ())]
    return {name: value for name, value in table.items() if name not in left_out}


def model_arguments(args: Arguments) -> dict[str, Any]:
    """Returns the arguments of a run's network, with its `--router`."""
    router = {"router": args["router"]} if args.get("router") else {}
    return {**dict(args.get("model_kwargs") or {}), **router}


def _by_option(args: Arguments) -> Arguments:
    """Returns arguments under the names of options, which a router among `model_kwargs` has too."""
    args = canonical_names(args)
    kwargs: dict[str, Any] = dict(_table(args.get("model_kwargs")))  # type: ignore[call-overload]
    return {**args, "router": kwargs.pop("router"), "model_kwargs": kwargs} if "router" in kwargs else args


def settings(args: Arguments) -> dict[str, object]:
    """Returns the arguments that are the same for all seeds and held-out domains, with tables flattened.

    Options that follow from the data set and the seeds are among them if their user gave them. With epochs, steps are
    not: they follow from the number of images, which differs between held-out domains.
    """
    given = OPEN - {*args["filled_in"]} if "filled_in" in args else frozenset()
    left_out = {*NO_EFFECT_ON_RESULTS, *options_with(IDENTITY)} - given
    left_out = left_out - {"epochs"} | {"steps"} if args.get("epochs") is not None else left_out
    flat: dict[str, object] = {}
    for name, value in _by_option(args).items():
        if name not in left_out:
            value = _table(value) if name in ("hparams", "model_kwargs") else value
            flat |= value if isinstance(value, Mapping) else {name: value}
    if args.get("processes") and depends_on_processes(args):
        flat["processes"] = args["processes"]
    # These win over --hparams
    return flat | {name: args[name] for name in sorted(given & args.keys())}


def depends_on_processes(args: Arguments) -> bool:
    """Whether a loss or layer of a run compares the images of its own process alone, as far as is known."""
    method, network = ALGORITHMS.get(args["algorithm"]), default_network(str(args.get("model")))
    kinds = (RoutedMlp,) if args.get("freeze_bn") else (RoutedMlp, BatchNorm)
    if method is None or network is None:
        return True
    return method.COMPARES_IMAGES or any(isinstance(module, kinds) for module in network.modules())


def _table(value: object) -> object:
    """Reads the JSON text that DomainBed's records have in place of a table; other values are returned as they are."""
    with suppress(TypeError, ValueError):
        return json.loads(value) or {}  # type: ignore[arg-type]
    return value or {}


def with_defaults(args: Arguments) -> dict[str, object]:
    """Returns a run's recorded arguments, completed by the defaults of options that it did not record."""
    return {**DEFAULTS, **canonical_names(args)}


def changed_options(args: Arguments) -> dict[str, object]:
    """Returns the options that a user gave a run and that affect its results, and `data_dir`."""
    # With epochs, the steps that follow from them are among the values that were filled in
    left_out = {*NO_EFFECT_ON_RESULTS, *args.get("filled_in", ())} - {"data_dir", "epochs"}
    return {
        name: value
        for name, value in canonical_names(args).items()
        if name in DEFAULTS
        and name not in left_out
        # No test domains are not the same as those that are filled in
        and (canonical_json(value) != canonical_json(DEFAULTS[name]) or (name == "test_domains" and value == []))
    }


def differences(planned: Arguments, recorded: Arguments, benchmark: Benchmark) -> list[str]:
    """Compares options that a run would be started with to recorded ones, and returns a phrase for each difference."""
    followed = FILLED_IN.intersection(recorded.get("filled_in", FILLED_IN))  # others were given to that run
    recorded = with_defaults(_by_option(recorded))
    planned = {**_by_option(planned), **band_settings(planned.get("bands"), planned.get("in_chans"))}
    has_epochs = planned.get("epochs") is not None  # from which the recorded steps follow
    ignored = NO_EFFECT_ON_RESULTS - {"epochs"} | {"steps"} if has_epochs else NO_EFFECT_ON_RESULTS
    filled = {name: value for name, value in benchmark_defaults(planned, benchmark).items() if planned[name] is None}
    return [
        f"{name}: {recorded[name]!r} there, {value!r} planned"
        for name, value in {**planned, **filled}.items()
        if name not in ignored
        and not (value is None and name in followed)
        and not same_setting(name, value, recorded[name])
    ]


def benchmark_defaults(planned: Arguments, benchmark: Benchmark) -> dict[str, object]:
    """Returns the values of options that the benchmark alone decides if they are not given."""
    names = ("steps", "split_by_photograph")
    defaults: dict[str, object] = {"img_size": benchmark.image_size, **{name: vars(benchmark)[name] for name in names}}
    # SWAD has an evaluation frequency of its own
    if not str(planned["averaging"]).startswith("swad"):
        defaults["eval_freq"] = benchmark.checkpoint_freq
    if planned["hparams_seed"]:
        return defaults
    hparams = {**benchmark.hparams, **planned["hparams"]}
    rates = {name: hparams[name] for name in ("lr", "weight_decay", "batch_size")}
    return {**defaults, **LOSS_COEFFICIENTS, **rates}


def same_setting(name: str, first: object, second: object) -> bool:
    """Whether two values of an option have the same effect, such as 1 and 1.0, or two spellings of a path."""
    if repr(first) == repr(second):  # a quick check first: a sweep compares 100,000 values
        return True
    return setting_text(name, first) == setting_text(name, second)


def setting_text(name: str, value: object) -> str:
    """Returns `canonical_json` of an option's value, with the path of `initial_checkpoint` resolved."""
    is_path = name == "initial_checkpoint" and isinstance(value, str)
    return canonical_json(os.path.realpath(value) if is_path else value)  # type: ignore[call-overload]


def canonical_json(value: object) -> str:
    """Returns text that is equal for values with the same meaning.

    These are 1, 1.0 and True; tuples and lists; pairs and tables; empty containers and None; and the spellings of a
    path after "local-dir:" or "text:".
    """
    return json.dumps(_canonical(value), sort_keys=True)


def _canonical(value: object) -> object:
    if value in ((), [], {}):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**53 else value
    if isinstance(value, list | tuple):
        is_table = all(isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) for item in value)
        return _canonical(dict(value)) if is_table else [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    prefix = next((word for word in (LOCAL, TEXT) if str(value).startswith(word)), None)
    if prefix:
        return prefix + os.path.realpath(str(value).removeprefix(prefix))
    return value if value is None else str(value)


def method_of(args: Arguments) -> str:
    """Describes the architecture and the training method of a run, for `Calibration.method`, which may be published.

    Local folders and files have the digest of their weights in place of their path.
    """
    names = ("algorithm", "averaging", "model", "average_method")
    texts = [str(_without_path(args[name], args)) for name in names if args.get(name)]
    if options := model_arguments(args):
        texts.append(canonical_json({name: _without_path(value, args) for name, value in options.items()}))
    return ", ".join(texts)


def _without_path(value: object, args: Arguments) -> object:
    source, _, place = str(value).partition(":")
    is_path = f"{source}:" == LOCAL or os.path.isabs(place)
    return f"weights {args.get('weights_sha256')}" if is_path else value


def check_unchanged(recorded: Arguments, given: Arguments) -> None:
    """Checks that a run is resumed with the arguments that it was started with, as far as they affect results."""
    before, now = (dict(_by_option(arguments)) for arguments in (recorded, given))
    if before.get("weights_sha256") == now.get("weights_sha256") is not None:
        # The same file under another name
        for name in ("initial_checkpoint", "head"):
            now[name] = now.get(name) and before.get(name)
    names = sorted((before.keys() | now.keys()) - NO_EFFECT_ON_RESULTS)
    # Options first: other metadata columns, for instance, make other data
    for name in sorted(names, key=("data", "weights_sha256").__contains__):
        old, new = (arguments.get(name, DEFAULTS.get(name)) for arguments in (before, now))
        if not same_setting(name, old, new):
            source, reason = name, f"the run to resume was started with {old!r}; use that"
            if name == "data":
                change = difference(recorded.get("domain_digests") or (), given.get("domain_digests") or ())
                # The whole may differ and no part that both have, such as the content of images
                change = change or "its version recorded less of the data; finish it there"
                source, reason = "data_dir", f"the run to resume was started on other data: {change}"
            elif name == "weights_sha256":
                check_weights_files(recorded, given)
            raise ArgumentError.of(source, now.get(source), f"{reason}, or start another run with --experiment")


def check_weights_files(recorded: Arguments, given: Arguments) -> None:
    """Checks that the files of the weights that a run started from are as they were then."""
    new = given.get("weights_sha256")
    if recorded.get("weights_sha256") == new:
        return
    source = "initial_checkpoint" if given.get("initial_checkpoint") else "model"
    weights = f"other weights{' or texts' if given.get('head') else ''} under this name"
    change = weights if new else "a file of weights that is not there"
    remedy = f"the run was started from {change}; restore the file, or start another run with --experiment"
    raise ArgumentError.of(source, given.get(source), remedy)


def weights_files(args: Arguments) -> list[Path]:
    """Returns the local files that a run starts from: weights of its network, texts, and a location encoder's."""
    kwargs = dict(args.get("model_kwargs") or {})
    source = str(kwargs.get("backbone") or args.get("model"))
    folder = Path(source.removeprefix(LOCAL))
    published = [folder / name for name in ("model.safetensors", "pytorch_model.bin")]
    saved = published if args.get("pretrained") and source.startswith(LOCAL) else []
    files = [Path(args["initial_checkpoint"])] if args.get("initial_checkpoint") else saved
    texts = [Path(args["head"].removeprefix(TEXT))] if args.get("head") else []
    encoder = str(kwargs.get("metadata_encoder") or "")
    encoders = [Path(encoder.partition(":")[2])] if ":" in encoder else []  # satclip:FILE
    return [file for file in files if file.is_file()][:1] + [file for file in texts + encoders if file.is_file()]


def measured_settings(args: Arguments) -> dict[str, object]:
    """Returns the settings that no option holds: the digest of `weights_files`, and the launcher's, unless usual."""
    weights = weights_files(args)
    measured: dict[str, object] = {"weights_sha256": sha256(*weights) if weights else None}
    if (processes := launched_processes(os.environ) or 1) > 1:
        measured["processes"] = processes
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return measured if args["amp_dtype"] or precision in ("", "no") else {**measured, "mixed_precision": precision}


def launched_processes(environment: Mapping[str, str]) -> int | None:
    """Returns the number of processes that a launcher announces; None without one."""
    return next((int(environment[name]) for name in _WORLD_SIZES if name in environment), None)


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
    of_methods = {name: value for method in methods if method for name, value in method.HPARAMS.items()}
    return {**LOSS_COEFFICIENTS, **(benchmark.hparams if benchmark else {}), **of_methods}


@cache
def default_network(name: str) -> nn.Module | None:
    """Builds a registered model without weights; None for saved networks."""
    architecture = name.partition(".")[0]
    if ":" in name or not timm.is_model(architecture):
        return None
    with torch.device("meta"):
        return timm.create_model(architecture)


@cache
def model_defaults(name: str) -> dict[str, object]:
    """Returns the arguments that a registered model is built with by default. Saved networks have none here."""
    network = default_network(name)
    if network is None:
        return {}
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
