"""Evaluation and assessment: predictions in order, scores by hand, and the network's mode unchanged."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from timm_moe_dg.data import Split
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.protocols.evaluation import (
    Outputs,
    Predictions,
    assess,
    collect_outputs,
    domain_accuracies,
    in_scores,
    out_losses,
    predict,
    restrict,
)


class FirstPixel(nn.Module):
    """Predicts the class that the first pixel names, and the next one in training mode."""

    def forward(self, images):
        assert not torch.is_grad_enabled()
        classes = images[:, 0, 0, 0].long()
        return nn.functional.one_hot(classes if not self.training else (classes + 1) % 4, 4).float()


def batch(classes, targets, groups):
    images = torch.tensor(classes, dtype=torch.float)[:, None, None, None].expand(-1, 3, 2, 2)
    return images, torch.tensor(targets), torch.tensor(groups)


def first_only(tensors):
    return tuple(tensor[:1] for tensor in tensors)


BATCHES = [batch([0, 1, 2], [0, 1, 1], [0, 0, 1]), batch([3, 3], [3, 0], [4, 4])]


@pytest.mark.parametrize("training", [True, False])
def test_predictions_are_made_in_evaluation_mode_and_the_mode_is_restored(training):
    network = FirstPixel().train(training)
    predictions = predict(network, BATCHES)
    assert predictions.predicted.tolist() == [0, 1, 2, 3, 3]
    assert predictions.target.tolist() == [0, 1, 1, 3, 0]
    assert predictions.group.tolist() == [0, 0, 1, 4, 4]
    assert network.training is training


def test_the_mode_is_restored_after_an_error():
    def broken():
        yield BATCHES[0]
        raise OSError("disk")

    network = FirstPixel().train()
    with pytest.raises(OSError, match="disk"):
        predict(network, broken())
    assert network.training


def test_modules_in_evaluation_mode_stay_so():
    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    network[0].eval()
    predict(network, [(torch.randn(4, 3), torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long))])
    assert [module.training for module in network.modules()] == [True, False, True]


def test_gather_is_called_with_every_batch():
    assert predict(FirstPixel(), BATCHES, first_only).predicted.tolist() == [0, 3]
    outputs = collect_outputs(nn.Identity(), logits_of_domains(), torch.arange(3), first_only)
    assert outputs.predicted.tolist() == [1, 1]
    assert len(outputs.confidence) == 2


def test_accuracies_by_domain_and_split():
    in_acc, out_acc = domain_accuracies(predict(FirstPixel(), BATCHES), num_domains=3)
    assert in_acc == pytest.approx((1.0, math.nan, 0.5), nan_ok=True)
    assert out_acc == pytest.approx((0.0, math.nan, math.nan), nan_ok=True)
    zero = torch.tensor([0])
    with pytest.raises(ValueError, match=r"group=.*choose indices from 0"):
        domain_accuracies(Predictions(zero, zero, torch.tensor([6]), zero, zero), num_domains=3)


def test_losses_on_out_splits_are_means_of_cross_entropies():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    target, group = torch.tensor([0, 2, 1]), torch.tensor([1, 1, 2])
    predictions = predict(nn.Identity(), [(logits, target, group)])
    first, second = -math.log(math.e**2 / (math.e**2 + 1 + 1 / math.e)), -math.log(1 / (2 + math.sqrt(math.e)))
    assert out_losses(predictions, num_domains=2) == pytest.approx(
        ((first + second) / 2, math.nan), rel=1e-6, nan_ok=True
    )


def logits_of_domains():
    """Logits in place of images, targets, groups: domain 0 in and out, domain 2 in."""
    logits = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    targets, groups = torch.tensor([1, 2, 2, 0]), torch.tensor([0, 1, 0, 4])
    return [(logits[:3], targets[:3], groups[:3]), (logits[3:], targets[3:], groups[3:])]


def outputs_of_domains(positions=(0, 1, 2)):
    return collect_outputs(nn.Identity(), logits_of_domains(), torch.tensor(positions))


def test_confidence_is_the_softmax_probability_of_the_prediction():
    outputs = outputs_of_domains()
    assert outputs.predicted.tolist() == [1, 0, 2, 1]
    assert outputs.target.tolist() == [1, 2, 2, 0]
    assert outputs.group.tolist() == [0, 1, 0, 4]
    expected = [math.exp(top) / (math.exp(top) + 2) for top in (2, 1, 3, 1)]
    assert outputs.confidence.tolist() == pytest.approx(expected)
    assert outputs_of_domains(positions=(2, 0, 1)).predicted.tolist() == [0, 2, 1, 0]


def test_scores_by_domain_and_overall():
    assessment = assess(outputs_of_domains(), num_domains=3, test_domains=[2])
    assert [scores.images for scores in assessment.domains] == [3, 0, 1]
    assert assessment.domains[0].accuracy == pytest.approx(2 / 3)
    assert math.isnan(assessment.domains[1].accuracy)
    assert math.isnan(assessment.domains[1].ece)
    assert assessment.overall.accuracy == 0.5
    assert assessment.average == pytest.approx((2 / 3 + 0) / 2)
    assert assessment.test_average == 0.0
    assert assessment.worst == (2,)
    labels, ones = (torch.zeros(2, dtype=torch.long),) * 2, torch.ones(2)
    tied = Outputs(*labels, torch.tensor([2, 4]), ones, *(torch.ones(2, 1),) * 2, ones, ones)
    assert assess(tied, num_domains=3).worst == (1, 2)
    assert assess(tied, num_domains=3, counted=[1]).worst == (1,)
    assert assessment.domains[2].ece == pytest.approx(math.e / (math.e + 2))  # wrong with this confidence


def test_without_test_domains_their_average_is_nan():
    zero = torch.tensor([0])
    outputs = Outputs(zero, zero, zero, torch.tensor([0.5]), torch.ones(1, 1), torch.ones(1, 0), *(torch.ones(1),) * 2)
    assert math.isnan(assess(outputs, 1).test_average)


def test_parts_of_splits():
    splits = [Split(np.array([3, 1]), np.array([0])), Split(np.array([0]), np.array([], dtype=int))]

    def positions(part):
        return [(split.inside.tolist(), split.outside.tolist()) for split in restrict(splits, part)]

    assert positions("all") == [([3, 1], [0]), ([0], [])]
    assert positions("in") == [([3, 1], []), ([0], [])]
    assert positions("out") == [([], [0]), ([], [])]
    with pytest.raises(ArgumentError, match="split='out': holds no image of any domain"):
        restrict(splits[1:], "out")
    with pytest.raises(ArgumentError, match="split='train': choose from all, in, out"):
        restrict(splits, "train")


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_the_area_under_the_curve_is_that_of_the_logits_whose_probabilities_round_to_one(temperature):
    odds, targets = torch.linspace(10, 60, 30)[torch.randperm(30)], torch.arange(30) % 2
    logits = torch.stack([-odds, odds], dim=1)
    batches, groups = [(logits, targets, targets * 0)], torch.arange(2)
    expected = pytest.approx(roc_auc_score(targets, odds))
    assert in_scores(predict(nn.Identity(), batches), 1)["auc"] == [expected]
    assert assess(collect_outputs(nn.Identity(), batches, groups, temperature=temperature), 1).overall.auc == expected
