"""Domains of images: the benchmarks' table, splits, transforms and loaders."""

from .benchmarks.table import BENCHMARKS, Benchmark, get_benchmark
from .domains import Domain
from .loaders import (
    AugmentedValidation,
    EvaluationImages,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    training_loader,
)
from .readable import drop_unreadable
from .readers.folders import FolderDomain, read_folder
from .readers.places import Places, PlacesDomain
from .splits import Split, evaluation_only, seed_hash, split_domain, split_domains, training_domains
from .transforms import AUGMENTATIONS, evaluation_transform, training_transform

__all__ = [
    "AUGMENTATIONS",
    "BENCHMARKS",
    "AugmentedValidation",
    "Benchmark",
    "Domain",
    "EvaluationImages",
    "FolderDomain",
    "Places",
    "PlacesDomain",
    "Split",
    "StepSampler",
    "TrainingDraws",
    "drop_unreadable",
    "evaluation_loader",
    "evaluation_only",
    "evaluation_transform",
    "get_benchmark",
    "read_folder",
    "seed_hash",
    "split_domain",
    "split_domains",
    "training_domains",
    "training_loader",
    "training_transform",
]
