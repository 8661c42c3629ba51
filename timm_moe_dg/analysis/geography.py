"""The domains that a MoGE model discovered: for every place, the routed expert with the largest weight."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..layers import GeoMoeMlp
from ..layers.encoders.coverage import distances
from ..losses import discovered_domains
from ..metrics import group_accuracy
from ..networks.build import Network


class DomainMap(NamedTuple):
    """Discovered domains on a grid.

    Attributes:
        longitude: (W,) degrees, centers of the cells.
        latitude: (H,) degrees, centers of the cells, south to north.
        experts: (H, W) int64, the discovered domain of each cell; -1 where the shared expert alone answers.
        num_experts: E.
        distance: (H, W) km from each cell to the nearest training coordinate; None where the model keeps no index.
        radius: km, beyond which the model does not route; None where it routes everywhere.
    """

    longitude: Tensor
    latitude: Tensor
    experts: Tensor
    num_experts: int
    distance: Tensor | None = None
    radius: float | None = None


def geo_layers(model: nn.Module) -> list[GeoMoeMlp]:
    """The MoGE layers of a model in order.

    Raises:
        ArgumentError: It has none.
    """
    layers = [module for module in model.modules() if isinstance(module, GeoMoeMlp)]
    if not layers:
        raise ArgumentError.of("model", type(model).__name__, "has no metadata-routed experts; give a MoGE model")
    return layers


def geo_blocks(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the transformer blocks that hold the MoGE layers, in order."""
    blocks = enumerate(getattr(model, "blocks", ()))
    return tuple(at for at, block in blocks if any(isinstance(part, GeoMoeMlp) for part in block.modules()))


@torch.no_grad()
def domains_at(model: Network, metadata: Tensor) -> Tensor:
    """The discovered domain of each place: argmax of the last layer's noiseless weights. No image is needed.

    Args:
        model: A MoGE model, not wrapped; it is left in its mode.
        metadata: (B, ...) as the model's encoder takes it, on any device.

    Returns:
        (B,) int64 on CPU; -1 for unknown places, and for those that the model's coverage leaves out.

    Raises:
        ArgumentError: The model has no MoGE layer.
        MetadataError: The encoder does not take the metadata.
    """
    router = geo_layers(model)[-1].router
    training = model.training
    model.eval()
    try:
        metadata = metadata.to(router.codes.device)
        context, present = model.metadata_encoder(router.codes.new_zeros(len(metadata), 1), metadata)
        return discovered_domains(router(context)._replace(routed=present)).cpu()
    finally:
        model.train(training)


def domain_map(model: Network, step: float = 2.0) -> DomainMap:
    """Discovered domains of the whole globe.

    Args:
        model: A MoGE model whose metadata are coordinates; further columns stand at their means.
        step: Width and height of a cell, degrees; 180 should be a multiple.

    Raises:
        ArgumentError: See `domains_at`, or a step that is not in 0..90.
        MetadataError: The model's metadata are no coordinates.
    """
    if not 0 < step <= 90:
        raise ArgumentError.of("step", step, "give a width in degrees, such as 2")
    longitude = torch.arange(-180 + step / 2, 180, step)
    latitude = torch.arange(-90 + step / 2, 90, step)
    rows, columns = torch.meshgrid(latitude, longitude, indexing="ij")
    means = [number.mean for number in getattr(model.metadata_encoder.encoder, "numbers", ())]
    places = torch.stack([columns.flatten(), rows.flatten()], dim=1)
    metadata = torch.cat([places, torch.tensor(means).expand(len(places), -1)], dim=1)
    experts = domains_at(model, metadata).view(rows.shape)
    found = DomainMap(longitude, latitude, experts, geo_layers(model)[-1].experts.num_experts)
    coverage = model.metadata_encoder.coverage
    if coverage is None:
        return found
    distance = distances(coverage, places.to(coverage.points.device)).cpu().view(rows.shape)
    return found._replace(distance=distance, radius=coverage.radius)


Batches = Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]


class ExpertUsage(NamedTuple):
    """Routing statistics over a set of images.

    Attributes:
        frequency: (L, E) share of the routed images for which the expert has the largest weight; rows sum to 1.
        selected: (L, E) share for which it is among the K best; rows sum to K.
        weight: (L, E) mean weight; rows sum to 1.
        num_routed: Images with metadata.
        num_images: All images.
        blocks: Numbers of the blocks that the layers are in.
    """

    frequency: Tensor
    selected: Tensor
    weight: Tensor
    num_routed: int
    num_images: int
    blocks: tuple[int, ...] = ()


class ExpertMatrix(NamedTuple):
    """Accuracy by discovered domain of the sample and by the expert that was forced (MoGE, Figure 3).

    Attributes:
        accuracy: (E, E) rows are domains, columns forced experts; NaN in the row of a domain without samples.
        num_samples: (E,) samples of each domain.
        routed: (E,) accuracy of each domain with ordinary routing.
    """

    accuracy: Tensor
    num_samples: Tensor
    routed: Tensor


@torch.no_grad()
def expert_usage(model: Network, metadata: Tensor) -> ExpertUsage:
    """Counts which experts a set of places is routed to; no image is needed.

    Args:
        model: A MoGE model, not wrapped.
        metadata: (B, ...) as its encoder takes it.

    Raises:
        ArgumentError: The model has no MoGE layer.
        MetadataError: The encoder does not take the metadata.
    """
    layers, training = geo_layers(model), model.training
    model.eval()
    try:
        metadata = metadata.to(layers[0].router.codes.device)
        context, present = model.metadata_encoder(layers[0].router.codes.new_zeros(len(metadata), 1), metadata)
        weights_LBE = torch.stack([layer.router(context[present]).probabilities for layer in layers]).cpu()
    finally:
        model.train(training)
    best = torch.nn.functional.one_hot(weights_LBE.argmax(-1), weights_LBE.shape[-1]).double()
    shares = (best.mean(1), (weights_LBE > 0).double().mean(1), weights_LBE.double().mean(1))
    return ExpertUsage(*shares, int(present.sum()), len(metadata), geo_blocks(model))


@torch.no_grad()
def forced_expert_matrix(model: Network, batches: Batches) -> ExpertMatrix:
    """Measures every expert on the samples of every discovered domain.

    Args:
        model: A MoGE model, not wrapped; it is left routed and in its mode.
        batches: On the model's device; samples without metadata have no domain and are left out.

    Raises:
        ArgumentError: The model has no MoGE layer.
    """
    num_experts, training = geo_layers(model)[-1].experts.num_experts, model.training
    modes: tuple[str | int, ...] = ("routed", *range(num_experts))
    domains, targets, predicted = [], [], []
    model.eval()
    try:
        for images, target, _, metadata in batches:
            answers = []
            for mode in modes:
                model.set_expert_mode(mode)
                answers.append(model(images, metadata).argmax(1).cpu())
            predicted.append(torch.stack(answers))
            domains.append(domains_at(model, metadata))
            targets.append(target.cpu())
    finally:
        model.set_expert_mode("routed")
        model.train(training)
    domain, target, answer = torch.cat(domains), torch.cat(targets), torch.cat(predicted, dim=1)
    known = domain >= 0
    columns = [group_accuracy(row[known], target[known], domain[known], num_experts) for row in answer]
    accuracy = torch.stack([column.accuracy for column in columns], dim=1)
    return ExpertMatrix(accuracy[:, 1:], columns[0].num_samples, accuracy[:, 0])
