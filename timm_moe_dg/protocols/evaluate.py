"""Evaluation: one pass over every image, then accuracy by domain and split."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..metrics import group_accuracy

Batches = Iterable[Sequence[Tensor]]


class Predictions(NamedTuple):
    """What a network said, on CPU.

    Attributes:
        predicted: Class indices, shape (N,).
        target: Class indices, shape (N,).
        group: 2 * domain for "in" images and 2 * domain + 1 for "out" images, shape (N,).
    """

    predicted: Tensor
    target: Tensor
    group: Tensor


@torch.no_grad()
def predict(
    network: nn.Module, batches: Batches, gather: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = tuple
) -> Predictions:
    """Predicts every batch in evaluation mode and leaves the network in the mode it was in.

    Args:
        network: Maps images (B, 3, H, W), and their metadata where batches have any, to logits (B, num_classes).
        batches: Images, targets (B,), groups (B,) and possibly metadata, on the network's device.
        gather: Collects tensors over processes and drops the padding, as accelerate's `gather_for_metrics` does.
    """
    was_training = network.training
    network.eval()
    try:
        rows = [
            torch.stack(list(gather((network(images, *metadata).argmax(1), target, group)))).cpu()
            for images, target, group, *metadata in batches
        ]
    finally:
        network.train(was_training)
    return Predictions(*torch.cat(rows, dim=1))


def domain_accuracies(predictions: Predictions, num_domains: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the accuracies on the in-splits and on the out-splits, by domain; NaN for an empty split."""
    accuracy = group_accuracy(*predictions, num_groups=2 * num_domains).accuracy.tolist()
    return tuple(accuracy[0::2]), tuple(accuracy[1::2])
