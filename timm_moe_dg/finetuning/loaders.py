"""The loaders of a run: what its network is fed with, in training and in evaluation."""

from collections.abc import Sequence
from typing import cast

import numpy as np
from torch.utils.data import DataLoader

from ..data import (
    AugmentedValidation,
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
    """Says what each step of a run draws; see `StepSampler`.

    Args:
        plan: The run's; its options are filled in.
        first_step: Where training begins.
        process: This process's index.
        num_processes: How many processes share a step.
    """
    share = (plan.options.batch_size, first_step, process, num_processes)
    return StepSampler(plan.training, *share, plan.benchmark.domains_per_step, plan.options.seed)


def build_loaders(
    plan: RunPlan,
    config: DataConfig,
    sampler: StepSampler,
    *,
    with_metadata: bool,
    pin_memory: bool = False,
) -> tuple[DataLoader, DataLoader]:
    """Builds both loaders.

    Args:
        plan: The run's; its options are filled in.
        config: The network's data configuration, see `data_config`.
        sampler: Which draws make up each step, see `step_sampler`.
        with_metadata: Whether the network is given the images' metadata.
        pin_memory: See `training_loader`.

    Returns:
        The endless training loader, already this process's share, and the evaluation loader: of everything, or with
        `eval_train` off of everything that is not trained on.
    """
    options = plan.options
    view = (config["input_size"][1:], config["mean"], config["std"])
    own = training_transform(plan.benchmark.augmentation, *view)
    augmented = with_timm_augmentation(own, options.aa, options.reprob, *view)
    draws = TrainingDraws(plan.domains, plan.splits, augmented, options.seed, with_metadata, options.class_balanced)
    validation = AugmentedValidation(augmented, plan.training, options.seed) if options.val_augment else None
    splits = plan.splits if options.eval_train else _not_trained_on(plan.splits, plan.training)
    images = EvaluationImages(plan.domains, splits, evaluation_transform(*view), with_metadata, validation)
    evaluation = evaluation_loader(
        images, batch_size=options.validation_batch_size, workers=options.workers, pin_memory=pin_memory
    )
    return training_loader(draws, sampler, workers=options.workers, pin_memory=pin_memory), evaluation


def rehearse(plan: RunPlan, config: DataConfig, with_metadata: bool) -> None:
    """Builds the loaders and reads one image of every split of every domain, and one as each domain is trained on.

    Args:
        plan: See `build_loaders`.
        config: See `build_loaders`.
        with_metadata: See `build_loaders`.

    Raises:
        ArgumentError: An augmentation does not exist.
        ImageReadError: One of these images cannot be read.
    """
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
