"""Metrics of class predictions: accuracy, overall and by group; confusion matrix; macro F1; calibration.

Axes: N samples, G groups, C classes, M bins of confidence.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .errors import ArgumentError

# Name -> title, of the scores by which runs are selected and reported
Metric = Literal["accuracy", "balanced_accuracy", "f1_macro"]
METRICS: dict[Metric, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1_macro": "F1-macro",
}
# Name -> title of a column
CLASS_SCORES = {"balanced_accuracy": "balanced", "f1_macro": "F1-macro"}
CLASS_SCORES |= {"sensitivity": "sensitivity", "specificity": "specificity", "auc": "AUC"}


class GroupAccuracy(NamedTuple):
    """Accuracies (G,) float64, NaN for empty groups, and numbers of samples (G,) int64."""

    accuracy: Tensor
    num_samples: Tensor


class WorstGroup(NamedTuple):
    """Accuracy, index and size of the group with the lowest accuracy: NaN, -1 and 0 if all groups are empty."""

    accuracy: float
    group: int
    num_samples: int


def accuracy(predicted: Tensor, target: Tensor) -> Tensor:
    """(N,) predicted and target classes -> accuracy, a float64 scalar; NaN without samples.

    >>> accuracy(torch.tensor([1, 0]), torch.tensor([1, 1])).item()
    0.5
    """
    group = torch.zeros_like(target)
    return group_accuracy(predicted, target, group, num_groups=1).accuracy[0]


def group_accuracy(predicted: Tensor, target: Tensor, group: Tensor, num_groups: int) -> GroupAccuracy:
    """Computes the accuracy of each group, such as a domain, from predicted classes, targets and groups, all (N,).

    >>> group_accuracy(torch.tensor([1, 0, 2]), torch.tensor([1, 1, 2]), torch.tensor([0, 0, 2]), num_groups=3)
    GroupAccuracy(accuracy=tensor([0.5000,    nan, 1.0000], dtype=torch.float64), num_samples=tensor([2, 0, 1]))
    """
    _check_vectors(predicted=predicted, target=target, group=group)
    _check_range("group", group, num_groups)
    correct = (predicted == target).double()
    num_samples = torch.bincount(group, minlength=num_groups)
    return GroupAccuracy(torch.bincount(group, weights=correct, minlength=num_groups) / num_samples, num_samples)


def worst_group(
    predicted: Tensor, target: Tensor, group: Tensor, num_groups: int, ignored: Sequence[int] = ()
) -> WorstGroup:
    """Finds the non-empty group with the lowest accuracy, the first in case of a tie.

    >>> worst_group(torch.tensor([1, 0, 2]), torch.tensor([1, 1, 2]), torch.tensor([0, 0, 2]), num_groups=3)
    WorstGroup(accuracy=0.5, group=0, num_samples=2)

    The arguments are those of `group_accuracy`, and `ignored` groups are left out, such as FMoW's "Other".
    """
    if any(not 0 <= index < num_groups for index in ignored):
        raise ArgumentError.of("ignored", list(ignored), f"choose groups from 0..{num_groups - 1}")
    by_group = group_accuracy(predicted, target, group, num_groups)
    eligible = by_group.num_samples > 0
    eligible[list(ignored)] = False
    if not eligible.any():
        return WorstGroup(float("nan"), -1, 0)
    index = int(by_group.accuracy.masked_fill(~eligible, torch.inf).argmin())
    return WorstGroup(by_group.accuracy[index].item(), index, int(by_group.num_samples[index]))


def wilson_interval(share: float, number: float) -> tuple[float, float]:
    """Computes the 95% interval of a proportion by Wilson's score method (1927), which holds from one sample on.

    >>> wilson_interval(1.0, 3)
    (0.438..., 1.0)
    """
    z = 1.959964  # of the standard normal distribution, at 97.5%
    center = share + z**2 / (2 * number)
    margin = z * math.sqrt(share * (1 - share) / number + z**2 / (4 * number**2))
    low, high = ((center + side * margin) / (1 + z**2 / number) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


def independent_number(number: int, squares: Sequence[int]) -> float:
    """Returns how many independent samples a number of samples in groups is worth: n^2 / sum(m^2), for groups of m.

    Samples of a group count as if their answers were always right or wrong together (Kish, "Survey Sampling", 1965: the
    effective size of clusters). `squares` are parts of the sum.

    >>> independent_number(33, [11 * 3**2])
    11.0
    """
    return number**2 / sum(squares)


def confusion_matrix(predicted: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Counts how often each target (row) was given each prediction (column): (N,) class indices -> (C, C) int64.

    >>> confusion_matrix(torch.tensor([1, 0, 1]), torch.tensor([1, 0, 0]), num_classes=2)
    tensor([[1, 1],
            [0, 1]])
    """
    _check_vectors(predicted=predicted, target=target)
    _check_range("predicted", predicted, num_classes)
    _check_range("target", target, num_classes)
    cells = torch.bincount(target * num_classes + predicted, minlength=num_classes**2)
    return cells.view(num_classes, num_classes)


def f1_macro(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of F1 = 2 TP / (2 TP + FP + FN) over the classes that occur in the target, float64; NaN without samples.

    Equals `f1_score(target, predicted, average="macro", labels=unique(target))` of scikit-learn, WILDS's metric for
    iWildCam. A class that is only predicted counts as false positives or negatives of the others. scikit-learn's
    default, without `labels`, includes this class with an F1 of 0.

    >>> f1_macro(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])).item()
    0.833...
    """
    # Not by scikit-learn: importing it would lengthen the start of every training run by about a third
    _check_vectors(predicted=predicted, target=target)
    num_classes = 1 + int(torch.cat([predicted, target, target.new_tensor([-1])]).max())
    true_positives = torch.bincount(target[predicted == target], minlength=num_classes).double()
    num_targets = torch.bincount(target, minlength=num_classes)
    num_predicted = torch.bincount(predicted, minlength=num_classes)
    return (2 * true_positives / (num_predicted + num_targets))[num_targets > 0].mean()


def class_scores(predicted: Tensor, target: Tensor, positive: Tensor) -> dict[str, float]:
    """Returns scores by their names in `CLASS_SCORES`, for predicted and target classes (N,).

    Balanced accuracy is the mean recall of the classes that occur in the target, as in scikit-learn. The other three
    are of two classes: the recall of the second, the positive one, the recall of the first, and the area under the
    ROC curve. `positive` (N,) is any score that grows with the positive class's probability, or NaN for other numbers
    of classes, which have none of the three. A class without images gives NaN.

    >>> class_scores(torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0]), torch.tensor([0.9, 0.4, 0.2]))["auc"]
    1.0
    """
    # Not by scikit-learn, as `f1_macro`
    recall = group_accuracy(predicted, target, target, 1 + int(torch.cat([target, target.new_ones(1)]).max())).accuracy
    auc = specificity = sensitivity = torch.tensor(torch.nan)
    if len(positive) and not positive.isnan().all():
        specificity, sensitivity = recall
        negatives = positive[target == 0].sort().values
        ranks = [torch.searchsorted(negatives, positive[target == 1], right=right) for right in (False, True)]
        auc = torch.stack(ranks).double().sum(0).mean() / (2 * len(negatives))
    scores = (recall.nanmean(), f1_macro(predicted, target), sensitivity, specificity, auc)
    return {name: score.item() for name, score in zip(CLASS_SCORES, scores, strict=True)}


def _check_vectors(**vectors: Tensor) -> None:
    """Checks that tensors are vectors of equal length; the keywords are the caller's argument names."""
    shapes = [tuple(vector.shape) for vector in vectors.values()]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ArgumentError.of(", ".join(vectors), shapes, "give vectors of equal length")


def _check_range(name: str, indices: Tensor, size: int) -> None:
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise ArgumentError.of(name, (int(indices.min()), int(indices.max())), f"choose indices from 0..{size - 1}")


class CalibrationBins(NamedTuple):
    """Statistics of predictions in M bins of equal width, by confidence. The means of an empty bin are NaN."""

    num_samples: Tensor  # (M,) int64
    confidence: Tensor  # (M,) float64, mean
    accuracy: Tensor  # (M,) float64


def calibration_bins(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> CalibrationBins:
    """Bins predictions by confidence: bin m = 1..M covers ((m - 1) / M, m / M]; a confidence of 0 is in the first bin.

    `confidence` (N,) is the probability of the predicted class, 0..1, and `correct` (N,) whether that class is right.
    """
    _check_vectors(confidence=confidence, correct=correct)
    if num_bins < 1:
        raise ArgumentError.of("num_bins", num_bins, "give at least one bin")
    confidence = confidence.double()
    if not ((confidence >= 0) & (confidence <= 1)).all():
        lowest, highest = confidence.aminmax()
        raise ArgumentError.of("confidence", (lowest.item(), highest.item()), "give probabilities, 0 to 1")
    edges = torch.arange(1, num_bins, dtype=torch.float64, device=confidence.device) / num_bins
    bins = torch.bucketize(confidence, edges)
    num_samples = torch.bincount(bins, minlength=num_bins)
    sums = [torch.bincount(bins, weights=values, minlength=num_bins) for values in (confidence, correct.double())]
    return CalibrationBins(num_samples, sums[0] / num_samples, sums[1] / num_samples)


def expected_calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = 15) -> Tensor:
    """Mean gap between confidence and accuracy over bins of equal width, weighted by their number of samples.

    ECE = `sum_m |B_m| / N * |acc(B_m) - conf(B_m)|`, a float64 scalar in 0..1, or NaN without samples (Guo et al., "On
    Calibration of Modern Neural Networks", ICML 2017, equation 3). The arguments are those of `calibration_bins`.

    >>> expected_calibration_error(torch.tensor([0.9, 0.9, 0.6]), torch.tensor([True, False, True])).item()
    0.399...
    """
    bins = calibration_bins(confidence, correct, num_bins)
    gaps = (bins.accuracy - bins.confidence).abs().nan_to_num()  # NaN in empty bins, whose weight is 0
    return (gaps * bins.num_samples).sum() / bins.num_samples.sum()
