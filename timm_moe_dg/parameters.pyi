"""The parameters of the functions of `api`, for type checkers. Keywords are the options, of which some may be paths."""

# mypy: disable-error-code="assignment"

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from pandas import DataFrame

from .api import Source
from .comparisons.compare import CompareOptions
from .inference.evaluate import EvaluateOptions
from .inference.predict import ImageOptions, TableOptions
from .inference.predictor import PartOptions
from .protocols.options import RunOptions

File: TypeAlias = str | os.PathLike[str]

@dataclass(frozen=True, kw_only=True)
class Finetune(RunOptions):
    data_dir: File | None = None
    initial_checkpoint: File | None = None
    config: File | None = None
    output: File = "output"
    resume: File | None = None
    imports: Sequence[str] = ()

@dataclass(frozen=True, kw_only=True)
class Compare(CompareOptions):
    data_dir: File | None = None
    initial_checkpoint: File | None = None
    output: File = "output/comparison"
    imports: Sequence[str] = ()

@dataclass(frozen=True)
class Evaluate(EvaluateOptions):
    run_or_model: Source
    data_dir: File | None = field(default=None, kw_only=True)
    initial_checkpoint: File | None = field(default=None, kw_only=True)
    output: File | None = field(default=None, kw_only=True)
    save_features: File | None = field(default=None, kw_only=True)
    imports: Sequence[str] = field(default=(), kw_only=True)

@dataclass(frozen=True, kw_only=True)
class Part(PartOptions):
    initial_checkpoint: File | None = None
    calibration: File | None = None
    device: str | torch.device | None = None
    imports: Sequence[str] = ()

@dataclass(frozen=True)
class PredictPart(Part):
    run_or_model: Source
    rows: DataFrame | Mapping[str, Sequence[object]]

@dataclass(frozen=True)
class Predict(Part, ImageOptions, TableOptions):
    run_or_model: Source
    images: File | Iterable[File]
    metadata: File | None = field(default=None, kw_only=True)
    output: File | None = field(default=None, kw_only=True)
