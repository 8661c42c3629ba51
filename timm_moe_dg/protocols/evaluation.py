"""Evaluation: one pass over every image, then accuracy by domain and split."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..metrics import group_accuracy

Batches = Iterable[Sequence[Tensor]]
Gather = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class Judged(Protocol):
    """What scores are computed from: predictions beside targets, on CPU, all of shape (N,)."""

    @property
    def predicted(self) -> Tensor:
        """Class indices."""

    @property
    def target(self) -> Tensor:
        """Class indices."""

    @property
    def group(self) -> Tensor:
        """As `EvaluationImages` numbers them: 2 * domain for "in" images and 2 * domain + 1 for "out" images."""


class Predictions(NamedTuple):
    """What a network said, on CPU.

    Attributes:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
        group: 2 * domain for "in" images and 2 * domain + 1 for "out" images, shape (N,).
        loss: Cross-entropies, shape (N,).
    """

    predicted: Tensor
    target: Tensor
    group: Tensor
    loss: Tensor


class Answers(NamedTuple):
    """What a network answered, on CPU.

    Attributes:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
        group: As `EvaluationImages` numbers them: 2 * domain, or 2 * domain + 1, shape (N,).
        confidence: Softmax probability of the predicted class, shape (N,).
        probabilities: Of all classes in the data's order, shape (N, C).
        features: What the classifier saw, shape (N, D); (N, 0) where nobody looked.
    """

    predicted: Tensor
    target: Tensor
    group: Tensor
    confidence: Tensor
    probabilities: Tensor
    features: Tensor


@torch.no_grad()
def predict(network: nn.Module, batches: Batches, gather: Gather = tuple) -> Predictions:
    """Predicts every batch in evaluation mode and leaves every module of the network in the mode it was in.

    Args:
        network: Maps images (B, 3, H, W), and their metadata where batches have any, to logits (B, num_classes).
        batches: Images, targets (B,), groups (B,) and possibly metadata, on the network's device.
        gather: Collects tensors over processes and drops the padding, as accelerate's `gather_for_metrics` does.
    """
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        rows = [
            tuple(column.cpu() for column in gather(_judged(network(images, *metadata), target, group)))
            for images, target, group, *metadata in batches
        ]
    finally:
        for module in training:
            module.training = True
    return Predictions(*map(torch.cat, zip(*rows, strict=True)))


def domain_accuracies(predictions: Judged, num_domains: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the accuracies on the in-splits and on the out-splits, by domain; NaN for an empty split."""
    columns = (predictions.predicted, predictions.target, predictions.group)
    accuracy = group_accuracy(*columns, num_groups=2 * num_domains).accuracy.tolist()
    return tuple(accuracy[0::2]), tuple(accuracy[1::2])


def out_losses(predictions: Predictions, num_domains: int) -> tuple[float, ...]:
    """Returns the mean cross-entropies on the out-splits, by domain; NaN for an empty split."""
    masks = (predictions.group == 2 * domain + 1 for domain in range(num_domains))
    return tuple(predictions.loss[mask].double().mean().item() for mask in masks)


@torch.no_grad()
def answer(
    network: Callable[..., Tensor | tuple[Tensor, ...]],
    batches: Batches,
    positions: Tensor,
    gather: Gather = tuple,
) -> Answers:
    """Asks a network, in the mode that it is in, about every image.

    Args:
        network: Maps images (B, 3, H, W), and their metadata where batches have any, to logits (B, C); or to a tuple of
            these and, possibly, what the classifier saw (B, D).
        batches: Images, targets (B,), groups (B,) and possibly metadata, on the network's device.
        positions: (C,) the class that each logit is about, see `class_positions`.
        gather: Collects tensors over processes and drops the padding, as accelerate's `gather_for_metrics` does.
    """
    columns = []
    for images, target, group, *metadata in batches:
        given = network(images, *metadata)
        logits, *seen = given if isinstance(given, tuple) else (given,)
        probabilities = logits.float().softmax(dim=1)
        row = (target, group, probabilities, seen[0] if seen else logits[:, :0])
        columns.append([part.cpu() for part in gather(row)])
    target, group, probabilities, features = (torch.cat(parts) for parts in zip(*columns, strict=True))
    probabilities = probabilities[:, positions.argsort()]
    confidence, predicted = probabilities.max(dim=1)
    return Answers(predicted, target, group, confidence, probabilities, features)


def _judged(logits: Tensor, target: Tensor, group: Tensor) -> tuple[Tensor, ...]:
    loss = F.cross_entropy(logits.float(), target, reduction="none")
    return logits.argmax(1), target, group, loss
