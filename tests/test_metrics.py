"""Metrics of class predictions against counting in plain Python, scikit-learn as WILDS calls it, and closed forms."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.metrics import balanced_accuracy_score, f1_score, recall_score, roc_auc_score

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.metrics import (
    CLASS_SCORES,
    accuracy,
    class_scores,
    confusion_matrix,
    expected_calibration_error,
    f1_macro,
    group_accuracy,
    wilson_interval,
    worst_group,
)

GROUPS = 6
LABELS = torch.tensor([0, 1, 2])
EMPTY = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def sample():
    """About half of the predictions are correct; groups 2 and 5 are empty."""
    target = torch.randint(3, (101,))
    predicted = torch.where(torch.rand(101) < 0.5, target, (target + 1) % 3)
    group = torch.tensor([0, 1, 3, 4])[torch.randint(4, (101,))]
    return predicted, target, group


def test_every_group_and_the_worst_of_them_are_counted_one_by_one(sample):
    result, shares = group_accuracy(*sample, num_groups=GROUPS), []
    for wanted in range(GROUPS):
        rows = [row for row in zip(*map(torch.Tensor.tolist, sample), strict=True) if row[2] == wanted]
        assert result.num_samples[wanted] == len(rows)
        if rows:
            shares.append(Fraction(sum(row[0] == row[1] for row in rows), len(rows)))
            assert result.accuracy[wanted].item() == float(shares[-1])
        else:
            assert math.isnan(result.accuracy[wanted])
    assert len(shares) == 4
    assert worst_group(*sample, num_groups=GROUPS).accuracy == float(min(shares))
    predicted, target, _ = sample
    assert accuracy(predicted, target).item() == (predicted == target).sum().item() / 101


def test_the_worst_group_comes_with_its_size_and_may_be_ignored():
    # group 0: 2 of 3 correct, group 1: none of 2, group 2: empty, group 3: 1 of 1
    predicted, target = torch.tensor([0, 1, 2, 0, 0, 3]), torch.tensor([0, 1, 0, 1, 2, 3])
    group = torch.tensor([0, 0, 0, 1, 1, 3])
    assert worst_group(predicted, target, group, 4) == (0.0, 1, 2)
    assert worst_group(predicted, target, group, 4, ignored=[1]) == (pytest.approx(2 / 3), 0, 3)
    ones = torch.ones(1, dtype=torch.long)
    assert worst_group(ones, ones, ones, 2, ignored=[1]).group == -1


def test_without_samples_everything_is_nan_or_zero():
    assert math.isnan(accuracy(EMPTY, EMPTY))
    assert group_accuracy(EMPTY, EMPTY, EMPTY, num_groups=2).num_samples.tolist() == [0, 0]
    lowest, index, number = worst_group(EMPTY, EMPTY, EMPTY, 2)
    assert (math.isnan(lowest), index, number) == (True, -1, 0)
    assert f1_macro(EMPTY, EMPTY).isnan()
    assert torch.equal(confusion_matrix(EMPTY, EMPTY, 2), torch.zeros(2, 2, dtype=torch.long))
    assert expected_calibration_error(EMPTY.double(), EMPTY.bool()).isnan()
    assert all(map(math.isnan, class_scores(EMPTY, EMPTY, EMPTY.double()).values()))


@pytest.mark.parametrize(
    ("compute", "argument"),
    [
        (lambda: group_accuracy(LABELS, LABELS, torch.tensor([0, 1, 6]), GROUPS), r"group=\(0, 6\)"),
        (lambda: group_accuracy(torch.zeros(3, 4), LABELS, LABELS, 3), "predicted, target, group="),
        (lambda: worst_group(LABELS, LABELS, LABELS, GROUPS, ignored=[6]), r"ignored=\[6\]"),
        (lambda: confusion_matrix(LABELS + 1, LABELS, 3), r"predicted=\(1, 3\)"),
        (lambda: confusion_matrix(LABELS, LABELS - 1, 3), r"target=\(-1, 1\)"),
        (lambda: expected_calibration_error(torch.tensor([1.5]), LABELS[:1] == 0), "confidence="),
        (lambda: expected_calibration_error(torch.tensor([math.nan]), LABELS[:1] == 0), "confidence="),
        (lambda: expected_calibration_error(torch.tensor([0.5]), LABELS[:1] == 0, 0), "num_bins=0"),
    ],
)
def test_mistakes_are_named(compute, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}"):
        compute()


def test_every_cell_of_the_confusion_matrix_is_counted():
    predicted, target = torch.randint(4, (80,)), torch.randint(4, (80,))
    counts = Counter(zip(target.tolist(), predicted.tolist(), strict=True))
    matrix = confusion_matrix(predicted, target, num_classes=5)
    assert matrix.tolist() == [[counts[row, column] for column in range(5)] for row in range(5)]


def test_f1_equals_what_wilds_asks_scikit_learn_for():
    """Up to 182 classes, as iWildCam has, of which few may occur; some are only predicted, some never predicted."""
    random = np.random.default_rng(0)
    only_predicted = 0
    for _ in range(200):
        classes, number = random.integers(1, 183), random.integers(1, 60)
        present = random.choice(classes, random.integers(1, classes + 1), replace=False)
        target = random.choice(present, number)
        predicted = np.where(random.random(number) < random.random(), target, random.integers(0, classes, number))
        labels = np.unique(target)
        expected = f1_score(target, predicted, average="macro", labels=labels, zero_division=0)
        assert f1_macro(torch.tensor(predicted), torch.tensor(target)).item() == pytest.approx(expected, abs=1e-12)
        only_predicted += len(np.setdiff1d(predicted, labels)) > 0
    assert only_predicted > 100


@pytest.mark.parametrize(("correct", "number"), [(0, 1), (3, 3), (1, 7), (250, 300)])
def test_the_interval_of_a_share_is_wilsons(correct, number):
    expected = binomtest(correct, number).proportion_ci(0.95, method="wilson")
    assert wilson_interval(correct / number, number) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_scores_of_two_classes_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    target = np.append(rng.integers(0, 2, 30), [0, 1])
    positive = rng.integers(0, 8, 32) / 8  # with ties
    predicted = (positive > 0.5).astype(int)
    expected = {
        "balanced_accuracy": balanced_accuracy_score(target, predicted),
        "f1_macro": f1_score(target, predicted, average="macro"),
        "sensitivity": recall_score(target, predicted),
        "specificity": recall_score(target, predicted, pos_label=0),
        "auc": roc_auc_score(target, positive),
    }
    assert class_scores(*map(torch.from_numpy, (predicted, target, positive))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("label", "known", "unknown"), [(0, "specificity", "sensitivity"), (1, "sensitivity", "specificity")]
)
def test_scores_of_a_class_without_images_are_nan(label, known, unknown):
    scores = class_scores(torch.tensor([0, 1]), torch.tensor([label, label]), torch.tensor([0.2, 0.8]))
    assert scores["balanced_accuracy"] == scores[known] == 0.5
    assert math.isnan(scores["auc"])
    assert math.isnan(scores[unknown])


def test_of_many_classes_the_scores_are_balanced_accuracy_and_f1(sample):
    predicted, target, _ = sample
    scores = class_scores(predicted, target, torch.full((101,), torch.nan))
    assert list(scores) == list(CLASS_SCORES)
    assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(target, predicted), abs=1e-12)
    assert [name for name, score in scores.items() if math.isnan(score)] == ["sensitivity", "specificity", "auc"]


@pytest.mark.parametrize("num_bins", [1, 2, 15, 40])
def test_the_calibration_error_is_a_loop_over_bins_in_any_order(num_bins):
    edges = torch.arange(0, 16, dtype=torch.float64) / 15  # values that lie on a border belong to the bin below it
    confidence = torch.cat([torch.rand(300, dtype=torch.float64), edges])
    correct = torch.rand(len(confidence)) < confidence**2
    total = 0.0
    for number in range(1, num_bins + 1):
        inside = ((number - 1) / num_bins < confidence) & (confidence <= number / num_bins)
        inside |= (confidence == 0) & (number == 1)
        if inside.any():
            total += abs(correct[inside].double().sum() - confidence[inside].sum()).item()
    order = torch.randperm(len(confidence))
    for rows in (slice(None), order):
        error = expected_calibration_error(confidence[rows], correct[rows], num_bins).item()
        assert error == pytest.approx(total / len(confidence), abs=1e-12)
