"""The data of a run: its loaders, and what the network and the loss are told of the training images."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data import (
    AugmentedValidation,
    Domain,
    EvaluationImages,
    Split,
    StepSampler,
    TrainingDraws,
    evaluation_loader,
    evaluation_transform,
    training_loader,
    training_transform,
)
from ..data.inspection import band_statistics, deep_share, warn_of_far_values
from ..data.transforms import with_timm_augmentation
from ..errors import ArgumentError, DataError
from ..layers.encoders.coverage import distances
from ..layers.encoders.location import CoordinateEncoder, LocationIdEmbedding
from ..layers.encoders.metadata import MetadataEncoder
from ..layers.geo_moe_mlp import answers_without_metadata
from ..models import DomainHeadsVisionTransformer
from ..models.moge import GeoMoeVisionTransformer
from ..networks.build import DataConfig, Network, has_measured_statistics, saved_config
from ..networks.trained import takes_metadata
from .plan import RunPlan
from .trunk_cache import token_domains

_logger = logging.getLogger(__name__)


def step_sampler(plan: RunPlan, *, first_step: int = 0, process: int = 0, num_processes: int = 1) -> StepSampler:
    """Builds the sampler that decides the images of each step, and this process's share of them."""
    return StepSampler(
        plan.training,
        plan.options.batch_size,
        first_step=first_step,
        process=process,
        num_processes=num_processes,
        domains_per_step=plan.benchmark.domains_per_step,
        seed=plan.options.seed,
    )


def build_loaders(
    plan: RunPlan,
    config: DataConfig,
    sampler: StepSampler,
    *,
    tokens: np.ndarray | None = None,
    with_metadata: bool,
    with_domains: bool = False,
    pin_memory: bool = False,
) -> tuple[DataLoader, DataLoader]:
    """Builds the endless training loader with this process's share, and the evaluation loader.

    Without `eval_train`, the evaluation loader has only the images outside of training. `with_domains` appends the
    number of the training domain to the metadata of training images. `tokens` take the place of images, see
    `cache_trunk`.
    """
    options = plan.options
    size, mean, std = config["input_size"][1:], config["mean"], config["std"]
    transform = training_transform(plan.benchmark.augmentation, size, mean, std)
    augmented = with_timm_augmentation(transform, options.aa, options.reprob, size, mean)
    transform = evaluation_transform(size, mean, std)
    loading: dict[str, Any] = {"workers": options.workers, "pin_memory": pin_memory}
    if tokens is not None:
        plan = replace(plan, domains=token_domains(plan.domains, tokens))
        augmented = transform = nn.Identity()
        loading["workers"] = 0  # reading takes less time than sending to another process
    domains = stated_domains(plan) if with_domains and with_metadata else plan.domains
    drawing = {"with_metadata": with_metadata, "class_balanced": options.class_balanced}
    draws = TrainingDraws(domains, plan.splits, augmented, seed=options.seed, **drawing)
    validation = AugmentedValidation(augmented, plan.training, options.seed) if options.val_augment else None
    splits = list(plan.splits)
    for domain in () if options.eval_train else plan.training:
        splits[domain] = Split(splits[domain].inside[:0], splits[domain].outside)
    images = EvaluationImages(plan.domains, splits, transform, with_metadata=with_metadata, augmented=validation)
    evaluation = evaluation_loader(images, batch_size=options.validation_batch_size, **loading)
    return training_loader(draws, sampler, **loading), evaluation


def stated_domains(plan: RunPlan) -> list[Domain]:
    """Returns the domains with a last column of metadata, the number among the training domains (NaN for others)."""
    numbers = {domain: number for number, domain in enumerate(plan.training)}
    stated = []
    for position, domain in enumerate(plan.domains):
        rows = np.asarray(domain.metadata)
        column = np.full((len(rows), 1), numbers.get(position, np.nan), dtype=rows.dtype)
        stated.append(replace(domain, metadata=np.concatenate([rows, column], axis=1)))
    return stated


def check_loaders(plan: RunPlan, config: DataConfig, with_metadata: bool) -> None:
    """Builds the loaders, and reads an evaluation image of every split and a training image of each training domain."""
    batches, evaluation = build_loaders(plan, config, step_sampler(plan), with_metadata=with_metadata)
    images = cast(EvaluationImages, evaluation.dataset)
    for first in np.unique(images.groups, return_index=True)[1].tolist():
        images[first]
    for domain in plan.training:
        batches.dataset[domain, 0]


def class_weights(plan: RunPlan) -> Tensor:
    """Returns images / (classes * images of the class), (num_classes,), over training in-splits; 0 without images."""
    targets = np.concatenate(plan.training_rows("targets"))
    counts = torch.from_numpy(np.bincount(targets, minlength=plan.options.num_classes))
    return torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)


def column_statistics(plan: RunPlan) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of the run's metadata columns over the in-splits of training domains."""
    names = plan.options.metadata_columns
    if not names or ":" in plan.options.model:  # a saved network has its own
        return {}
    statistics = {}
    # The first two columns are the coordinates
    columns = np.concatenate(plan.training_rows("metadata")).astype(np.float64).T[2:]
    for name, column in zip(names, columns, strict=True):
        values = column[~np.isnan(column)]
        if not values.size:
            raise DataError(f"metadata_columns={name!r}: no training image has a value there; leave the column out")
        statistics[name] = (float(values.mean()), float(values.std()) or 1.0)  # 1 for a constant column
    return statistics


def mean_and_std(plan: RunPlan, network: Network) -> tuple[Sequence[float] | None, Sequence[float] | None]:
    """Returns mean and standard deviation for normalizing images; None for the model's own."""
    options = plan.options
    if (options.mean and options.std) or not _needs_statistics(plan, network):
        return options.mean, options.std
    count = sum(map(len, plan.training_rows("targets")))
    _logger.info(f"reading {count} training images for the bands' mean and deviation; --mean and --std spare it")
    measured = band_statistics(plan.domains, plan.splits, plan.training, options.workers)
    _logger.info(f"values of the training images, {plan.domains[0].bands.scaling}:\n{measured.describe()}")
    mean, std = options.mean or measured.mean, options.std or measured.std
    warn_of_far_values(plan.domains, mean, std)
    return mean, std


def _needs_statistics(plan: RunPlan, network: Network) -> bool:
    """Whether mean and deviation have to be measured: published ones are of RGB images of 8 bits."""
    is_saved = ":" in plan.options.model
    if not plan.options.image_bands.is_rgb:
        return not is_saved or bool(plan.options.bands and not saved_config(plan.options.model).get("bands"))
    shares = [deep_share(domain) for domain in plan.domains]
    deeper = [name for name, share in zip(plan.names, shares, strict=True) if share > 0]
    others = [name for name, share in zip(plan.names, shares, strict=True) if share < 1]
    if deeper and others:
        counts = f"images of {', '.join(deeper)} have more than 8 bits, and those of {', '.join(others)} do not"
        _logger.warning(f"{counts}; each is divided by its type's maximum, so compare their ranges")
    return any(shares[domain] for domain in plan.training) and not (is_saved and has_measured_statistics(network))


def cover_training_coordinates(network: nn.Module, plan: RunPlan) -> None:
    """Sets the coverage of a network that reads coordinates: those of its training images, and the run's radius.

    A network that reads location ids is told those of its training images.
    The radius "auto" is the smallest one that does not change training-domain validation: the distance of its farthest
    image to the index. Up to there the router has been validated. Neither labels nor held-out domains are needed.
    """
    takes = takes_metadata(network, plan.domains, plan.options.metadata_columns)
    if isinstance(network, DomainHeadsVisionTransformer) and takes:
        lonlat = list(map(torch.from_numpy, plan.training_rows("metadata")))
        network.set_domains(lonlat, [plan.names[position] for position in plan.training])
    radius = plan.options.coverage_radius
    if radius is not None and not (takes and _reads(network, CoordinateEncoder) and network.expert_mode == "routed"):
        remedy = f"{plan.options.model} does not route by coordinates here; leave it out"
        raise ArgumentError.of("coverage_radius", radius, remedy)
    if takes and _reads(network, LocationIdEmbedding) and answers_without_metadata(network):
        ids = np.concatenate(plan.training_rows("metadata"))
        if ids.ndim == 1:  # the first step refuses coordinates
            network.set_seen_locations(ids)
    if not (takes and _reads(network, CoordinateEncoder)):
        return
    coverage = network.set_coverage(torch.from_numpy(np.concatenate(plan.training_rows("metadata"))))
    if isinstance(radius, str):  # "auto"
        validation = torch.from_numpy(np.concatenate(plan.training_rows("metadata", "outside")))
        # Validation accuracy could not choose the radius: a region that is missing in the index has been trained on
        radius = validated_radius(distances(coverage, validation))
    network.set_coverage_radius(radius)


def _reads(network: nn.Module, kind: type[nn.Module]) -> TypeGuard[GeoMoeVisionTransformer]:
    """Whether a network is a MoGE model whose metadata encoder is of a kind."""
    if not isinstance(network, GeoMoeVisionTransformer):
        return False
    encoder = network.metadata_encoder
    return isinstance(encoder, MetadataEncoder) and isinstance(encoder.encoder, kind)


def validated_radius(distance: Tensor) -> float:
    """Returns the largest distance in km, rounded up. NaN stands for an image without coordinates."""
    valid = distance[~distance.isnan()]
    if not len(valid):
        raise ArgumentError.of("coverage_radius", "auto", "no validation image has coordinates; give a distance in km")
    return float(valid.max().ceil())
