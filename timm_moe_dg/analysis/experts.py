"""How often each expert is used, and how good it is for the samples of each domain when it must answer for all.

Batches are tuples of images (B, 3, H, W), targets (B,), groups (B,) and metadata, as the evaluation loader yields them.

Axes: L mixture layers, E routed experts.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..metrics import group_accuracy
from ..networks.build import Network
from .domains import domains_at, geo_blocks, geo_layers

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
