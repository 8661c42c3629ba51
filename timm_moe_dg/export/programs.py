"""Models as programs that run without this package: ONNX, torch.export and TorchScript, with a batch of any size.

Every program is loaded back from its file and has to give the eager model's logits. Inputs are images (B, 3, H, W),
normalized, and the metadata of a model that reads any; NaN, or a negative location id, stands for unknown.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import ExportError, MissingDependencyError
from ..layers import LocationIdEmbedding
from ..networks.build import DataConfig
from .sessions import open_session, required

OPSET = 20  # the first that has GELU as an operator
INPUTS = ("images", "metadata")
OUTPUTS = ("logits", "features")
TO_ONNX = "export to ONNX"
RECORDED_BATCH = 2  # a batch of one would be taken for a constant

Inputs: TypeAlias = tuple[Tensor, ...]
Program: TypeAlias = Callable[..., Tensor]


class Format(NamedTuple):
    """How a program is written and read.

    Attributes:
        file: Name of the file.
        write: Writes the program of a model, recorded with some inputs.
        load: Reads it back as a function of the inputs.
    """

    file: str
    write: Callable[[nn.Module, Inputs, Path], None]
    load: Callable[[Path], Program]


class Exported(NamedTuple):
    """A written program.

    Attributes:
        path: The file.
        program: As it was read back.
        difference: Largest absolute difference of its logits to the eager model's.
    """

    path: Path
    program: Program
    difference: float


def record_program(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """Records a model in evaluation mode with torch.export; the batch may be of any size.

    Args:
        model: In evaluation mode.
        inputs: Two samples or more.
    """
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))


def save_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Translates a recorded program, which is used up by it, to ONNX, opset 20, with inputs `INPUTS` and `OUTPUTS`.

    Raises:
        MissingDependencyError: onnx or onnxscript is not installed.
    """
    required(TO_ONNX, "onnx", "onnxscript")
    translated = torch.onnx.export(
        program,
        input_names=INPUTS[: len(program.graph_signature.user_inputs)],
        output_names=OUTPUTS[: len(program.graph_signature.user_outputs)],
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert translated is not None  # with dynamo=True
    translated.save(path)


def load_onnx(path: Path) -> Program:
    """Reads an ONNX file into onnxruntime, on CPU with as many threads as torch has.

    Raises:
        MissingDependencyError: onnxruntime is not installed.
    """
    session = open_session(path)
    return lambda *inputs: session(*inputs)[0]


def _write_onnx(model: nn.Module, inputs: Inputs, path: Path) -> None:
    required(TO_ONNX, "onnx", "onnxscript", "onnxruntime")  # before the work
    save_onnx(record_program(model, inputs), path)


def _write_pt2(model: nn.Module, inputs: Inputs, path: Path) -> None:
    torch.export.save(record_program(model, inputs), path)


def _load_pt2(path: Path) -> Program:
    return torch.export.load(path).module()


def _write_torchscript(model: nn.Module, inputs: Inputs, path: Path) -> None:
    torch.jit.script(model).save(path)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "onnx": Format("model.onnx", _write_onnx, load_onnx),
        "pt2": Format("model.pt2", _write_pt2, _load_pt2),
        "torchscript": Format("model.torchscript.pt", _write_torchscript, torch.jit.load),
    }
)


def export_model(model: nn.Module, inputs: Inputs, folder: Path, name: str, tolerance: float = 1e-4) -> Exported:
    """Writes a model in one format, reads the file back, and compares both on batches of several sizes.

    Args:
        model: In evaluation mode, on CPU.
        inputs: Samples to compare on, three or more.
        folder: Where the file goes.
        name: In `FORMATS`.
        tolerance: Largest absolute difference of logits that is taken for rounding.

    Raises:
        ExportError: The model cannot be written in the format, or the program answers differently.
        MissingDependencyError: The format needs a package that is not installed.
    """
    form = FORMATS[name]
    path = folder / form.file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TorchScript's age, and about tracing what is meant to be traced
        try:
            form.write(model, tuple(one[:RECORDED_BATCH] for one in inputs), path)
            program = form.load(path)
        except MissingDependencyError:
            raise
        except Exception as error:  # the three exporters raise whatever their compilers raise
            raise ExportError.of("format", name, f"cannot be made of this model ({first_line(error)})") from error
        difference = largest_difference(model, program, inputs)
    if not difference <= tolerance:
        remedy = (
            f"its logits differ from the model's by {difference:.1e}, more than {tolerance:.1e}; a token between two "
            "experts may explain it: look at more images with --images before raising --tolerance"
        )
        raise ExportError.of("format", name, remedy)
    return Exported(path, program, difference)


@torch.inference_mode()
def largest_difference(model: nn.Module, program: Program, inputs: Inputs) -> float:
    """Largest absolute difference of logits over one sample, all, and all but one; NaN if any is NaN."""
    sizes = sorted({1, len(inputs[0]), max(1, len(inputs[0]) - 1)})
    batches = [tuple(one[:size] for one in inputs) for size in sizes]
    return torch.stack([(program(*batch) - model(*batch)).abs().max() for batch in batches]).max().item()


def metadata_encoder(model: nn.Module) -> nn.Module | None:
    """The encoder of the metadata that a model reads; None for a model that reads none."""
    found = getattr(model, "metadata_encoder", None)
    return None if found is None else found.encoder


def sample_metadata(model: nn.Module, number: int) -> Tensor | None:
    """Metadata that a model takes, an unknown place among them: (number, ...); None for a model that reads none."""
    encoder = metadata_encoder(model)
    if encoder is None:
        return None
    if isinstance(encoder, LocationIdEmbedding):
        places = torch.arange(number) % encoder.num_locations
        places[number // 2] = -1
        return places
    random = torch.Generator().manual_seed(0)
    places = (torch.rand(number, 2, generator=random) - 0.5) * torch.tensor([360.0, 180.0])
    numbers = [torch.randn(number, 1, generator=random) * one.std + one.mean for one in getattr(encoder, "numbers", ())]
    metadata = torch.cat([places, *numbers], dim=1)
    metadata[number // 2] = float("nan")
    return metadata


def preprocessing(model: nn.Module, config: DataConfig, classes: Sequence[str]) -> dict[str, object]:
    """Everything that a program's user needs to know about its input and output, ready for JSON.

    Args:
        model: The model.
        config: timm's data configuration.
        classes: Names of the classes in the order of the logits.

    Returns:
        The inputs by name, with shape and meaning; what to do to an image; the classes.
    """
    _, height, width = config["input_size"]
    inputs = {"images": f"float32 (batch, 3, {height}, {width}), RGB"}
    encoder = metadata_encoder(model)
    if isinstance(encoder, LocationIdEmbedding):
        inputs["metadata"] = "int64 (batch,), location id; negative where unknown"
    elif encoder is not None:
        columns = getattr(encoder, "columns", ())
        meaning = ", ".join(["longitude and latitude in degrees", *columns])
        inputs["metadata"] = f"float32 (batch, {2 + len(columns)}), {meaning}; NaN where unknown"
    return {
        "inputs": inputs,
        "input_size": list(config["input_size"]),
        "interpolation": config["interpolation"],
        "crop_mode": config["crop_mode"],
        "crop_pct": config["crop_pct"],
        "scale": "pixels from 0..255 to 0..1, then (x - mean) / std",
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "output": f"logits, float32 (batch, {len(classes)})",
        "classes": list(classes),
    }


def first_line(error: Exception) -> str:
    """Kind and beginning of what a compiler had to say."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"
