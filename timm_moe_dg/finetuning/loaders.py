"""The loaders of a run, for training and for evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
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
from ..data.transforms import with_timm_augmentation
from ..networks.build import DataConfig
from .plan import RunPlan


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
    with_metadata: bool,
    with_domains: bool = False,
    pin_memory: bool = False,
) -> tuple[DataLoader, DataLoader]:
    """Builds the endless training loader with this process's share, and the evaluation loader.

    Without `eval_train`, the evaluation loader has only the images outside of training. `with_domains` appends the
    number of the training domain to the metadata of training images.
    """
    options = plan.options
    size, mean, std = config["input_size"][1:], config["mean"], config["std"]
    transform = training_transform(plan.benchmark.augmentation, size, mean, std)
    augmented = with_timm_augmentation(transform, options.aa, options.reprob, size, mean)
    domains = stated_domains(plan) if with_domains and with_metadata else plan.domains
    drawing = {"with_metadata": with_metadata, "class_balanced": options.class_balanced}
    draws = TrainingDraws(domains, plan.splits, augmented, seed=options.seed, **drawing)
    validation = AugmentedValidation(augmented, plan.training, options.seed) if options.val_augment else None
    splits = plan.splits if options.eval_train else _not_trained_on(plan.splits, plan.training)
    transform = evaluation_transform(size, mean, std)
    images = EvaluationImages(plan.domains, splits, transform, with_metadata=with_metadata, augmented=validation)
    evaluation = evaluation_loader(
        images, batch_size=options.validation_batch_size, workers=options.workers, pin_memory=pin_memory
    )
    return training_loader(draws, sampler, workers=options.workers, pin_memory=pin_memory), evaluation


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


def _not_trained_on(splits: Sequence[Split], training: Sequence[int]) -> list[Split]:
    return [
        Split(split.inside[:0], split.outside) if domain in training else split for domain, split in enumerate(splits)
    ]
