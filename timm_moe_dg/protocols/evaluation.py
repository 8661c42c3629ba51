"""Evaluation: one pass over every image, then accuracy and loss by domain and split."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..metrics import CLASS_SCORES, class_scores, group_accuracy

Batches = Iterable[Sequence[Tensor]]
Gather = Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]


class Predictions(NamedTuple):
    """Predictions and losses of a network, on CPU."""

    predicted: Tensor  # class indices, (N,)
    target: Tensor  # class indices, (N,)
    group: Tensor  # 2 * domain for in-split images and 2 * domain + 1 for out-split images, (N,)
    loss: Tensor  # cross-entropies, (N,)
    positive: Tensor  # `positive_score`, (N,)


class Outputs(NamedTuple):
    """Probabilities and features of a network, on CPU."""

    predicted: Tensor  # the first three are as in `Predictions`
    target: Tensor
    group: Tensor
    confidence: Tensor  # softmax probability of the predicted class, (N,)
    probabilities: Tensor  # of all classes in the data's order, (N, C)
    features: Tensor  # input of the classifier, (N, D); (N, 0) if the network does not return it
    uncalibrated: Tensor  # `confidence` without the temperature
    positive: Tensor  # `positive_score`, (N,)


@torch.no_grad()
def predict(network: nn.Module, batches: Batches, gather: Gather = tuple) -> Predictions:
    """Predicts every batch in evaluation mode, and restores the mode of every module.

    Args:
        network: Maps images (B, 3, H, W), and their metadata if batches have any, to logits (B, num_classes).
        batches: Images, targets (B,), groups (B,) and possibly metadata, on the network's device.
        gather: Collects tensors over processes and drops the padding, as accelerate's `gather_for_metrics` does.
    """
    training = [module for module in network.modules() if module.training]
    network.eval()
    try:
        rows = []
        for images, target, group, *metadata in batches:
            logits = network(images, *metadata)
            # In half precision the loss would have three digits
            loss = F.cross_entropy(logits.float(), target, reduction="none")
            rows.append(gather((logits.argmax(1), target, group, loss, positive_score(logits))))
    finally:
        # Module by module, because frozen batch normalization is in evaluation mode during training
        for module in training:
            module.training = True
    return Predictions(*(torch.cat(column).cpu() for column in zip(*rows, strict=True)))  # waits for a device once


@torch.no_grad()
def collect_outputs(
    network: Callable[..., Tensor | tuple[Tensor, ...]],
    batches: Batches,
    positions: Tensor,
    gather: Gather = tuple,
    temperature: float = 1.0,
) -> Outputs:
    """Runs a network, in the mode that it is in, on every batch; see `predict`.

    The network returns logits (B, C), or a tuple of logits and the classifier's input (B, D). `positions` (C,) holds
    the class of each logit, see `class_positions`. Probabilities are those of the logits divided by the temperature.
    """
    columns = []
    for images, target, group, *metadata in batches:
        output = network(images, *metadata)
        logits, *further = output if isinstance(output, tuple) else (output,)
        row = (target, group, logits.float(), further[0] if further else logits[:, :0])
        columns.append([part.cpu() for part in gather(row)])
    target, group, logits, features = (torch.cat(parts) for parts in zip(*columns, strict=True))
    # From the order of the logits to the order of the classes
    logits = logits[:, positions.argsort()]
    plain = logits.softmax(dim=1)
    uncalibrated, predicted = plain.max(dim=1)  # rounding cannot change the class with the temperature
    probabilities = (logits / temperature).softmax(dim=1) if temperature != 1 else plain
    confidence, positive = probabilities.amax(1), positive_score(logits)
    return Outputs(predicted, target, group, confidence, probabilities, features, uncalibrated, positive)


def domain_accuracies(
    predictions: Predictions | Outputs, num_domains: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the accuracies on the in-splits and on the out-splits, by domain; NaN for an empty split."""
    columns = (predictions.predicted, predictions.target, predictions.group)
    accuracy = group_accuracy(*columns, num_groups=2 * num_domains).accuracy.tolist()
    return tuple(accuracy[0::2]), tuple(accuracy[1::2])


def positive_score(logits: Tensor) -> Tensor:
    """(N, C) -> (N,) float32 log-odds of the second of two classes, or NaN for other numbers of classes."""
    # Not its probability, which rounds to 1 for many images of a confident network
    scores = logits.float()
    return scores[:, 1] - scores[:, 0] if logits.shape[1] == 2 else torch.full_like(scores[:, 0], torch.nan)


def in_scores(predictions: Predictions, num_domains: int) -> dict[str, list[float]]:
    """Returns `metrics.class_scores` on the in-splits: name -> score of each domain."""
    masks = [predictions.group == 2 * domain for domain in range(num_domains)]
    columns = (predictions.predicted, predictions.target, predictions.positive)
    scores = [class_scores(*(column[mask] for column in columns)) for mask in masks]
    return {name: [row[name] for row in scores] for name in CLASS_SCORES}


def out_losses(predictions: Predictions, num_domains: int) -> tuple[float, ...]:
    """Returns the mean cross-entropies on the out-splits, by domain; NaN for an empty split."""
    masks = (predictions.group == 2 * domain + 1 for domain in range(num_domains))
    return tuple(predictions.loss[mask].double().mean().item() for mask in masks)
