"""The model of a run: the network with its starting weights, the algorithm, optimizer, schedule and averaging."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.nn import functional as F

from ..algorithms import Algorithm, Averaging, Setup, StepContext, get_algorithm, get_averaging
from ..cli.values import TEXT
from ..data import Domain, Split
from ..data.inspection import band_statistics, deep_share, warn_of_far_values
from ..errors import ArgumentError, DataError
from ..layers import LossWeights
from ..layers.encoders.location import LocationEncoder, LocationIdEmbedding
from ..losses import check_loss_weights, force_tokens, set_auxiliary_form
from ..models.text_head import use_text_head
from ..networks.build import (
    DataConfig,
    Network,
    build_network,
    checkpoint_activations,
    data_config,
    has_measured_statistics,
    lay_channels_last,
    save_network,
    saved_config,
)
from ..networks.freeze import FREEZABLE, freeze_batch_norm
from ..networks.trained import renew_classifier, saved_classes, takes_metadata
from ..protocols.options import FilledOptions, RunOptions
from .coverage import cover_training_coordinates
from .linear_probing import LinearProbing
from .optimization import build_optimizer, build_schedule
from .plan import RunPlan
from .sharding import Sharding, is_sharded

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A network and everything that trains it."""

    network: nn.Module
    training: StepContext  # the network as accelerate has wrapped it, its optimizer, and further arguments of a step
    algorithm: Algorithm
    schedule: Scheduler | None  # of the learning rate; None for a constant one
    averaging: Averaging | None  # of the network's weights
    probing: LinearProbing | None  # the first steps, in which the classifier alone is trained
    sharding: Sharding | None  # of a network that is divided over processes
    with_metadata: bool  # whether the network takes the images' metadata
    data_config: DataConfig
    classes: tuple[str, ...]  # names, in the order of the logits

    def save(self, network: nn.Module, folder: Path) -> None:
        """Writes the network, or an average of it, as a folder that timm loads."""
        save_network(network, folder, self.classes, self.data_config)


def build_model(plan: RunPlan, accelerator: Accelerator) -> Model:
    """Builds the network and everything that trains it, on the run's device. Set the run's seed before."""
    options = plan.options
    network = prepare_network(plan)
    cover_training_coordinates(network, plan)
    if not is_sharded():  # or a network larger than the device would be on it as a whole
        network = network.to(accelerator.device)
    # The average copies the network, which must not have the algorithm's hooks yet
    averaging = get_averaging(options.averaging)(network, plan.hparams) if options.averaging else None
    sharding = Sharding(network, averaging, accelerator.device) if is_sharded() else None
    setup = Setup(
        network,
        len(plan.training),
        options.num_classes,
        hparams=plan.hparams,
        loss_weights=LossWeights.of(options),
        task_loss=build_task_loss(plan, accelerator.device),
        domains_per_step=plan.benchmark.domains_per_step,
    )
    algorithm = get_algorithm(options.algorithm)(setup).to(accelerator.device)
    images = torch.empty(options.batch_size // accelerator.num_processes)
    algorithm.chunk([(images,)], options.grad_accum_steps)  # refuses an accumulation that no step can take
    optimizer, schedule = optimization(options, network, algorithm)
    probing = LinearProbing(network, optimizer, options) if options.linear_steps else None
    if options.compile:
        torch.compiler.reset()  # a program of an earlier run in this process would leave out this method's hooks
        network.compile()
    # Not placed again: moved from cpu to cpu:0, weights are copied, and optimizers that hold parts would miss them.
    # In evaluation mode accelerate adds mixed precision, and no copy of the network in every process
    wrapped = accelerator.prepare_model(network, device_placement=False, evaluation_mode=sharding is not None)
    optimizer = accelerator.prepare(optimizer)
    mean = partial(accelerator.reduce, reduction="mean")
    return Model(
        network=network,
        training=StepContext(
            wrapped,
            optimizer,
            backward=accelerator.backward,
            reduce=mean,
            grad_accum_steps=options.grad_accum_steps,
            autocast=accelerator.autocast,
        ),
        algorithm=algorithm,
        schedule=schedule,
        averaging=averaging,
        probing=probing,
        sharding=sharding,
        with_metadata=takes_metadata(network, plan.domains, options.metadata_columns),
        data_config=data_config(network, options.img_size, *mean_and_std(plan, network)),
        classes=plan.classes,
    )


def prepare_network(plan: RunPlan) -> nn.Module:
    """Builds the network, and sets frozen parts, expert mode, memory format and gradient checkpointing."""
    options = plan.options
    columns = column_statistics(plan)
    # DomainBed's name for the dropout of any network
    dropout = plan.hparams.get("resnet_dropout")
    source = options.model if options.pretrained else ""
    names = () if options.head else saved_classes(source, options.initial_checkpoint)
    network = build_network(
        options.model,
        None if options.head or names else options.num_classes,
        pretrained=options.pretrained,
        initial_checkpoint=options.initial_checkpoint,
        img_size=options.img_size,
        bands=options.image_bands,
        band_init=options.band_init,
        drop_path=options.drop_path,
        model_kwargs={
            **({"drop_rate": dropout} if dropout else {}),
            **({"metadata_columns": columns} if columns else {}),
            **options.model_kwargs,
        },
    )
    if names:
        renew_classifier(network, names, plan.classes, options.num_classes)
    if options.head:
        use_text_head(network, options.head.removeprefix(TEXT), plan.classes)
    check_metadata(network, plan)
    check_loss_weights(network, LossWeights.of(options))
    # The small images of the built-in data sets are trained from scratch
    if _starts_from_random_weights(options) and plan.benchmark.image_size is None:
        _logger.warning(f"{options.model} starts from random weights; add --pretrained to start from published ones")
    if options.freeze:
        FREEZABLE[options.freeze](network)
    set_expert_mode(network, options)
    force_tokens(network, options.cka_tokens if options.cka_coef and options.expert_mode == "routed" else 0)
    set_auxiliary_form(network, options.aux_form)
    if options.grad_checkpointing:
        checkpoint_activations(network)
    if options.channels_last:
        lay_channels_last(network)
    if options.freeze_bn:
        freeze_batch_norm(network)
    return network


def column_statistics(plan: RunPlan) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of the run's metadata columns over the in-splits of training domains."""
    names = plan.options.metadata_columns
    if not names or ":" in plan.options.model:  # a saved network has its own
        return {}
    rows = [np.asarray(plan.domains[domain].metadata)[plan.splits[domain].inside] for domain in plan.training]
    statistics = {}
    # The first two columns are the coordinates
    for name, column in zip(names, np.concatenate(rows).astype(np.float64).T[2:], strict=True):
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
    count = sum(len(plan.splits[domain].inside) for domain in plan.training)
    _logger.info(f"reading {count} training images for the bands' mean and deviation; --mean and --std spare it")
    measured = band_statistics(plan.domains, plan.splits, plan.training, options.workers)
    unit = "whole numbers divided by their type's maximum"
    _logger.info(f"values of the training images, {unit}:\n{measured.describe()}")
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


def build_task_loss(plan: RunPlan, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Builds the cross-entropy with the run's label smoothing and class weights."""
    options = plan.options
    weight = class_weights(plan).to(device) if options.class_weights else None
    return partial(F.cross_entropy, weight=weight, label_smoothing=options.label_smoothing)


def class_weights(plan: RunPlan) -> Tensor:
    """Returns images / (classes * images of the class), (num_classes,), over training in-splits; 0 without images."""
    targets = [np.asarray(plan.domains[domain].targets)[plan.splits[domain].inside] for domain in plan.training]
    counts = torch.from_numpy(np.bincount(np.concatenate(targets), minlength=plan.options.num_classes))
    return torch.where(counts > 0, counts.sum() / ((counts > 0).sum() * counts.clamp(min=1)), 0.0)


def check_metadata(network: Network, plan: RunPlan) -> None:
    """Refuses a network whose experts or location encoder no training image would reach, and warns of a weak router."""
    options = plan.options
    takes = takes_metadata(network, plan.domains, options.metadata_columns)
    has_modes = hasattr(network, "set_expert_mode")
    if options.expert_mode != "routed" or not hasattr(network, "metadata_encoder"):
        return
    if not (takes and any(_any_known(plan.domains[domain], plan.splits[domain]) for domain in plan.training)):
        shared = ", or --expert-mode shared to train the shared expert alone" if has_modes else ""
        ids = any(isinstance(module, LocationIdEmbedding) for module in network.modules())
        reads, dataset = ("location ids", "iWildCam") if ids else ("places", "place_folder")
        remedy = f"reads {reads}, and no training image of {options.dataset} has one; use --dataset {dataset}{shared}"
        raise ArgumentError.of("model", options.model, remedy)
    drops = any(isinstance(module, LocationEncoder) and module.drop.p for module in network.modules())
    is_given = "metadata_drop" in options.model_kwargs
    if has_modes and drops and _starts_from_random_weights(options) and not is_given:
        _logger.warning(
            f"{options.model} starts from random weights with metadata_drop=0.5, with which routers found no domains "
            "(docs/results/geo_digits.md); add --model-kwargs metadata_drop=0.0, or --pretrained"
        )


def _starts_from_random_weights(options: RunOptions) -> bool:
    return not (options.pretrained or options.initial_checkpoint or ":" in options.model)


def _any_known(domain: Domain, split: Split) -> bool:
    """Whether any training image has metadata: numbers that are not NaN, or an id that is not negative."""
    metadata = np.asarray(domain.metadata)[split.inside]
    return bool((~np.isnan(metadata) if metadata.dtype.kind == "f" else metadata >= 0).any())


def set_expert_mode(network: Network, options: RunOptions) -> None:
    """Sets the expert mode of a MoGE model, which is saved with it."""
    if hasattr(network, "set_expert_mode"):
        network.set_expert_mode(options.expert_mode)
    elif options.expert_mode != "routed":
        raise ArgumentError.of("expert_mode", options.expert_mode, f"{options.model} has no metadata-routed experts")


def optimization(
    options: FilledOptions, network: nn.Module, algorithm: Algorithm
) -> tuple[torch.optim.Optimizer, Scheduler | None]:
    """Builds the optimizer of the network's and the algorithm's parameters, and the schedule."""
    optimizer = build_optimizer(
        network,
        options.opt,
        lr=options.lr,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        layer_decay=options.layer_decay,
        extra_groups=algorithm.parameter_groups(lr=options.lr, weight_decay=options.weight_decay),
        in_turn=options.linear_steps > 0,
    )
    lengths = {"steps": options.steps, "warmup_steps": options.warmup_steps}
    return optimizer, build_schedule(optimizer, options.sched, **lengths, min_lr=options.min_lr)
