"""Exports models to ONNX and torch.export programs, which run without this package.

A program takes batches of any size: normalized images (B, C, H, W) and, for a model that reads any, metadata. NaN, or a
negative location id, stands for unknown. Every program is read back from its file and compared with the model.
"""

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..errors import ExportError, MissingDependencyError, needs
from ..layers.encoders.location import LocationIdEmbedding
from .bands import bands_of
from .build import DataConfig
from .trained import metadata_encoder

OPSET = 20  # the first that has GELU as an operator
RECORDED_BATCH = 2  # a batch of one would be taken for a constant

Inputs: TypeAlias = tuple[Tensor, ...]
Program: TypeAlias = Callable[..., Tensor]  # from inputs to logits


class Format(NamedTuple):
    """How programs of a format are written and read."""

    file: str
    write: Callable[[nn.Module, Inputs, Path], None]  # the inputs are samples to record the program with
    load: Callable[[Path], Program]


def load_onnx(path: Path) -> Program:
    """Reads an ONNX file as a function from inputs to logits, on CPU, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def program(*inputs: Tensor) -> Tensor:
        arrays = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return torch.from_numpy(session.run(None, arrays)[0])

    return program


def record_program(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """Records a model in evaluation mode with torch.export, for batches of any size, on two samples or more."""
    batch = torch.export.Dim("batch", min=1)
    return torch.export.export(model, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))


def save_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Translates a recorded program to ONNX: images, and perhaps metadata, to logits. The program is used up."""
    translated = torch.onnx.export(
        program,
        input_names=("images", "metadata")[: len(program.graph_signature.user_inputs)],
        output_names=("logits",),
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
    )
    assert translated is not None  # with dynamo=True
    translated.save(path)


def _write_onnx(model: nn.Module, inputs: Inputs, path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):  # the last one for the comparison
        with needs("export to ONNX", package, "export"):
            importlib.import_module(package)
    save_onnx(record_program(model, inputs), path)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "onnx": Format("model.onnx", _write_onnx, load_onnx),
        "pt2": Format(
            "model.pt2",
            lambda model, inputs, path: torch.export.save(record_program(model, inputs), path),
            lambda path: torch.export.load(path).module(),
        ),
    }
)


def export_model(
    model: nn.Module, inputs: Inputs, folder: Path, name: str, tolerance: float = 1e-4
) -> tuple[Path, float]:
    """Writes a model in a format of `FORMATS`, reads the file back, and compares both on batches of several sizes.

    Returns the file, and the largest absolute difference of its logits from the model's.

    The model is in evaluation mode on CPU, and the `inputs` are three samples or more. Logits that differ by more than
    `tolerance`, or a model that cannot be written, are an `ExportError`.
    """
    form = FORMATS[name]
    path = folder / form.file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tracing warns of branches on shapes, which are meant
        try:
            form.write(model, tuple(part[:RECORDED_BATCH] for part in inputs), path)
            program = form.load(path)
        except MissingDependencyError:
            raise
        except Exception as error:  # the exporters' errors have no common class
            first_line = (str(error).strip().splitlines() or ["no message"])[0]
            reason = f"cannot be made of this model ({type(error).__name__}: {first_line})"
            raise ExportError.of("format", name, reason) from error
        difference = largest_difference(model, program, inputs)
    # Negated, so that NaN is an error
    if not difference <= tolerance:
        remedy = (
            f"its logits differ from the model's by {difference:.1e}, more than {tolerance:.1e}; a token between two "
            "experts may explain it: look at more images with --images before raising --tolerance"
        )
        raise ExportError.of("format", name, remedy)
    return path, difference


@torch.inference_mode()
def largest_difference(model: Program, program: Program, inputs: Inputs) -> float:
    """Largest absolute difference of logits over one sample, all, and all but one; NaN if any is NaN."""
    sizes = sorted({1, len(inputs[0]), max(1, len(inputs[0]) - 1)})
    batches = [tuple(part[:size] for part in inputs) for size in sizes]
    return torch.stack([(program(*batch) - model(*batch)).abs().max() for batch in batches]).max().item()


def sample_metadata(model: nn.Module, number: int) -> Tensor | None:
    """Random metadata for a model, of which row `number // 2` is unknown: (number, ...); None if it reads none."""
    encoder = metadata_encoder(model)
    if encoder is None:
        return None
    if isinstance(encoder, LocationIdEmbedding):
        places = torch.arange(number) % encoder.num_locations
        places[number // 2] = -1
        return places
    random = torch.Generator().manual_seed(0)
    places = (torch.rand(number, 2, generator=random) - 0.5) * torch.tensor([360.0, 180.0])
    columns = getattr(encoder, "numbers", ())
    numbers = [torch.randn(number, 1, generator=random) * column.std + column.mean for column in columns]
    metadata = torch.cat([places, *numbers], dim=1)
    metadata[number // 2] = float("nan")
    return metadata


def preprocessing(
    model: nn.Module, config: DataConfig, classes: Sequence[str], temperature: float | None = None
) -> dict[str, object]:
    """Describes a program's inputs, preprocessing and classes (in the order of the logits), ready for JSON."""
    channels, height, width = config["input_size"]
    bands = bands_of(model)
    kind = ", RGB" if bands.is_rgb else "".join(f", {name}" for name in bands.names)
    inputs = {"images": f"float32 (batch, {channels}, {height}, {width}){kind}"}
    reading = "RGB without transparency" if bands.is_rgb else "these bands" if kind else "all bands"
    encoder = metadata_encoder(model)
    if isinstance(encoder, LocationIdEmbedding):
        inputs["metadata"] = "int64 (batch,), location id; negative where unknown"
    elif encoder is not None:
        columns = getattr(encoder, "columns", ())
        meaning = ", ".join(["longitude and latitude in degrees", *columns])
        inputs["metadata"] = f"float32 (batch, {2 + len(columns)}), {meaning}; NaN where unknown"
    scale = bands.scaling if bands.physical else "integers from 0..maximum of their type, such as 255 or 65535, to 0..1"
    return {
        "inputs": inputs,
        "input_size": list(config["input_size"]),
        "interpolation": config["interpolation"],
        "crop_mode": config["crop_mode"],
        "crop_pct": config["crop_pct"],
        "read": f"{reading}, in full depth, turned by EXIF",
        "scale": f"{scale}, then (x - mean) / std",
        "mean": list(config["mean"]),
        "std": list(config["std"]),
        "output": f"logits, float32 (batch, {len(classes)})",
        **({"probabilities": "softmax(logits / temperature)", "temperature": temperature} if temperature else {}),
        "classes": list(classes),
    }
