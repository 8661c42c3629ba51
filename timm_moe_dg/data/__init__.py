"""Domains of images: benchmarks, splits, transforms and loaders."""

from .benchmark import Benchmark
from .benchmarks import BENCHMARKS, get_benchmark, register_benchmark
from .domains import UNGROUPED, Domain, Split, file_names
from .inspection import check_readable, drop_unreadable
from .loaders import (
    AugmentedValidation,
    EvaluationImages,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    training_loader,
)
from .readers.folders import FolderDomain, read_folder
from .readers.places import PlacesDomain
from .splits import evaluation_only, seed_hash, split_domain, split_domains, training_domains
from .transforms import evaluation_transform, training_transform

__all__ = [
    "BENCHMARKS",
    "UNGROUPED",
    "AugmentedValidation",
    "Benchmark",
    "Domain",
    "EvaluationImages",
    "FolderDomain",
    "PlacesDomain",
    "Split",
    "StepSampler",
    "TrainingDraws",
    "check_readable",
    "drop_unreadable",
    "evaluation_loader",
    "evaluation_only",
    "evaluation_transform",
    "file_names",
    "get_benchmark",
    "read_folder",
    "register_benchmark",
    "seed_hash",
    "split_domain",
    "split_domains",
    "training_domains",
    "training_loader",
    "training_transform",
]
