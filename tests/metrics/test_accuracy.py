"""Metrics of class predictions against counting in plain Python; F1-macro against scikit-learn as WILDS calls it."""

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
    f1_macro,
    group_accuracy,
    wilson_interval,
    worst_group,
)

GROUPS = 6
EMPTY = torch.zeros(0, dtype=torch.int64)


@pytest.fixture
def sample():
    """About half of the predictions are correct; groups 2 and 5 are empty."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(3, (101,), generator=generator)
    predicted = torch.where(torch.rand(101, generator=generator) < 0.5, target, (target + 1) % 3)
    group = torch.tensor([0, 1, 3, 4])[torch.randint(4, (101,), generator=generator)]
    return predicted, target, group


def counted(predicted, target, group, wanted):
    rows = [row for row in zip(predicted.tolist(), target.tolist(), group.tolist(), strict=True) if row[2] == wanted]
    return len(rows), Fraction(sum(row[0] == row[1] for row in rows), len(rows)) if rows else None


def test_groups_are_counted_one_by_one(sample):
    result = group_accuracy(*sample, num_groups=GROUPS)
    for wanted in range(GROUPS):
        number, share = counted(*sample, wanted)
        assert result.num_samples[wanted] == number
        if share is None:
            assert math.isnan(result.accuracy[wanted])
        else:
            assert result.accuracy[wanted].item() == float(share)
    assert result.num_samples.sum() == 101


def test_accuracy_is_the_mean_weighted_by_group_size(sample):
    predicted, target, _ = sample
    correct = sum(a == b for a, b in zip(predicted.tolist(), target.tolist(), strict=True))
    assert accuracy(predicted, target).item() == correct / 101


def test_worst_group_passes_over_empty_groups(sample):
    shares = [share for wanted in range(GROUPS) if (share := counted(*sample, wanted)[1]) is not None]
    assert worst_group(*sample, num_groups=GROUPS).accuracy == float(min(shares))


def test_without_samples_everything_is_nan_or_zero():
    assert math.isnan(accuracy(EMPTY, EMPTY))
    assert group_accuracy(EMPTY, EMPTY, EMPTY, num_groups=2).num_samples.tolist() == [0, 0]
    assert f1_macro(EMPTY, EMPTY).isnan()
    assert torch.equal(confusion_matrix(EMPTY, EMPTY, 2), torch.zeros(2, 2, dtype=torch.long))


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda *labels: group_accuracy(*labels, torch.tensor([0, 1, 6]), GROUPS), r"group=\(0, 6\): .* 0\.\.5"),
        (lambda *labels: group_accuracy(*labels, torch.tensor([0, -1, 2]), GROUPS), r"group=\(-1, 2\): .* 0\.\.5"),
        (lambda *labels: worst_group(*labels, labels[0], GROUPS, ignored=[6]), r"ignored=\[6\]: .* 0\.\.5"),
        (lambda *labels: confusion_matrix(labels[0] + 1, labels[1], 3), r"predicted=\(1, 3\): .* 0\.\.2"),
        (lambda *labels: confusion_matrix(labels[0], labels[1] - 1, 3), r"target=\(-1, 1\): "),
        (lambda *labels: confusion_matrix(labels[0], labels[1][:1], 3), "predicted, target=.* vectors of equal length"),
        (lambda *labels: f1_macro(labels[0], labels[1][0]), "predicted, target=.* vectors of equal length"),
        (lambda *labels: group_accuracy(torch.zeros(3, 4), *labels, 3), "predicted, .* vectors of equal length"),
    ],
)
def test_mistakes_are_named(compute, message):
    labels = torch.tensor([0, 1, 2])
    with pytest.raises(ArgumentError, match=message):
        compute(labels, labels)


def test_the_worst_group_comes_with_its_size() -> None:
    # group 0: 2 of 3 correct, group 1: none of 2, group 2: empty, group 3: 1 of 1
    predicted = torch.tensor([0, 1, 2, 0, 0, 3])
    target = torch.tensor([0, 1, 0, 1, 2, 3])
    group = torch.tensor([0, 0, 0, 1, 1, 3])
    assert worst_group(predicted, target, group, 4) == (0.0, 1, 2)
    accuracy, index, number = worst_group(predicted, target, group, 4, ignored=[1])
    assert (accuracy, index, number) == (pytest.approx(2 / 3), 0, 3)


def test_without_a_group_that_counts_the_worst_is_unknown() -> None:
    accuracy, index, number = worst_group(EMPTY, EMPTY, EMPTY, 2)
    assert math.isnan(accuracy)
    assert (index, number) == (-1, 0)
    ones = torch.ones(1, dtype=torch.long)
    assert worst_group(ones, ones, ones, 2, ignored=[1]).group == -1


def test_every_cell_of_the_confusion_matrix_is_counted():
    generator = torch.Generator().manual_seed(0)
    predicted, target = (torch.randint(4, (80,), generator=generator) for _ in range(2))
    counts = Counter(zip(target.tolist(), predicted.tolist(), strict=True))
    matrix = confusion_matrix(predicted, target, num_classes=5)
    assert matrix.tolist() == [[counts[row, column] for column in range(5)] for row in range(5)]


def test_f1_equals_what_wilds_asks_scikit_learn_for() -> None:
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


def test_a_class_that_is_only_predicted_has_no_f1_of_its_own() -> None:
    # class 0: TP 1, FN 1 -> 2/3; class 1: TP 1 -> 1; class 2 is no target
    assert f1_macro(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 0])).item() == pytest.approx((2 / 3 + 1) / 2)
    assert f1_macro(torch.tensor([5]), torch.tensor([2])).item() == 0.0


def test_f1_by_hand() -> None:
    # class 0: TP 1, FP 0, FN 1 -> 2/3; class 1: TP 1, FP 1, FN 0 -> 2/3
    assert f1_macro(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])).item() == pytest.approx(2 / 3)
    assert f1_macro(torch.tensor([4, 4]), torch.tensor([4, 4])).item() == 1.0


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
    scores = class_scores(*map(torch.from_numpy, (predicted, target, positive)))
    assert scores == pytest.approx(
        {
            "balanced_accuracy": balanced_accuracy_score(target, predicted),
            "f1_macro": f1_score(target, predicted, average="macro"),
            "sensitivity": recall_score(target, predicted),
            "specificity": recall_score(target, predicted, pos_label=0),
            "auc": roc_auc_score(target, positive),
        },
        abs=1e-12,
    )


def test_scores_of_a_class_without_images_are_nan():
    for label in (0, 1):
        scores = class_scores(torch.tensor([0, 1]), torch.tensor([label, label]), torch.tensor([0.2, 0.8]))
        assert scores["balanced_accuracy"] == 0.5
        assert math.isnan(scores["auc"])
        assert math.isnan(scores["specificity" if label else "sensitivity"])
        assert scores["sensitivity" if label else "specificity"] == 0.5
    assert all(map(math.isnan, class_scores(EMPTY, EMPTY, EMPTY.double()).values()))


def test_of_many_classes_the_scores_are_balanced_accuracy_and_f1(sample):
    predicted, target, _ = sample
    scores = class_scores(predicted, target, torch.full((101,), torch.nan))
    assert list(scores) == list(CLASS_SCORES)
    assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(target, predicted), abs=1e-12)
    assert [name for name, score in scores.items() if math.isnan(score)] == ["sensitivity", "specificity", "auc"]
