"""Scores of the "id" and "ood" domains, by hand, and their way through a record."""

import math

import pytest
import torch

from timm_moe_dg.data import FolderDomain
from timm_moe_dg.finetuning.progress import role_line
from timm_moe_dg.protocols import Predictions, Record, role_scores


def place(role: str, group: str, name: str) -> FolderDomain:
    return FolderDomain(name, ("a", "b", "c"), [], [], role=role, group=group)


DOMAINS = [
    place("train", "all", "train"),
    place("id", "Africa", "id Africa"),
    place("id", "Asia", "id Asia"),
    place("id", "Other", "id Other"),
    place("ood", "Oceania", "ood Oceania"),
]


def predictions() -> Predictions:
    # (domain, inside?, predicted, target)
    rows = [
        (0, True, 0, 1), (0, False, 1, 1),  # training images play no part
        (1, True, 1, 1), (1, True, 0, 1), (1, False, 0, 1),  # Africa: 1 of 2; its outside image plays no part
        (2, True, 2, 2), (2, True, 2, 2), (2, True, 0, 2),  # Asia: 2 of 3
        (3, True, 0, 2),  # Other: 0 of 1
        (4, True, 1, 1),
    ]  # fmt: skip
    domain, inside, predicted, target = zip(*rows, strict=True)
    group = 2 * torch.tensor(domain) + torch.tensor([0 if is_inside else 1 for is_inside in inside])
    return Predictions(torch.tensor(predicted), torch.tensor(target), group, torch.zeros(len(rows)))


def test_scores_by_hand() -> None:
    scores = role_scores(predictions(), DOMAINS)
    found = scores["id"]
    assert found["accuracy"] == pytest.approx(3 / 6)  # of images, Other included
    assert (found["worst_group"], found["worst_accuracy"]) == ("Africa", 0.5)  # Other is no group
    assert found["num_samples"] == {"Africa": 2, "Asia": 3, "Other": 1}
    assert found["group_accuracy"]["Asia"] == pytest.approx(2 / 3)
    # targets 1 1 2 2 2 2, predictions 1 0 2 2 0 0: class 1 has F1 2/3, class 2 has 4/6, class 0 is no target
    assert found["f1_macro"] == pytest.approx((2 / 3 + 2 / 3) / 2)
    assert scores["ood"]["accuracy"] == 1.0
    line = role_line("id", found)
    assert line.endswith("worst group 0.5000 (Africa), F1-macro 0.6667; images: Africa 2, Asia 3, Other 1")


def shifted() -> Predictions:
    """Validation under shift: two regions and "Other", tests of another outcome beside them."""
    # (domain, inside?, predicted, target)
    rows = [
        (0, True, 0, 1), (0, False, 1, 1), (0, False, 0, 1),  # training: of its validation images 1 of 2
        (1, True, 0, 1), (1, False, 1, 1), (1, False, 1, 1), (1, False, 0, 2),  # Africa: 2 of 3
        (2, True, 1, 1), (2, False, 2, 2), (2, False, 0, 2), (2, False, 0, 2),  # Asia: 1 of 3
        (3, False, 0, 2),  # Other: 0 of 1
    ]  # fmt: skip
    domain, inside, predicted, target = zip(*rows, strict=True)
    group = 2 * torch.tensor(domain) + torch.tensor([0 if is_inside else 1 for is_inside in inside])
    return Predictions(torch.tensor(predicted), torch.tensor(target), group, torch.zeros(len(rows)))


def test_validation_under_shift_by_hand() -> None:
    names = ("Africa", "Asia", "Other")
    domains = [place("train", "all", "train"), *(place("ood", name, f"ood {name}") for name in names)]
    scores = role_scores(shifted(), domains)
    found = scores["ood_val"]
    assert found["accuracy"] == pytest.approx(3 / 7)
    assert (found["worst_group"], found["worst_accuracy"]) == ("Asia", pytest.approx(1 / 3))  # Other is no group
    # targets 1 1 2 2 2 2 2, predictions 1 1 0 2 0 0 0: class 1 has F1 1, class 2 has 2/(5 + 1), class 0 is no target
    assert found["f1_macro"] == pytest.approx((1 + 2 / 6) / 2)
    assert found["num_samples"] == {"Africa": 3, "Asia": 3, "Other": 1}
    assert scores["ood"]["group_accuracy"]["Africa"] == 0.0  # the test is scored apart
    assert scores["id_val"]["accuracy"] == 0.5
    assert list(scores) == ["ood", "id_val", "ood_val"]


def test_data_without_validation_under_shift_have_no_such_scores() -> None:
    assert role_scores(predictions(), DOMAINS).keys() == {"id", "ood", "id_val"}


def test_benchmarks_without_roles_have_no_such_scores() -> None:
    assert role_scores(predictions(), [FolderDomain(str(index), ("a",), [], []) for index in range(5)]) == {}


def test_they_survive_the_way_through_a_line_of_json() -> None:
    args = {"dataset": "x", "algorithm": "ERM", "test_envs": [1], "trial_seed": 0, "hparams_seed": 0}
    rest = {"step": 1, "epoch": 0.5, "losses": {"loss": 2.0}, "step_time": 0.1, "mem_gb": 0.0, "hparams": {}}
    roles = role_scores(predictions(), DOMAINS)
    record = Record(in_acc=(1.0, 0.5), out_acc=(1.0, 0.5), args=args, roles=roles, **rest)
    again = Record.from_json(record.to_json())
    assert again == record
    assert again.losses == {"loss": 2.0}
    plain = Record(in_acc=(1.0, 0.5), out_acc=(1.0, 0.5), args=args, **rest)
    assert "roles" not in plain.to_json()
    assert Record.from_json(plain.to_json()) == plain


def test_a_role_without_images_is_unknown_rather_than_zero() -> None:
    empty = torch.zeros(0, dtype=torch.long)
    scores = role_scores(Predictions(empty, empty, empty, empty.float()), DOMAINS)["id"]
    assert math.isnan(scores["accuracy"])
    assert math.isnan(scores["worst_accuracy"])
    assert scores["worst_group"] is None
    assert "Africa 0" in role_line("id", scores)
