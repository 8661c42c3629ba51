"""Reported numbers: by role, with the images behind them, and with an interval where these are few."""

from tests.invented import ARGS, make_record
from timm_moe_dg.protocols.records import RoleScores
from timm_moe_dg.protocols.selection import counted, headlines, images, selection_remark, summary, worst_groups

SIZES = {**ARGS, "split_sizes": [[400, 200], [300, 5], [400, 100]]}
OOD: RoleScores = {
    "accuracy": 0.53,
    "worst_accuracy": 0.5,
    "worst_group": "Asia",
    "group_accuracy": {"Asia": 0.5, "Africa": 0.5, "Other": 0.5, "Europe": 0.75},
    "num_samples": {"Asia": 2, "Africa": 4, "Other": 6, "Europe": 400},
}
ID: RoleScores = {**OOD, "accuracy": 0.5, "num_samples": {"Asia": 2}}


def test_the_last_line_of_a_run_names_the_held_out_split_and_its_images() -> None:
    assert summary(make_record(args=SIZES)) == (
        "training-domain validation (mean of out acc) 0.5000 (300 images); "
        "the accuracy on the held-out in-split 0.8000 (300 images)"
    )
    assert "(" not in summary(make_record()).partition("0.5000")[2]  # DomainBed's rows have no sizes


def test_id_and_ood_images_are_reported_apart() -> None:
    record = make_record(args=SIZES, roles={"id": ID, "ood": OOD})
    assert [headline.value for headline in headlines(record)] == [0.53, 0.5]
    assert summary(record).split("; ")[1:] == [
        "the accuracy over all out-of-distribution test images 0.5300 (412 images)",
        "the accuracy over all in-distribution test images 0.5000 (2 images, 95% interval 9 to 91%)",
    ]


def test_a_mean_over_domains_has_no_interval() -> None:
    record = make_record(args={**SIZES, "test_envs": [0, 1], "split_sizes": [[3, 1], [3, 1], [3, 1]]})
    assert summary(record).endswith("the mean accuracy over the held-out in-splits 0.8500 (6 images)")


def test_all_groups_of_a_tie_are_named() -> None:
    assert worst_groups(OOD) == ["Asia", "Africa"]
    assert images(OOD, worst_groups(OOD)) == 6
    assert worst_groups({"worst_group": None}) == ["-"]


def test_few_images_have_an_interval() -> None:
    assert counted(3, 1.0) == " (3 images, 95% interval 44 to 100%)"
    assert counted(1, 0.0) == " (1 image, 95% interval 0 to 79%)"
    assert (counted(100, 0.5), counted(0, float("nan")), counted(None, 0.5)) == (" (100 images)", "", "")


def test_a_tie_and_the_first_step_are_said() -> None:
    first, tied, worse = make_record(step=0), make_record(step=300), make_record(step=600, out_acc=(0.1, 0.5, 0.1))
    early = "the selected network is that of step 0, which has taken one training step"
    equal = "evaluations, of steps 0 to 300, have the same validation accuracy, and the earliest is selected, as in"
    assert selection_remark([first, tied, worse]) == f"2 {equal} DomainBed; {early}"
    assert selection_remark([first, worse]) == early
    assert selection_remark([worse, tied]) is None
    assert selection_remark([first]) is None  # a run with one evaluation has no choice
