"""Building of networks with starting weights, and saving to folders that timm loads."""

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, cast

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DPN_MEAN, IMAGENET_INCEPTION_MEAN, OPENAI_CLIP_MEAN
from timm.data.model_config import resolve_input_data_config
from timm.layers import PatchEmbed
from timm.models import (
    get_model_args,
    is_model_in_modules,
    load_state_dict,
    parse_model_name,
    resolve_model_input_args,
    save_for_hf,
    split_model_name_tag,
)
from torch import Tensor, nn

from ..cli.values import fits
from ..data.bands import RGB, Bands, band_names
from ..data.domains import Domain
from ..data.inspection import deep_share, warn_if_far, warn_of_far_values
from ..data.readers.rasters import Pixels
from ..errors import ArgumentError, CheckpointError, MoeDgError, OptionError, check_name, check_regular_file
from ..layers.compat import download_from_hf
from ..layers.text_head import layer_names
from .bands import bands_of, in_chans_of, place_kernels, take_bands

CONFIG, WEIGHTS = "config.json", "model.safetensors"
UNUSED = "unused_"  # start of the names of logits that no class has
DROP_PATH = 0.1  # as in the papers' fine-tuning of vision transformers
_WITHOUT_DROP_PATH = ("resnet", "resnetv2")  # timm's modules of networks that papers fine-tune without it
_ORIGIN = ("tag", "hf_hub_id", "license", "origin_url", "paper_ids", "paper_name")  # timm's names
# Options that change the size of inputs or the training alone
_FREE_OPTIONS = {
    *("img_size", "in_chans", "num_classes", "drop_rate", "drop_path_rate", "expert_drop", "expert_reinit"),
    *("expert_perturbation", "router_noise", "metadata_drop", "coverage_points", "coverage_radius", "seen_locations"),
    *("index_points", "domain_names"),
}
_logger = logging.getLogger(__name__)
Config: TypeAlias = dict[str, Any]  # content of timm's config.json
Network: TypeAlias = Any  # timm's classes have attributes that torch.nn.Module does not declare


class DataConfig(TypedDict):
    """Preprocessing of a network's images, by timm's names. Images are (x - mean) / std, by channel."""

    input_size: tuple[int, int, int]  # (channels, height, width)
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float  # share of the image inside the crop
    crop_mode: str  # of cropping or squeezing to size


def build_network(
    name: str,
    num_classes: int | None,
    *,
    pretrained: bool = False,
    initial_checkpoint: str | os.PathLike[str] | None = None,
    img_size: int | None = None,
    bands: Bands | None = None,
    band_init: str = "mean",
    drop_path: float | None = None,
    model_kwargs: Mapping[str, object] | None = None,
) -> nn.Module:
    """Builds any timm model with its starting weights.

    Args:
        name: A timm model, with a tag or without, or `hf-hub:` and `local-dir:` sources.
        num_classes: Classes of the new classifier. A loaded classifier of that size is kept; None keeps any classifier.
        pretrained: Start from the model's published weights.
        initial_checkpoint: Start from this file instead. A mixture model is upcycled from a dense checkpoint.
        img_size: Side of the input in pixels, for models that are built for one size; None for the model's default.
        bands: The bands of images, to which timm adapts the first convolution of loaded weights; None for the model's.
            Under names, weights of RGB images keep the kernels of red, green and blue.
        band_init: Kernels of other bands: "mean" of the three, or "zero".
        drop_path: Rate of stochastic depth; None for 0.1 if the model has it, and 0 in ResNets, as in DomainBed.
        model_kwargs: Further arguments of the model.
    """
    check_name(name)
    kwargs = {"drop_path_rate": default_drop_path(name) if drop_path is None else drop_path} | dict(model_kwargs or {})
    if bands is not None and bands.count != RGB:
        kwargs = {"in_chans": bands.count, **kwargs}
    _check_kwargs(kwargs)
    source = name  # the model whose weights the network starts from: its `backbone` if it has one
    if isinstance(kwargs.get("backbone"), str) and parse_model_name(name)[0] is None:
        source = str(kwargs["backbone"])
        check_name(source)
    overlay, channels, note = _checkpoint_overlay(source, initial_checkpoint) if initial_checkpoint else (None, 0, "")
    loads = pretrained or overlay is not None
    try:
        # Also names a damaged field, where timm would fail far from the file
        own = saved_config(name)
        own_bands, is_physical = own.get("bands"), bool(own.get("physical_values"))
        start_config = saved_config(name, initial_checkpoint)
        if loads:
            _check_digest(source, initial_checkpoint)
        saved_bands = start_config.get("bands")
        options = resolve_model_input_args(source, {"img_size": img_size}, pretrained_cfg_overlay=overlay, **kwargs)
        # Built with the classes of the weights, so that timm loads strictly; the new classifier comes afterwards
        keeps_classifier = loads or num_classes is None
        classes = options["pretrained_cfg"]["num_classes"] if keeps_classifier else num_classes
        from_rgb = loads and (channels or options["pretrained_cfg"]["input_size"][0]) == RGB and not saved_bands
        if source != name or parse_model_name(name)[0] is not None:
            # timm keeps saved options with the value None only if it reads config.json itself
            size = {"img_size": options.get("img_size")}
            options = {"model_name": name, "pretrained_cfg_overlay": overlay, **size, **kwargs}
        options |= {"num_classes": classes, "pretrained": loads}
        rgb = None  # a network of RGB images whose weights are placed at the named bands
        if from_rgb and bands and bands.names:
            rgb = _create({**options, "in_chans": RGB}, optional_drop_path=drop_path is None)
            options["pretrained"] = False
        network = _create(options, optional_drop_path=drop_path is None)
    except TypeError as error:  # an OptionError of this package, or Python's own
        raise _not_taken(name, kwargs, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}{note}") from error
    except MoeDgError:
        raise
    except Exception as error:  # of constructors, which assert and divide, of files, and of the HTTP library
        if not loads:
            reason = f"cannot be built with {kwargs} ({type(error).__name__}: {error})"
            raise ArgumentError.of("model", name, f"{reason}; change --model-kwargs") from error
        raise _unusable(name, initial_checkpoint, error, note) from error
    network.pretrained_cfg.pop("state_dict", None)
    if not pretrained:
        network.pretrained_cfg = without_origin(network.pretrained_cfg)
    _check_patches(network, img_size)
    read = Bands.of(saved_bands or own_bands or (bands.names if bands else ()) or in_chans_of(network))
    network.bands = replace(read, physical=bands.physical if bands else is_physical)
    if bands:
        if rgb is not None:
            place_kernels(network, rgb, bands, band_init)
        take_bands(network, bands, keeps_statistics=bool(own_bands), from_rgb=from_rgb)
    if initial_checkpoint:
        _warn_of_options(network, start_config, initial_checkpoint)
    resized = num_classes not in (None, classes)
    if resized:
        network.reset_classifier(num_classes)
    published = "its saved weights" if name.startswith("local-dir:") else "published weights"
    start = initial_checkpoint or (published if pretrained else "random initialization")
    count = sum(parameter.numel() for parameter in network.parameters())
    classifier = "new" if resized or not loads else "same"
    _logger.info(f"{name}: {count:,} parameters from {start}, {classifier} classifier")
    return network


def _warn_of_options(network: nn.Module, config: Config, checkpoint: str | os.PathLike[str]) -> None:
    """Names options, such as top_k, that differ from those of a checkpoint whose weights have the same shapes."""
    if config.get("architecture") != getattr(network, "pretrained_cfg", {}).get("architecture"):
        return
    given, saved = get_model_args(network), config.get("model_args", {})
    # As config.json holds them, where tuples are lists
    given = json.loads(json.dumps(given, default=str))
    names = sorted((given.keys() & saved.keys()) - _FREE_OPTIONS)
    if differing := [f"{name}={given[name]!r} ({saved[name]!r})" for name in names if given[name] != saved[name]]:
        remedy = "the weights were trained with the options in parentheses; give these in --model-kwargs to keep them"
        _logger.warning(f"initial_checkpoint={str(checkpoint)!r}: {', '.join(differing)}: {remedy}")


def default_drop_path(name: str) -> float:
    """Returns the rate of stochastic depth of a network that none was given for."""
    source, architecture = parse_model_name(name)
    is_resnet = source is None and is_model_in_modules(split_model_name_tag(architecture)[0], _WITHOUT_DROP_PATH)
    return 0.0 if is_resnet else DROP_PATH


def data_config(
    network: nn.Module,
    img_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> DataConfig:
    """Returns the preprocessing of a network's images in this package: squeezed to size, bilinear, without a crop.

    Size, in pixels, and mean and standard deviation of each channel are the network's where they are not given.
    """
    given = {"img_size": img_size, "mean": mean and tuple(mean), "std": std and tuple(std)}
    args = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "squash"}
    args |= {name: value for name, value in given.items() if value}
    return cast(DataConfig, resolve_input_data_config(network, args=args))


def has_measured_statistics(network: nn.Module) -> bool:
    """Whether a network's mean was measured on its training images, as timm's published models have none of those."""
    published = (IMAGENET_DEFAULT_MEAN, IMAGENET_INCEPTION_MEAN, IMAGENET_DPN_MEAN, OPENAI_CLIP_MEAN, (0.0,) * RGB)
    return tuple(data_config(network)["mean"]) not in published


def warn_of_other_values(network: nn.Module, domains: Sequence[Domain]) -> None:
    """Warns of images with other values than those that a network was trained on, such as more than 8 bits."""
    if has_measured_statistics(network):
        config = data_config(network)
        warn_of_far_values(domains, config["mean"], config["std"])
    elif deep := [domain.name for domain in domains if domain.bands.is_rgb and deep_share(domain)]:
        _warn_of_depth(", ".join(deep))


def warn_of_other_pixels(network: nn.Module, name: str, pixels: Pixels) -> None:
    """Does as `warn_of_other_values`, for a single image such as a window of a scene."""
    if has_measured_statistics(network):
        config = data_config(network)
        warn_if_far(name, pixels, config["mean"], config["std"])
    elif isinstance(pixels, Tensor) and bands_of(network).is_rgb:
        _warn_of_depth(name)


def _warn_of_depth(names: str) -> None:
    remark = "have more than 8 bits, divided by their type's maximum, and the model was trained on images of 8 bits"
    _logger.warning(f"images of {names} {remark}; convert them as its training images were")


def without_origin(config: Mapping[str, object]) -> dict[str, object]:
    """Returns a pretrained configuration without the origin of weights that the network does not have."""
    return {name: value for name, value in config.items() if name not in _ORIGIN}


def checkpoint_activations(network: Network) -> None:
    """Turns on gradient checkpointing: activations are recomputed in the backward pass."""
    try:
        network.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:
        name = type(network).__name__
        raise ArgumentError.of("grad_checkpointing", True, f"{name} does not support it ({error})") from error


def lay_channels_last(network: nn.Module) -> None:
    """Stores four-dimensional weights channels last in memory, which activations follow from the first convolution on.

    The `state_dict` keeps the usual layout, so that saved files are the same.
    """
    network.to(memory_format=torch.channels_last)
    network.register_state_dict_post_hook(_show_contiguous)  # safetensors takes no other layout


def _show_contiguous(network: nn.Module, state: dict[str, object], *_: object) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.contiguous()


def save_network(network: nn.Module, folder: Path, classes: Sequence[str], config: DataConfig) -> None:
    """Writes model.safetensors, and config.json with its digest, class names, bands, preprocessing and expert mode.

    `timm.create_model("local-dir:FOLDER", pretrained=True)` loads the folder, which is created if needed. The network
    is not wrapped. The classes are in the order of the logits, and the preprocessing is that of `data_config`. Logits
    beyond the classes are called unused_N.
    """
    count = getattr(network, "num_classes", 0) if classes else 0
    classes = [*classes, *(f"{UNUSED}{index}" for index in range(len(classes), count))]
    mode = {"expert_mode": network.expert_mode} if hasattr(network, "expert_mode") else {}
    images = bands_of(network)
    bands: dict[str, object] = {"bands": list(images.names)} if images.names else {}
    bands |= {"physical_values": True} if images.physical else {}
    save_for_hf(
        network,
        str(folder),
        model_config={"label_names": list(classes), **mode, **bands},
        safe_serialization=True,
        data_config=dict(config),
    )
    saved = json.loads((folder / CONFIG).read_text())
    del saved["model_args"]["num_classes"]  # transformers' TimmWrapper fails on a second one beside the top level's
    saved["weights_sha256"] = sha256(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(saved, indent=2))


def sha256(*files: Path) -> str:
    """Returns the SHA-256 of the contents of files, one after the other, hexadecimal."""
    digest = hashlib.sha256()
    for file in files:
        check_regular_file(file)
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest()


def read_config(path: Path) -> Config:
    """Reads a saved network's config.json and checks the fields that this package uses, with a `CheckpointError`."""
    try:
        check_regular_file(path)
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, f"cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise _damaged(path, "holds no JSON object")
    # timm would fail on these far from the file, or not at all
    checks = {
        "architecture": (isinstance(config.get("architecture"), str), "a model's name"),
        "model_args": (isinstance(config.get("model_args", {}), dict), "a table"),
        "pretrained_cfg": (
            _is_preprocessing(config.get("pretrained_cfg", {})),
            "a table, with lists of numbers as mean, std and input_size",
        ),
        "label_names": (_are_names(config.get("label_names")), "a list of class names, or a table of them by position"),
        "bands": (config.get("bands") is None or _are_bands(config["bands"]), "a list of the bands' full names"),
        "physical_values": (config.get("physical_values") in (None, True, False), "true or false"),
        "expert_mode": (config.get("expert_mode") in (None, "routed", "shared"), "'routed' or 'shared'"),
    }
    for name, (is_valid, expected) in checks.items():
        if not is_valid:
            raise _damaged(path, f"{name}={config.get(name)!r:.80}: must be {expected}")
    return {"pretrained_cfg": {}, **config}


def saved_config(name: str, checkpoint: str | os.PathLike[str] | None = None) -> Config:
    """Reads the config.json beside a file of weights, else of a `local-dir:` or `hf-hub:` source; others have none."""
    if checkpoint:
        beside = Path(checkpoint).with_name(CONFIG)
        return read_config(beside) if beside.is_file() else {}
    source, location = parse_model_name(name)
    if source is None:
        return {}
    if source == "hf-hub":
        return read_config(Path(download_from_hf(location, CONFIG)))
    folder = Path(location)
    refuse_ensemble(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.suffix in (".safetensors", ".bin") and not path.is_file():
            raise _damaged(path, "is not a regular file")
    return read_config(folder / CONFIG)


def ensemble_members(folder: Path) -> list[Path]:
    """Returns the folders of an ensemble's networks, which `average --method ensemble` numbers; none for others."""
    if (folder / CONFIG).exists():
        return []
    members = [path.parent for path in folder.glob(f"*/{CONFIG}") if path.parent.name.isdecimal()]
    return sorted(members, key=lambda member: int(member.name))


def refuse_ensemble(folder: Path) -> None:
    """Raises an `ArgumentError` for the folder of an ensemble, where a single network is needed."""
    if members := ensemble_members(folder):
        remedy = f"is an ensemble of {len(members)} networks, for evaluate and predict alone; give one: {members[0]}"
        raise ArgumentError.of("model", str(folder), remedy)


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r}: {reason}; give a folder or repository that timm's save_for_hf wrote")


def _is_preprocessing(settings: object) -> bool:
    if not isinstance(settings, dict):
        return False
    return all(fits(settings.get(name) or [], [int | float]) for name in ("mean", "std", "input_size"))


def _are_names(names: object) -> bool:
    if isinstance(names, dict):
        return all(position.isdecimal() for position in names) and _are_names(list(names.values()))
    return names is None or fits(names, [str | int])


def _are_bands(names: object) -> bool:
    try:
        return isinstance(names, list) and list(band_names(names)) == names
    except (MoeDgError, AttributeError, TypeError):  # of entries that are no text
        return False


def _check_patches(network: nn.Module, img_size: int | None) -> None:
    """Refuses a size that patches do not divide, whose last pixels would be cut off."""
    embedding = getattr(network, "patch_embed", None)
    patch = max(embedding.patch_size) if isinstance(embedding, PatchEmbed) else 1
    if img_size is not None and img_size % patch:
        near = sorted({max(patch, img_size // patch * patch), -(-img_size // patch) * patch})
        remedy = f"is no multiple of the model's patches of {patch} pixels; give {' or '.join(map(str, near))}"
        raise ArgumentError.of("img_size", img_size, remedy)


def _check_kwargs(kwargs: Mapping[str, object]) -> None:
    taken = [key for key in ("num_classes", "pretrained", "pretrained_cfg", "checkpoint_path") if key in kwargs]
    if taken:
        raise ArgumentError.of("model_kwargs", dict(kwargs), f"{', '.join(taken)} are set by options of their own")
    rate = kwargs["drop_path_rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ArgumentError.of("drop_path_rate", rate, "give a rate from 0 to below 1")


def _not_taken(name: str, kwargs: Mapping[str, object], error: TypeError) -> ArgumentError:
    columns = kwargs.get("metadata_columns")
    if isinstance(columns, Mapping) and "metadata_columns" in str(error):  # given by --metadata-columns
        remedy = f"{name} reads none; leave it out, or train a model that does, such as moge_tiny"
        return ArgumentError.of("metadata_columns", list(columns), remedy)
    if "router" in kwargs and ("'router'" in str(error) or str(error).startswith("router=")):
        remedy = f"{name} has no token-routed experts; leave it out, or train a model that has, such as gmoe"
        return ArgumentError.of("router", kwargs["router"], remedy)
    # Options that the user did not type are of the model's config.json, so the message has to name the model.
    if isinstance(error, OptionError) and str(error).partition("=")[0] in kwargs:
        return error
    return ArgumentError.of("model_kwargs", kwargs, f"{name} does not take them ({error})")


def _checkpoint_overlay(name: str, path: str | os.PathLike[str]) -> tuple[dict[str, object], int, str]:
    """Points a model's configuration at a file. Returns the file's channels too, and a remark for errors, or ""."""
    try:
        check_regular_file(path)
        weights = load_state_dict(str(path))
    except Exception as error:  # files of other kinds fail anywhere in the readers
        raise _unusable(name, path, error) from error
    weights = weights.get("model_dict", weights)  # DomainBed's checkpoints are nested
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise _unusable(name, path, TypeError("holds something else than tensors by name"))
    cfg = resolve_model_input_args(name)["pretrained_cfg"]
    heads, stems = (_weights_of(weights, cfg.get(layer)) for layer in ("classifier", "first_conv"))
    rows = next((head.shape[0] for head in heads if head.ndim), 0)
    channels = next((stem.shape[1] for stem in stems if stem.ndim == 4), RGB)
    overlay = {"file": str(path), "source": "", "num_classes": rows, "label_offset": 0}
    # Wrappers put their own name before those of all weights, such as "teacher.backbone."
    prefix = "".join(os.path.commonprefix(list(weights)).rpartition(".")[:2])  # noqa: RUF071 (cut at a dot)
    if prefix and any(f"{prefix}{layer}.weight" in weights for layer in layer_names(cfg.get("first_conv"))):
        _logger.info(f"initial_checkpoint={str(path)!r}: {prefix!r} is left out of the names of all weights")
        return overlay | {"state_dict": {key.removeprefix(prefix): weights[key] for key in weights}}, channels, ""
    return overlay, channels, f". All names begin with {prefix!r}" if prefix else ""


def _check_digest(source: str, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuses weights in a folder on this machine that are not those that its config.json was written with."""
    path = Path(checkpoint or Path(source.removeprefix("local-dir:"), WEIGHTS))
    expected = saved_config(source, checkpoint).get("weights_sha256") if path.is_file() else None
    if path.name == WEIGHTS and expected and sha256(path) != expected:
        remedy = f"restore the file, or remove weights_sha256 from {CONFIG} beside it to use it as it is"
        raise CheckpointError(f"{str(path)!r}: was damaged or changed after the network was saved; {remedy}")


def _weights_of(weights: Mapping[str, Tensor], layers: str | Sequence[str] | None) -> list[Tensor]:
    ends = tuple(f".{layer}.weight" for layer in layer_names(layers))
    return [value for key, value in weights.items() if f".{key}".endswith(ends)]


def _create(options: dict[str, Any], optional_drop_path: bool) -> Any:
    """Calls timm's factory; leaves stochastic depth out if the model has none and the caller did not set it."""
    try:
        return timm.create_model(**options)
    except TypeError as error:
        if not (optional_drop_path and "drop_path_rate" in str(error)):
            raise
    options = {key: value for key, value in options.items() if key != "drop_path_rate"}
    return timm.create_model(**options)


def _unusable(name: str, path: str | os.PathLike[str] | None, error: Exception, note: str = "") -> CheckpointError:
    reason = f"{type(error).__name__}: {error}"
    if path is None:
        remedy = "check the connection and the Hub's cache, or give a file with --initial-checkpoint"
        return CheckpointError(f"pretrained=True: the weights of {name} cannot be had ({reason}); {remedy}")
    remedy = "give a checkpoint of this model, or of its dense counterpart"
    return CheckpointError(f"initial_checkpoint={str(path)!r}: cannot start {name} ({reason}); {remedy}{note}")
