"""Pretrained SatCLIP location encoders (Klemmer et al., 2025), frozen: MoGE's plug-in encoder (section 2.2, ii).

The released files are training checkpoints: a dict whose `hyper_parameters` give the sizes (`legendre_polys`,
`capacity`, `num_hidden_layers`, `embed_dim`) and whose `state_dict` holds an image tower besides the location network,
`model.location.nnet.layers.{0,1}.{weight,bias}` and `model.location.nnet.last_layer.{weight,bias}`, in float64.
They are pickles, and read here with torch's weights-only reader, which builds tensors and plain containers and runs
nothing. `save_satclip` writes the network alone as safetensors, which reads as well.

SatCLIP's own harmonics, closed forms in float64, lose their digits toward the poles at L = 40: against stable
recurrences they are off by 4e-5 below 45 degrees of latitude, by 1e-2 below 60, by up to 0.6 beyond. The released L40
weights were trained on those values. Here the harmonics are right everywhere, so that an L40 encoder embeds places at
high latitudes as SatCLIP's program does not.
"""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...errors import CheckpointError
from .location import LocationEncoder

_PREFIX = "model.location.nnet."
_LAYERS = {"layers.0": "first", "layers.1": "hidden", "last_layer": "last"}
_SIZES = {"legendre_polys": "degrees", "capacity": "hidden_features", "embed_dim": "out_features"}
_KINDS = {
    "le_type": "sphericalharmonics",
    "pe_type": "siren",
    "harmonics_calculation": "analytic",
    "num_hidden_layers": 2,
}


class SatClipEncoder(LocationEncoder):
    """A `LocationEncoder` with SatCLIP's harmonics whose weights are given and stay as they are.

    It is always in evaluation mode: dropout would add noise to what nobody trains.
    """

    def __init__(self, degrees: int, hidden_features: int, out_features: int) -> None:
        super().__init__(out_features, hidden_features, degrees, norm="satclip")
        self.requires_grad_(False)
        self.eval()

    def reset_parameters(self) -> None:
        """Nothing is drawn: the weights come from a checkpoint."""

    @torch.jit.ignore
    def train(self, mode: bool = True) -> Self:
        """Stays in evaluation mode."""
        return super().train(False)


def load_satclip(source: str | os.PathLike[str]) -> SatClipEncoder:
    """Loads a pretrained encoder, as float32.

    Args:
        source: A released `.ckpt`, a file that `save_satclip` wrote, or a Hub repository such as
            'microsoft/SatCLIP-ViT16-L10', whose file is named like it in lower case.

    Raises:
        CheckpointError: There is no such file or repository, it is not a SatCLIP checkpoint (an arbitrary pickle is
            refused, not executed), or its weights have other sizes than its hyper-parameters say.
    """
    path = _locate(source)
    sizes, weights = _read_safetensors(path) if path.suffix == ".safetensors" else _read_checkpoint(path)
    encoder = SatClipEncoder(**sizes)
    own = encoder.state_dict()
    problems = [f"{key} is missing" for key in own if key not in weights]
    problems += [
        f"{key} is {tuple(weights[key].shape)} where the hyper-parameters say {tuple(value.shape)}"
        for key, value in own.items()
        if key in weights and weights[key].shape != value.shape
    ]
    if problems:
        raise _refusal(path, f"{'; '.join(problems)}; give the file as it was released")
    encoder.load_state_dict({key: weights[key] for key in own})
    return encoder


def save_satclip(encoder: SatClipEncoder, path: str | os.PathLike[str]) -> None:
    """Writes an encoder as safetensors, its sizes in the header; `load_satclip` reads it.

    Args:
        encoder: The encoder.
        path: A file name that ends in `.safetensors`.
    """
    sizes = {name: str(getattr(encoder, name)) for name in ("degrees", "out_features")}
    sizes["hidden_features"] = str(encoder.first.out_features)
    save_file({key: value.contiguous() for key, value in encoder.state_dict().items()}, str(path), sizes)


def _locate(source: str | os.PathLike[str]) -> Path:
    if Path(source).is_file():
        return Path(source)
    name = str(source)
    if name.count("/") != 1 or Path(name).suffix in (".ckpt", ".safetensors"):
        remedy = "give one, or a repository such as microsoft/SatCLIP-ViT16-L10"
        raise _refusal(Path(name), f"there is no such file; {remedy}")
    try:
        return Path(hf_hub_download(name, f"{name.split('/')[1].lower()}.ckpt"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise _refusal(Path(name), f"is no file, and the Hub does not give it ({error}); give a local file") from error


def _read_checkpoint(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise _refusal(path, f"is not a file of weights alone ({reason})") from error
    table = checkpoint if isinstance(checkpoint, Mapping) else {}
    stored, hyper_parameters = table.get("state_dict"), table.get("hyper_parameters")
    if not isinstance(stored, Mapping) or not isinstance(hyper_parameters, Mapping):
        raise _refusal(path, "holds no state_dict with hyper_parameters; give a released SatCLIP checkpoint")
    weights = {}
    for source, name in _LAYERS.items():
        for kind in ("weight", "bias"):
            value = stored.get(f"{_PREFIX}{source}.{kind}")
            if isinstance(value, Tensor):
                weights[f"{name}.{kind}"] = value
    return _sizes(path, hyper_parameters), weights


def _sizes(path: Path, hyper_parameters: Mapping[str, Any]) -> dict[str, int]:
    for name, wanted in _KINDS.items():
        if hyper_parameters.get(name, wanted) != wanted:
            raise _refusal(path, f"{name} is {hyper_parameters[name]!r}; only {wanted!r} is understood")
    lacking = [name for name in _SIZES if not isinstance(hyper_parameters.get(name), int)]
    if lacking:
        raise _refusal(path, f"the hyper-parameters do not say {', '.join(lacking)}")
    return {ours: hyper_parameters[theirs] for theirs, ours in _SIZES.items()}


def _read_safetensors(path: Path) -> tuple[dict[str, int], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise _refusal(path, f"is not a safetensors file ({error})") from error
    try:
        return {name: int(header[name]) for name in _SIZES.values()}, weights
    except (KeyError, ValueError) as error:
        raise _refusal(path, "its header gives no sizes; write it with save_satclip") from error


def _refusal(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"source={str(path)!r}: cannot be loaded as SatCLIP: {reason}")
