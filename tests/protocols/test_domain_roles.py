"""Scores of the "id" and "ood" domains, by hand."""

from types import SimpleNamespace

import pytest
import torch

from timm_moe_dg.analysis.evaluated import Evaluated
from timm_moe_dg.data import FolderDomain
from timm_moe_dg.finetuning.messages import role_line
from timm_moe_dg.protocols.evaluation import Predictions, Recognized, recognize, role_scores, unseen_domains


def domain(role: str, group: str) -> FolderDomain:
    return FolderDomain(f"{role} {group}", ("a", "b", "c"), [], [], role=role, group=group)


def predictions(*rows: tuple[int, bool, int, int]) -> Predictions:
    """Makes predictions of (domain, in-split?, predicted class, target)."""
    position, inside, predicted, target = map(torch.tensor, zip(*rows, strict=True))
    return Predictions(predicted, target, 2 * position + 1 - inside.long(), *[torch.zeros(len(rows))] * 2)


DOMAINS = [
    domain("train", "all"),
    domain("id", "Africa"),
    domain("id", "Asia"),
    domain("id", "Other"),
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


def test_scores_by_hand() -> None:
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


def test_domains_of_one_group_and_role_are_one_group() -> None:
    domains = [domain("train", "Africa"), domain("ood", "Asia"), domain("ood", "Oceania"), domain("ood", "Asia")]
    rows = [(1, True, 1, 1), (1, True, 0, 1), (2, True, 1, 1), (3, True, 1, 1), (3, True, 0, 1), (3, True, 2, 1)]
    scores = role_scores(predictions(*rows), domains)["ood"]
    assert scores["num_samples"] == {"Asia": 5, "Oceania": 1}
    assert scores["group_accuracy"] == pytest.approx({"Asia": 2 / 5, "Oceania": 1.0})
    assert (scores["worst_group"], scores["accuracy"]) == ("Asia", pytest.approx(3 / 6))


def test_domains_with_validation_images_alone_have_no_test_score() -> None:
    tested = predictions((0, False, 0, 0), (1, True, 0, 0), (2, False, 0, 1))
    scores = role_scores(tested, [domain("train", "all"), domain("id", "Africa"), domain("ood", "Asia")])
    assert {role: table["num_samples"] for role, table in scores.items()} == {
        "id": {"Africa": 1},
        "id_val": {"all": 1},
        "ood_val": {"Asia": 1},
    }
    empty = torch.zeros(0, dtype=torch.long)
    assert role_scores(Predictions(empty, empty, empty, empty.float(), empty.float()), DOMAINS) == {}


def test_validation_under_shift_by_hand() -> None:
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


def test_benchmarks_without_roles_have_no_scores() -> None:
    assert role_scores(TESTED, [FolderDomain(str(index), ("a",), [], []) for index in range(5)]) == {}


def digests(**contents: str) -> list[dict[str, object]]:
    return [{"name": name, "images": 2, "names": "n", "contents": digest} for name, digest in contents.items()]


def roles_of(run: dict[str, object], **contents: str) -> list[str]:
    domains = [FolderDomain(name, ("x",), [], []) for name in contents]
    known = recognize(run, domains, digests(**contents))
    assert known is not None
    return [each.role(domain) for each, domain in zip(known, domains, strict=True)]


RUN = {"dataset": "folder", "test_domains": [1], "domain_digests": digests(art="1", photo="2", sketch="3")}


def test_roles_go_by_name_and_images_and_not_by_position() -> None:
    assert roles_of(RUN, art="1", photo="2", sketch="3") == ["train", "held out", "train"]
    assert roles_of(RUN, photo="2", sketch="3") == ["held out", "train"]
    assert roles_of(RUN, north="4", south="5", west="6") == ["new"] * 3
    assert roles_of(RUN, abstract="0", art="1", photo="2") == ["new", "train", "held out"]


def test_a_renamed_domain_is_what_it_was_and_one_with_other_images_is_not_taken_for_new() -> None:
    assert roles_of(RUN, zebra="1", photo="3") == ["train", "train"]
    assert roles_of(RUN, art="9", photo="8") == ["train, changed", "held out, changed"]
    same = {**RUN, "domain_digests": digests(art="1", photo="1", sketch="1")}
    assert roles_of(same, photo="1", zebra="1") == ["held out", "train"]


def test_new_domains_are_unseen_whatever_their_role_in_the_data() -> None:
    domains = [domain("id", "Asia"), domain("ood", "Asia"), domain("id", "Africa")]
    assert unseen_domains(domains, [0, 1, 2]) == [1]
    roles = ["new", "new", "test (id)"]
    assert unseen_domains(domains, [0, 1, 2], roles) == [0, 1]
    scored = Evaluated("vit", SimpleNamespace(domains=domains), TESTED, [0, 1, 2], [0, 1], known_roles=roles)
    assert scored.counted_name == "not trained on: id Asia, ood Asia"
    assert scored.domain_order == [0, 1, 2]


def test_a_run_without_fingerprints_has_the_names_of_its_benchmark_or_none() -> None:
    domains = [FolderDomain("rot_15", ("x",), [], []), FolderDomain("rot_7", ("x",), [], [])]
    known = recognize({"dataset": "rotated_digits", "test_domains": [1]}, domains, [])
    assert known == [Recognized(1, trained=False), Recognized(None, trained=False)]
    assert recognize({"dataset": "folder", "test_domains": [1]}, domains, []) is None
    assert recognize({}, domains, []) is None
