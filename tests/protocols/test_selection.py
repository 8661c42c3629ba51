"""Selection rules on invented records, where the right answer can be seen, and the numbers that are reported."""

from dataclasses import replace
from itertools import product
from math import isnan, nan

import numpy as np
import pytest

from tests.invented import ARGS, invented_records, make_record
from timm_moe_dg.data import seed_hash
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import (
    SELECTION_RULES,
    counted,
    headlines,
    held_out_score,
    images,
    leave_one_domain_out_cv,
    one_answer_of,
    oracle,
    summary,
    training_domain_validation,
    validates_on_test_groups,
    validation_score,
    worst_groups,
)

WORST_GROUP, F1_MACRO = SELECTION_RULES["ood_worst_group"], SELECTION_RULES["ood_f1_macro"]


def invented(step, out_acc, in_acc=(0.0, 0.0, 0.0), test=(0,), hparams_seed=0):
    args = {"dataset": "d", "algorithm": "ERM", "test_envs": list(test), "trial_seed": 0, "hparams_seed": hparams_seed}
    return Record(step, 0.0, {"loss": 0.0}, 0.0, 0.0, in_acc, out_acc, args, {})


def shifted(step, worst, f1, validation=0.5, **options):
    """An evaluation with scores on the ood validation split, and tests that would choose otherwise."""
    scores, misleading = {"worst_accuracy": worst, "f1_macro": f1}, {"worst_accuracy": 1 - worst, "f1_macro": 1 - f1}
    record = invented(step, (nan, validation, validation), **options)
    return replace(record, roles={"ood_val": scores, "ood": misleading})


def test_validation_score_is_the_plain_mean_of_the_training_domains_with_an_out_split():
    assert validation_score(invented(0, out_acc=(1.0, 0.25, 0.5))) == pytest.approx(0.375)
    assert validation_score(invented(0, (1.0, 0.25, 0.5), test=(0, 2))) == 0.25
    assert validation_score(invented(0, (1.0, nan, 0.5))) == 0.5
    assert isnan(validation_score(invented(0, (1.0, nan, nan))))


def test_ties_are_decided_by_the_rounding_of_domainbeds_mean():
    """Sums of the same numbers differ in the last digit by their order."""
    shares = list(product((1 / 10, 2 / 10, 3 / 10, 6 / 10, 7 / 10), repeat=3))
    pairs = [(a, b) for a, b in product(shares, repeat=2) if abs(sum(a) - sum(b)) < 1e-12 and np.mean(a) != np.mean(b)]
    assert len(pairs) > 50
    for first, second in pairs:
        records = [invented(step, (0.0, *accuracies), (0.0,) * 4) for step, accuracies in ((0, first), (300, second))]
        assert training_domain_validation(records).step == (300 if np.mean(second) > np.mean(first) else 0)


def test_reported_score_averages_test_domains_with_images():
    assert held_out_score(invented(0, (0, 0, 0), in_acc=(0.2, 0.9, 0.6), test=(0, 2))) == pytest.approx(0.4)
    assert held_out_score(invented(0, (0, 0, 0), in_acc=(nan, 0.9, 0.6), test=(0, 2))) == 0.6
    assert held_out_score(invented(0, (0.2, 0.9, 0.6), test=(0, 2)), "out") == pytest.approx(0.4)


# Each evaluation: step, out-split accuracies, draw of hyper-parameters. The last number is the position of the chosen.
CHOSEN = [
    # The test domain is not looked at
    ("training_domain_validation", [(0, (0.9, 0.5, 0.5), 0), (300, (0.1, 0.9, 0.2), 0), (600, (0.8, 0.5, 0.5), 0)], 1),
    # Over hyper-parameters and steps
    ("training_domain_validation", [(0, (0, 0.1, 0.1), 0), (300, (0, 0.6, 0.6), 0), (0, (0, 0.7, 0.7), 1)], 2),
    # Training domains without an out-split are left out of the mean; a value that is not a number is never chosen
    ("training_domain_validation", [(0, (1.0, nan, 0.5), 0), (300, (0.0, nan, 0.6), 0), (600, (1.0, nan, 0.4), 0)], 1),
    ("training_domain_validation", [(0, (nan, nan, 0.5), 0), (300, (nan, 0.1, 0.1), 0), (600, (nan, nan, 0.9), 0)], 1),
    # The earliest step and the highest draw of equals, as in DomainBed
    ("training_domain_validation", [(0, (0, 0.5, 0.5), draw) for draw in (0, 2, 1)], 1),
    ("training_domain_validation", [(step, (0, 0.5, 0.5), 0) for step in (300, 0, 600)], 0),
    ("oracle", [(0, (0, 0.5, 0.5), draw) for draw in (0, 2, 1)], 1),
    # Last steps only
    ("oracle", [(300, (0.6, 0, 0), 0), (0, (0.9, 1, 1), 0), (0, (0.2, 1, 1), 1), (300, (0.5, 1, 1), 1)], 0),
    ("oracle", [(0, (nan, nan, 0.5), 0), (300, (nan, 0.1, 0.1), 0), (600, (nan, nan, 0.9), 0)], 2),
]


@pytest.mark.parametrize(("rule", "evaluations", "position"), CHOSEN)
def test_the_chosen_evaluation(rule, evaluations, position):
    records = [invented(step, out_acc, hparams_seed=draw) for step, out_acc, draw in evaluations]
    assert SELECTION_RULES[rule](records) is records[position]


def test_worst_group_and_f1_of_validation_under_shift_choose_each_its_own():
    records = [shifted(0, 0.2, 0.1, 0.9), shifted(300, 0.4, 0.3), shifted(600, 0.3, 0.6), shifted(900, 0.4, 0.6)]
    assert WORST_GROUP(records) is records[1]  # the first of equals
    assert F1_MACRO(records) is records[2]
    assert training_domain_validation(records) is records[0]
    drawn = [*records, shifted(0, 0.4, 0.6, hparams_seed=1)]
    assert WORST_GROUP(drawn) is drawn[-1]  # the highest draw of equals
    averaged = [*records, replace(shifted(901, 0.1, 0.1), averaged=True)]
    assert F1_MACRO(averaged) is averaged[-1]


@pytest.mark.parametrize("rule", [training_domain_validation, oracle])
def test_an_averaged_network_stands_for_its_run_alone(rule):
    trained = [invented(step, (0.9, 0.9, 0.9)) for step in (0, 300)]
    averaged = replace(invented(301, (0.2, 0.2, 0.2)), averaged=True)
    assert rule([*trained, averaged]) is averaged
    other = invented(300, (0.3, 0.3, 0.3), hparams_seed=1)
    assert rule([*trained, averaged, other]) is other


def test_a_run_without_test_domains_is_selected_by_validation_and_has_no_accuracy():
    records = [invented(step, (value,) * 3, test=()) for step, value in [(0, 0.5), (300, 0.7), (600, 0.6)]]
    assert training_domain_validation(records) is records[1]
    assert all(isnan(held_out_score(records[0], split)) for split in ("in", "out"))


def cross_validation_runs(target, num_domains, hparams_seeds, seed, **options):
    """Runs {t} and {t, v} of one trial, shuffled among each other as folders on a disk are."""
    held_out = [(target,)] + [tuple(sorted((target, other))) for other in range(num_domains) if other != target]
    runs = {
        (test, draw): invented_records(test, num_domains=num_domains, hparams_seed=draw, seed=seed, **options)
        for test, draw in product(held_out, hparams_seeds)
    }
    return dict(sorted(runs.items(), key=lambda item: seed_hash(item[0], seed)))


def literal_cross_validation(runs, target, num_domains, hparams_seeds, steps):
    """The rule as it is written down, by looking every number up."""
    best, chosen = -1.0, None
    for draw, step in product(sorted(hparams_seeds, reverse=True), steps):
        at = {
            test: next(r for r in run if r.step == step) for (test, its_draw), run in runs.items() if its_draw == draw
        }
        others = [other for other in range(num_domains) if other != target]
        value = sum(at[min(target, other), max(target, other)].in_acc[other] for other in others) / len(others)
        if value > best:
            best, chosen = value, at[target,]
    return chosen


@pytest.mark.parametrize("num_domains", [3, 4, 6])
@pytest.mark.parametrize("levels", [4, 1024])  # with and without equal values
def test_cross_validation_against_the_written_rule(num_domains, levels):
    steps, draws, differ = (0, 300, 600), (0, 1, 2), 0
    for seed, target in product(range(10), range(num_domains)):
        runs = cross_validation_runs(target, num_domains, draws, seed, levels=levels, at=steps)
        chosen = leave_one_domain_out_cv([record for run in runs.values() for record in run])
        assert chosen is literal_cross_validation(runs, target, num_domains, draws, steps)
        alone = [record for (test, _), run in runs.items() for record in run if test == (target,)]
        differ += chosen is not training_domain_validation(alone)
    assert differ > 10  # the rules can be told apart on these records


def test_cross_validation_skips_draws_and_steps_that_lack_a_run():
    runs = cross_validation_runs(0, 4, (0, 1), seed=5)
    whole = [record for run in runs.values() for record in run]
    chosen = leave_one_domain_out_cv(whole)
    draw = chosen.args["hparams_seed"]
    without = [record for record in whole if (record.args["hparams_seed"], record.test_domains) != (draw, (0, 2))]
    assert leave_one_domain_out_cv(without).args["hparams_seed"] == 1 - draw
    cut = [record for record in whole if (record.test_domains, record.step) != ((0, 3), chosen.step)]
    assert leave_one_domain_out_cv(cut).step != chosen.step
    ends = [replace(run[-1], step=601, averaged=True) for run in runs.values()]
    averaged = leave_one_domain_out_cv([*whole, *ends])
    assert (averaged.averaged, averaged.test_domains) == (True, (0,))


ONE, ZERO, PAIR = invented_records((1,)), invented_records((0,)), invented_records((0, 1))
REFUSED = [
    *((rule, []) for rule in SELECTION_RULES),
    ("oracle", [invented(0, (0.5, 0.5, 0.5), test=())]),  # no domain to look at
    ("leave_one_domain_out_cv", [*ONE, *PAIR]),  # lacks {1, 2}
    ("leave_one_domain_out_cv", [*ONE, *ZERO, *PAIR]),  # two test domains
    ("ood_f1_macro", [invented(0, (0, 1, 1)), shifted(300, 0.5, 0.5)]),  # an old record
    ("ood_worst_group", [shifted(0, nan, 0.5)]),  # all images in "Other"
]


@pytest.mark.parametrize(("rule", "records"), REFUSED)
def test_records_that_a_rule_cannot_use_are_refused(rule, records):
    with pytest.raises(RecordError, match=r"^records\b[^\n]*$"):
        SELECTION_RULES[rule](records)


FMOW = [["train", "all"], ["id", "Asia"], ["ood", "Asia"], ["ood", "Africa"]]


@pytest.mark.parametrize(
    ("facts", "validated", "oracle"),
    [
        ([*FMOW, ["id", "Africa"]], (2, 3), False),  # a shift in time: both regions are trained on
        (FMOW, (2,), False),  # Africa is held out and has no validation images
        (FMOW, (2, 3), True),
        ([["train", "Asia"], ["ood", "Africa"]], (1,), True),  # a table of one's own
        ([["train", "all"], ["ood", "all"]], (1,), False),  # iWildCam: other camera traps
    ],
)
def test_validation_on_held_out_groups_of_the_test_is_an_oracle(facts, validated, oracle):
    sizes = [[5, 5 if number in validated else 0] for number in range(len(facts))]
    record = invented(0, (0.5, 0.5, 0.5))
    assert not validates_on_test_groups(record)
    facts = [[*fact, "official"] for fact in facts]
    known = replace(record, args={**record.args, "domain_facts": facts, "split_sizes": sizes})
    assert validates_on_test_groups(known) == oracle


SIZES = {**ARGS, "split_sizes": [[400, 200], [300, 5], [400, 100]]}
OOD = {
    "accuracy": 0.53,
    "worst_accuracy": 0.5,
    "worst_group": "Asia",
    "group_accuracy": {"Asia": 0.5, "Africa": 0.5, "Other": 0.5, "Europe": 0.75},
    "num_samples": {"Asia": 2, "Africa": 4, "Other": 6, "Europe": 400},
}
ID = {"accuracy": 0.5, "num_samples": {"Asia": 2}}


def test_the_summary_names_what_is_reported_with_its_images():
    assert summary(make_record(args=SIZES)) == (
        "training-domain validation (mean of out acc) 0.5000 (300 images); "
        "the accuracy on the held-out in-split 0.8000 (300 images)"
    )
    assert "(" not in summary(make_record()).partition("0.5000")[2]  # DomainBed's rows have no sizes
    several = make_record(args={**SIZES, "test_envs": [0, 1], "split_sizes": [[3, 1], [3, 1], [3, 1]]})
    assert summary(several).endswith("the mean accuracy over the held-out in-splits 0.8500 (6 images)")  # no interval
    official = make_record(args=SIZES, roles={"id": ID, "ood": OOD})
    assert [headline.value for headline in headlines(official)] == [0.53, 0.5]
    assert summary(official).split("; ")[1:] == [
        "the accuracy over all out-of-distribution test images 0.5300 (412 images)",
        "the accuracy over all in-distribution test images 0.5000 (2 images, 95% interval 9 to 91%)",
    ]


def test_numbers_of_images_and_all_groups_of_a_tie():
    assert worst_groups(OOD) == ["Asia", "Africa"]
    assert images(OOD, worst_groups(OOD)) == 6
    assert worst_groups({"worst_group": None}) == ["-"]
    assert counted(3, 1.0) == " (3 images, 95% interval 44 to 100%)"
    assert counted(1, 0.0) == " (1 image, 95% interval 0 to 79%)"
    assert (counted(100, 0.5), counted(0, nan), counted(None, 0.5)) == (" (100 images)", "", "")


def test_the_whole_domain_weighs_images_alike():
    record = invented(0, (0.0, 0.5, nan), in_acc=(1.0, 0.75, 0.25), test=(0,))
    sizes = {"split_sizes": [[6, 2], [0, 4], [8, 0]]}
    assert held_out_score(replace(record, args={**record.args, **sizes}), "whole") == 6 / 8
    # By its rule, DomainBed's split of unknown size has these shares
    assert held_out_score(record, "whole") == pytest.approx(0.8)
    assert held_out_score(replace(record, args={**record.args, "holdout_fraction": 0.5}), "whole") == 0.5
    # A split by photograph has no shares, but its numbers do
    by_photograph = {**record.args, "split_by_photograph": True}
    assert isnan(held_out_score(replace(record, args=by_photograph), "whole"))
    assert held_out_score(replace(record, args={**by_photograph, **sizes}), "whole") == 6 / 8
    # Several test domains count alike, and a split without images does not count
    several = {**record.args, **sizes, "test_envs": [0, 2]}
    assert held_out_score(replace(record, args=several), "whole") == (6 / 8 + 0.25) / 2


def rare(step, accuracies, balanced, **args):
    """An evaluation of a run with another metric, whose accuracies would choose otherwise."""
    scores = dict.fromkeys(("f1_macro", "out_f1_macro", "whole_f1_macro"), balanced)
    record = invented(step, accuracies, accuracies)
    return replace(record, metrics=scores, args={**record.args, "metric": "f1_macro", **args})


def test_a_run_is_selected_and_reported_by_its_metric():
    records = [rare(0, (0.9, 0.9, 0.9), (0.1, 0.2, 0.2)), rare(300, (0.5, 0.5, 0.5), (0.4, 0.6, 0.2))]
    assert training_domain_validation(records).step == oracle(records).step == 300
    assert validation_score(records[1]) == pytest.approx(0.4)
    assert [headline.value for headline in headlines(records[1])] == [0.4]
    assert "F1-macro" in summary(records[1])
    assert "95%" not in summary(replace(records[1], args={**records[1].args, "split_sizes": [[9, 9]] * 3}))
    pairs = [replace(record, args={**record.args, "test_envs": [0, other]}) for record in records for other in (1, 2)]
    assert leave_one_domain_out_cv([*records, *pairs]).step == 300


def test_the_whole_domain_counts_for_data_of_the_user():
    record = invented(0, (0.0, 0.5, 0.5), in_acc=(1.0, 0.75, 0.25))
    own = replace(record, args={**record.args, "split_sizes": [[6, 2], [4, 4], [8, 0]], "reported_split": "whole"})
    assert (held_out_score(record), held_out_score(own)) == (1.0, 0.75)
    assert headlines(own)[0][:3] == ("the accuracy on the held-out domain", 0.75, 8)
    by_f1 = rare(0, (0.9, 0.9, 0.9), (0.1, 0.2, 0.2), reported_split="whole")
    assert held_out_score(replace(by_f1, metrics={**by_f1.metrics, "whole_f1_macro": (0.7, 0.0, 0.0)})) == 0.7


@pytest.mark.parametrize(
    ("squares", "independent", "interval"),
    [
        ([99, 0], 11, (28, 79)),  # 33 frames in 11 groups of three
        ([33, 0], 33, (38, 70)),  # each in a group of its own
        ([33**2, 0], 1, (6, 95)),  # one group
    ],
)
def test_images_of_a_group_are_no_independent_images(squares, independent, interval):
    record = invented(0, (nan, 0.5, 0.5), in_acc=(18 / 33, 0.5, 0.5))
    facts = {"split_sizes": [[33, 0]] * 3, "group_squares": [squares] * 3}
    record = replace(record, args={**record.args, **facts})
    assert record.independent_images([0]) == independent
    assert summary(record).endswith("95% interval {} to {}%)".format(*interval))


def test_a_class_that_takes_nearly_all_answers_is_named():
    shares = {"same_answer": (0.97, 0.3, 0.4)}
    assert "one class takes at least 97% of the answers" in one_answer_of(
        replace(invented(0, (0.5,) * 3), metrics=shares)
    )
    assert not one_answer_of(replace(invented(0, (0.5,) * 3, test=(0, 1)), metrics=shares))
