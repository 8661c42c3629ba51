"""The model of a run: the network with its starting weights, the algorithm, optimizer, schedule and averaging."""

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from accelerate import Accelerator
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.nn import functional as F

from ..algorithms import Algorithm, Averaging, Setup, StepContext, get_algorithm, get_averaging
from ..cli.values import TEXT
from ..errors import ArgumentError
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
    lay_channels_last,
    saved_config,
)
from ..networks.freeze import FREEZABLE, freeze_batch_norm, freeze_trunk
from ..networks.trained import renew_classifier, saved_classes, takes_metadata, unknown_metadata
from ..protocols.options import RunOptions
from ..protocols.run_identity import model_arguments
from .optimization import LinearProbing, build_optimizer, build_schedule
from .plan import RunPlan
from .training_data import class_weights, column_statistics, cover_training_coordinates, mean_and_std
from .trunk_cache import cache_trunk

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
    with_metadata: bool  # whether the network takes the images' metadata
    data_config: DataConfig
    tokens: np.ndarray | None  # of all images, in their place: outputs of the frozen trunk, see `cache_trunk`
    classes: tuple[str, ...]  # names, in the order of the logits


def build_model(plan: RunPlan, accelerator: Accelerator) -> Model:
    """Builds the network and everything that trains it, on the run's device. Set the run's seed before."""
    options = plan.options
    network = prepare_network(plan)
    cover_training_coordinates(network, plan)
    config = data_config(network, options.img_size, *mean_and_std(plan, network))
    # Copies of the network, as averages are, start above the trunk too
    tokens = cache_trunk(network, plan, config, accelerator.device) if options.cache_trunk else None
    network = network.to(accelerator.device)
    # The average copies the network, which must not have the algorithm's hooks yet
    averaging = get_averaging(options.averaging)(network, plan.hparams) if options.averaging else None
    task_loss = build_task_loss(plan, accelerator.device)
    setup = Setup(
        network,
        len(plan.training),
        options.num_classes,
        hparams=plan.hparams,
        loss_weights=LossWeights.of(options),
        task_loss=task_loss,
        class_weights=task_loss.keywords["weight"],
        domains_per_step=plan.benchmark.domains_per_step,
    )
    algorithm = get_algorithm(options.algorithm)(setup).to(accelerator.device)
    images = torch.empty(options.batch_size // accelerator.num_processes)
    algorithm.chunk([(images,)], options.grad_accum_steps)  # refuses an accumulation that no step can take
    optimizer: torch.optim.Optimizer = build_optimizer(
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
    schedule = build_schedule(optimizer, options.sched, **lengths, min_lr=options.min_lr)
    probing = LinearProbing(network, optimizer, options) if options.linear_steps else None
    if options.compile:
        torch.compiler.reset()  # a program of an earlier run in this process would leave out this method's hooks
        network.compile()
    # Not placed again: moved from cpu to cpu:0, weights are copied, and optimizers that hold parts would miss them
    wrapped = accelerator.prepare_model(network, device_placement=False)
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
        with_metadata=takes_metadata(network, plan.domains, options.metadata_columns),
        data_config=config,
        tokens=tokens,
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
    heads = saved_domains(plan)
    other = options.model_kwargs.get("router", options.router)
    if options.router not in (None, other):
        raise ArgumentError.of("router", options.router, f"--model-kwargs has router={other!r}; give one of the two")
    network: Network = build_network(
        options.model,
        None if options.head or names else options.num_classes,
        pretrained=options.pretrained,
        initial_checkpoint=options.initial_checkpoint,
        img_size=options.img_size,
        bands=plan.domains[0].bands,
        band_init=options.band_init,
        drop_path=options.drop_path,
        model_kwargs={
            **({"drop_rate": dropout} if dropout else {}),
            **({"metadata_columns": columns} if columns else {}),
            **model_arguments(vars(options)),
            **({"num_domains": len(heads)} if heads else {}),
        },
    )
    if names:
        renew_classifier(network, names, plan.classes, options.num_classes)
    if heads:
        network.renew_domains(heads, [plan.names[position] for position in plan.training])
    if options.head:
        use_text_head(network, options.head.removeprefix(TEXT), plan.classes)
    check_metadata(network, plan)
    check_loss_weights(network, LossWeights.of(options))
    # The small images of the built-in data sets are trained from scratch
    if _starts_from_random_weights(options) and plan.benchmark.image_size is None:
        _logger.warning(f"{options.model} starts from random weights; add --pretrained to start from published ones")
    if options.freeze:
        FREEZABLE.get(options.freeze, partial(freeze_trunk, freeze=options.freeze))(network)
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


def saved_domains(plan: RunPlan) -> list[str]:
    """Returns the domain of each head in the weights that a run of D3G starts from; empty for other weights."""
    options = plan.options
    config = saved_config(options.model if options.pretrained else "", options.initial_checkpoint)
    saved, given = config.get("model_args", {}), options.model_kwargs.get("num_domains", len(plan.training))
    target = saved_config(options.model).get("architecture") or options.model.partition(".")[0]
    if "num_domains" not in saved or config["architecture"] != target or given != len(plan.training):
        return []
    if names := saved.get("domain_names"):
        return names
    _logger.warning("the weights to start from name no domains: heads are carried by their number")
    return []


def build_task_loss(plan: RunPlan, device: torch.device) -> partial[Tensor]:
    """Builds the cross-entropy with the run's label smoothing and class weights."""
    options = plan.options
    weight = class_weights(plan).to(device) if options.class_weights else None
    return partial(F.cross_entropy, weight=weight, label_smoothing=options.label_smoothing)


def check_metadata(network: Network, plan: RunPlan) -> None:
    """Refuses a network whose experts or location encoder no training image would reach, and warns of a weak router."""
    options = plan.options
    takes = takes_metadata(network, plan.domains, options.metadata_columns)
    has_modes = hasattr(network, "set_expert_mode")
    if options.expert_mode != "routed" or not hasattr(network, "metadata_encoder"):
        return
    if not takes or all(unknown_metadata(rows, ("any",)).all() for rows in plan.training_rows("metadata")):
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


def set_expert_mode(network: Network, options: RunOptions) -> None:
    """Sets the expert mode of a MoGE model, which is saved with it."""
    if hasattr(network, "set_expert_mode"):
        network.set_expert_mode(options.expert_mode)
    elif options.expert_mode != "routed":
        raise ArgumentError.of("expert_mode", options.expert_mode, f"{options.model} has no metadata-routed experts")
