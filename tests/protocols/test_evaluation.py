"""Evaluation: predictions in order, scores by hand by split, domain and role, and the network's mode unchanged."""

import math
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torch import nn

from timm_moe_dg.data import FolderDomain, Split
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.messages import role_line
from timm_moe_dg.inference.evaluated import Evaluated
from timm_moe_dg.protocols.evaluation import (
    Outputs,
    Predictions,
    Recognized,
    assess,
    class_scores_by_domain,
    collect_outputs,
    domain_accuracies,
    out_losses,
    predict,
    recognize,
    restrict,
    role_scores,
    unseen_domains,
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


BATCHES = [batch([0, 1, 2], [0, 1, 1], [0, 0, 1]), batch([3, 3], [3, 0], [4, 4])]
# Logits in place of images, targets, groups: domain 0 in and out, domain 2 in
LOGITS = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0]])
ROWS = [
    (LOGITS[:3], torch.tensor([1, 2, 2]), torch.tensor([0, 1, 0])),
    (LOGITS[3:], torch.zeros(1).long(), torch.tensor([4])),
]


def outputs(positions=(0, 1, 2), **options):
    return collect_outputs(nn.Identity(), ROWS, torch.tensor(positions), **options)


@pytest.mark.parametrize("training", [True, False])
def test_predictions_are_made_in_evaluation_mode_and_the_mode_is_restored(training):
    network = FirstPixel().train(training)
    predictions = predict(network, BATCHES)
    assert predictions.predicted.tolist() == [0, 1, 2, 3, 3]
    assert predictions.target.tolist() == [0, 1, 1, 3, 0]
    assert predictions.group.tolist() == [0, 0, 1, 4, 4]
    assert network.training is training


def test_the_mode_of_every_module_is_restored_also_after_an_error():
    def broken():
        yield torch.randn(4, 3), torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        raise OSError("disk")

    network = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    network[0].eval()
    with pytest.raises(OSError, match="disk"):
        predict(network, broken())
    assert [module.training for module in network.modules()] == [True, False, True]


def test_gather_is_called_with_every_batch():
    def first_only(tensors):
        return tuple(tensor[:1] for tensor in tensors)

    assert predict(FirstPixel(), BATCHES, first_only).predicted.tolist() == [0, 3]
    gathered = outputs(gather=first_only)
    assert (gathered.predicted.tolist(), len(gathered.confidence)) == ([1, 1], 2)


def test_accuracies_by_domain_and_split():
    in_acc, out_acc = domain_accuracies(predict(FirstPixel(), BATCHES), num_domains=3)
    assert in_acc == pytest.approx((1.0, math.nan, 0.5), nan_ok=True)
    assert out_acc == pytest.approx((0.0, math.nan, math.nan), nan_ok=True)
    zero = torch.tensor([0])
    with pytest.raises(ArgumentError, match=r"^group="):
        domain_accuracies(Predictions(zero, zero, torch.tensor([6]), zero, zero), num_domains=3)


def test_losses_on_out_splits_are_means_of_cross_entropies():
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.5, 0.0], [1.0, 1.0, 1.0]])
    target, group = torch.tensor([0, 2, 1]), torch.tensor([1, 1, 2])
    predictions = predict(nn.Identity(), [(logits, target, group)])
    first, second = -math.log(math.e**2 / (math.e**2 + 1 + 1 / math.e)), -math.log(1 / (2 + math.sqrt(math.e)))
    assert out_losses(predictions, 2) == pytest.approx(((first + second) / 2, math.nan), rel=1e-6, nan_ok=True)


def test_confidence_is_the_softmax_probability_of_the_prediction():
    found = outputs()
    assert (found.predicted.tolist(), found.target.tolist()) == ([1, 0, 2, 1], [1, 2, 2, 0])
    assert found.group.tolist() == [0, 1, 0, 4]
    assert found.confidence.tolist() == pytest.approx([math.exp(top) / (math.exp(top) + 2) for top in (2, 1, 3, 1)])
    assert outputs(positions=(2, 0, 1)).predicted.tolist() == [0, 2, 1, 0]


def test_scores_by_domain_and_overall():
    assessment = assess(outputs(), num_domains=3, test_domains=[2])
    assert [scores.images for scores in assessment.domains] == [3, 0, 1]
    assert [scores.accuracy for scores in assessment.domains] == pytest.approx([2 / 3, math.nan, 0], nan_ok=True)
    assert math.isnan(assessment.domains[1].ece)
    assert assessment.domains[2].ece == pytest.approx(math.e / (math.e + 2))  # wrong with this confidence
    assert (assessment.overall.accuracy, assessment.test_average, assessment.worst) == (0.5, 0.0, (2,))
    assert assessment.average == pytest.approx((2 / 3 + 0) / 2)
    labels, ones = (torch.zeros(2, dtype=torch.long),) * 2, torch.ones(2)
    tied = Outputs(*labels, torch.tensor([2, 4]), ones, *(torch.ones(2, 1),) * 2, ones, ones)
    assert assess(tied, num_domains=3).worst == (1, 2)
    assert assess(tied, num_domains=3, counted=[1]).worst == (1,)
    assert math.isnan(assess(tied, num_domains=3).test_average)  # without test domains
    with pytest.raises(ArgumentError, match=r"^domains="):
        assess(tied, num_domains=3, counted=[0])


@pytest.mark.parametrize("temperature", [1.0, 0.01])
def test_the_area_under_the_curve_is_that_of_the_logits_whose_probabilities_round_to_one(temperature):
    odds, targets = torch.linspace(10, 60, 30)[torch.randperm(30)], torch.arange(30) % 2
    logits = torch.stack([-odds, odds], dim=1)
    batches, groups = [(logits, targets, targets * 0)], torch.arange(2)
    expected = pytest.approx(roc_auc_score(targets, odds))
    assert class_scores_by_domain(predict(nn.Identity(), batches), 1)["auc"] == [expected]
    assert assess(collect_outputs(nn.Identity(), batches, groups, temperature=temperature), 1).overall.auc == expected


def test_scores_by_class_of_each_part_of_a_domain_are_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    target, answer, group = (torch.randint(0, size, (90,), generator=generator) for size in (3, 3, 4))
    answer[group >= 2] = 1  # the same answer in the second domain
    scores = class_scores_by_domain(Predictions(answer, target, group, answer.float(), answer * math.nan), 2)
    masks = {"": group % 2 == 0, "out_": group % 2 == 1, "whole_": group >= 0}
    functions = {"balanced_accuracy": balanced_accuracy_score, "f1_macro": partial(f1_score, average="macro")}
    for (prefix, mask), (name, function), index in product(masks.items(), functions.items(), range(2)):
        part = mask & (group // 2 == index)
        assert scores[prefix + name][index] == pytest.approx(function(target[part], answer[part]))
    assert scores["whole_same_answer"][1] == 1.0
    assert scores["whole_same_answer"][0] == torch.bincount(answer[group < 2]).max() / (group < 2).sum()
    out = Predictions(*(column[group != 0] for column in (answer, target, group, answer.float(), answer * math.nan)))
    alone = class_scores_by_domain(out, 2)["whole_balanced_accuracy"]  # the in-split of the first was not evaluated
    assert (math.isnan(alone[0]), alone[1]) == (True, scores["whole_balanced_accuracy"][1])
    domains = [domain("train", "all"), domain("ood", "Asia")]
    outputs = Predictions(answer, target, group, answer.float(), answer * math.nan)
    assert "balanced_accuracy" not in role_scores(outputs, domains, "f1_macro")["ood"]
    assert role_scores(outputs, domains, "balanced_accuracy")["ood"]["balanced_accuracy"] == pytest.approx(1 / 3)


def test_parts_of_splits():
    splits = [Split(np.array([3, 1]), np.array([0])), Split(np.array([0]), np.array([], dtype=int))]
    for part, expected in {
        "all": [([3, 1], [0]), ([0], [])],
        "in": [([3, 1], []), ([0], [])],
        "out": [([], [0]), ([], [])],
    }.items():
        assert [(split.inside.tolist(), split.outside.tolist()) for split in restrict(splits, part)] == expected
    with pytest.raises(ArgumentError, match=r"^split='out'"):
        restrict(splits[1:], "out")


def domain(role, group):
    return FolderDomain(f"{role} {group}", ("a", "b", "c"), [], [], role=role, group=group)


def predictions(*rows):
    """Makes predictions of (domain, in-split?, predicted class, target)."""
    position, inside, predicted, target = map(torch.tensor, zip(*rows, strict=True))
    return Predictions(predicted, target, 2 * position + 1 - inside.long(), *[torch.zeros(len(rows))] * 2)


DOMAINS = [
    domain("train", "all"),
    *(domain("id", name) for name in ("Africa", "Asia", "Other")),
    domain("ood", "Oceania"),
]
TESTED = predictions(
    (0, True, 0, 1), (0, False, 1, 1),  # training images do not count
    (1, True, 1, 1), (1, True, 0, 1), (1, False, 0, 1),  # Africa: 1 of 2, without the out-split
    (2, True, 2, 2), (2, True, 2, 2), (2, True, 0, 2),  # Asia: 2 of 3
    (3, True, 0, 2),  # Other: 0 of 1
    (4, True, 1, 1),
)  # fmt: skip
UNDER_SHIFT = predictions(
    (0, True, 0, 1), (0, False, 1, 1), (0, False, 0, 1),  # training domain: 1 of 2 validation images
    (1, True, 0, 1), (1, False, 1, 1), (1, False, 1, 1), (1, False, 0, 2),  # Africa: 2 of 3
    (2, True, 1, 1), (2, False, 2, 2), (2, False, 0, 2), (2, False, 0, 2),  # Asia: 1 of 3
    (3, False, 0, 2),  # Other: 0 of 1
)  # fmt: skip


def test_scores_of_roles_by_hand():
    scores = role_scores(TESTED, DOMAINS)
    inside = scores["id"]
    assert inside["accuracy"] == pytest.approx(3 / 6)  # of images, Other included
    assert (inside["worst_group"], inside["worst_accuracy"]) == ("Africa", 0.5)  # Other is not a group
    assert inside["num_samples"] == {"Africa": 2, "Asia": 3, "Other": 1}
    assert inside["group_accuracy"]["Asia"] == pytest.approx(2 / 3)
    # targets 1 1 2 2 2 2, predictions 1 0 2 2 0 0: class 1 has F1 2/3, class 2 has 4/6, class 0 is no target
    assert inside["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert scores["ood"]["accuracy"] == 1.0
    line = role_line("id", inside)
    assert line.endswith("worst group 0.5000 (Africa), F1-macro 0.6667; images: Africa 2, Asia 3, Other 1")
    assert scores.keys() == {"id", "ood", "id_val"}  # the "ood" domain has no validation images
    assert role_scores(TESTED, [FolderDomain(str(index), ("a",), [], []) for index in range(5)]) == {}


def test_domains_of_one_group_and_role_are_one_group():
    domains = [domain("train", "Africa"), domain("ood", "Asia"), domain("ood", "Oceania"), domain("ood", "Asia")]
    rows = [(1, True, 1, 1), (1, True, 0, 1), (2, True, 1, 1), (3, True, 1, 1), (3, True, 0, 1), (3, True, 2, 1)]
    scores = role_scores(predictions(*rows), domains)["ood"]
    assert scores["num_samples"] == {"Asia": 5, "Oceania": 1}
    assert scores["group_accuracy"] == pytest.approx({"Asia": 2 / 5, "Oceania": 1.0})
    assert (scores["worst_group"], scores["accuracy"]) == ("Asia", pytest.approx(3 / 6))


def test_domains_with_validation_images_alone_have_no_test_score():
    tested = predictions((0, False, 0, 0), (1, True, 0, 0), (2, False, 0, 1))
    scores = role_scores(tested, [domain("train", "all"), domain("id", "Africa"), domain("ood", "Asia")])
    numbers = {role: table["num_samples"] for role, table in scores.items()}
    assert numbers == {"id": {"Africa": 1}, "id_val": {"all": 1}, "ood_val": {"Asia": 1}}
    empty = torch.zeros(0, dtype=torch.long)
    assert role_scores(Predictions(empty, empty, empty, empty.float(), empty.float()), DOMAINS) == {}


def test_validation_under_shift_by_hand():
    domains = [domain("train", "all"), *(domain("ood", name) for name in ("Africa", "Asia", "Other"))]
    scores = role_scores(UNDER_SHIFT, domains)
    validation = scores["ood_val"]
    assert validation["accuracy"] == pytest.approx(3 / 7)
    assert (validation["worst_group"], validation["worst_accuracy"]) == ("Asia", pytest.approx(1 / 3))
    # targets 1 1 2 2 2 2 2, predictions 1 1 0 2 0 0 0: class 1 has F1 1, class 2 has 2/(5 + 1), class 0 is no target
    assert validation["f1_macro"] == pytest.approx((1 + 2 / 6) / 2)
    assert validation["num_samples"] == {"Africa": 3, "Asia": 3, "Other": 1}
    assert scores["ood"]["group_accuracy"]["Africa"] == 0.0  # the test is scored apart
    assert scores["id_val"]["accuracy"] == 0.5
    assert list(scores) == ["ood", "id_val", "ood_val"]


def digests(**contents):
    return [{"name": name, "images": 2, "names": "n", "contents": digest} for name, digest in contents.items()]


RUN = {"dataset": "folder", "test_domains": [1], "domain_digests": digests(art="1", photo="2", sketch="3")}
SAME = {**RUN, "domain_digests": digests(art="1", photo="1", sketch="1")}
RECOGNIZED = [  # by name and images, and not by position
    (RUN, {"art": "1", "photo": "2", "sketch": "3"}, ["train", "held out", "train"]),
    (RUN, {"photo": "2", "sketch": "3"}, ["held out", "train"]),
    (RUN, {"north": "4", "south": "5", "west": "6"}, ["new"] * 3),
    (RUN, {"abstract": "0", "art": "1", "photo": "2"}, ["new", "train", "held out"]),
    # A renamed domain is what it was, and one with other images is not taken for new
    (RUN, {"zebra": "1", "photo": "3"}, ["train", "train"]),
    (RUN, {"art": "9", "photo": "8"}, ["train, changed", "held out, changed"]),
    (SAME, {"photo": "1", "zebra": "1"}, ["held out", "train"]),
]


@pytest.mark.parametrize(("run", "contents", "roles"), RECOGNIZED)
def test_domains_are_recognized_among_others(run, contents, roles):
    domains = [FolderDomain(name, ("x",), [], []) for name in contents]
    known = recognize(run, domains, digests(**contents))
    assert [each.role(domain) for each, domain in zip(known, domains, strict=True)] == roles


def test_a_run_without_fingerprints_has_the_names_of_its_benchmark_or_none():
    domains = [FolderDomain("rot_15", ("x",), [], []), FolderDomain("rot_7", ("x",), [], [])]
    known = recognize({"dataset": "rotated_digits", "test_domains": [1]}, domains, [])
    assert known == [Recognized(1, trained=False), Recognized(None, trained=False)]
    assert recognize({"dataset": "folder", "test_domains": [1]}, domains, []) is None
    assert recognize({}, domains, []) is None


def test_new_domains_are_unseen_whatever_their_role_in_the_data():
    domains = [domain("id", "Asia"), domain("ood", "Asia"), domain("id", "Africa")]
    assert unseen_domains(domains, [0, 1, 2]) == [1]
    roles = ["new", "new", "test (id)"]
    assert unseen_domains(domains, [0, 1, 2], roles) == [0, 1]
    scored = Evaluated("vit", SimpleNamespace(domains=domains), TESTED, [0, 1, 2], [0, 1], known_roles=roles)
    assert scored.counted_name == "not trained on: id Asia, ood Asia"
    assert scored.domain_order == [0, 1, 2]
