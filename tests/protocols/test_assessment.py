"""Assessment: answers in order, scores by hand, parts of splits."""

import math

import numpy as np
import pytest
import torch

from timm_moe_dg.data import Split
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.protocols.assessment import assess, restrict
from timm_moe_dg.protocols.evaluation import Outputs, collect_outputs

IDENTITY = torch.arange(3)


def batches():
    """Logits in place of images, targets, groups: domain 0 in and out, domain 2 in."""
    logits = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
    targets, groups = torch.tensor([1, 2, 2, 0]), torch.tensor([0, 1, 0, 4])
    return [(logits[:3], targets[:3], groups[:3]), (logits[3:], targets[3:], groups[3:])]


def test_confidence_is_the_softmax_probability_of_the_prediction():
    answers = collect_outputs(torch.nn.Identity(), batches(), IDENTITY)
    assert answers.predicted.tolist() == [1, 0, 2, 1]
    assert answers.target.tolist() == [1, 2, 2, 0]
    assert answers.group.tolist() == [0, 1, 0, 4]
    expected = [math.exp(top) / (math.exp(top) + 2) for top in (2, 1, 3, 1)]
    assert answers.confidence.tolist() == pytest.approx(expected)


def test_logits_are_read_in_the_order_of_the_data():
    assert collect_outputs(torch.nn.Identity(), batches(), torch.tensor([2, 0, 1])).predicted.tolist() == [0, 2, 1, 0]


def test_gather_decides_what_counts():
    def first_only(tensors):
        return tuple(tensor[:1] for tensor in tensors)

    answers = collect_outputs(torch.nn.Identity(), batches(), IDENTITY, first_only)
    assert answers.predicted.tolist() == [1, 1]
    assert len(answers.confidence) == 2


def test_scores_by_domain_and_altogether():
    found = assess(collect_outputs(torch.nn.Identity(), batches(), IDENTITY), num_domains=3, test_domains=[2])
    assert [scores.images for scores in found.domains] == [3, 0, 1]
    assert found.domains[0].accuracy == pytest.approx(2 / 3)
    assert math.isnan(found.domains[1].accuracy)
    assert math.isnan(found.domains[1].ece)
    assert found.overall.accuracy == 0.5
    assert found.average == pytest.approx((2 / 3 + 0) / 2)
    assert found.test_average == 0.0
    assert found.worst == 2
    assert found.domains[2].ece == pytest.approx(math.e / (math.e + 2))  # sure to this degree, and wrong


def test_without_test_domains_there_is_no_average_of_them():
    one = torch.tensor([0])
    assert math.isnan(
        assess(Outputs(one, one, one, torch.tensor([0.5]), torch.ones(1, 1), torch.ones(1, 0)), 1).test_average
    )


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
