"""Selection rules on invented records, where the right answer can be seen."""

from dataclasses import replace
from itertools import product
from math import isnan, nan

import pytest

from tests.invented import invented_records
from timm_moe_dg.data import seed_hash
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import (
    SELECTION_RULES,
    leave_one_domain_out_cv,
    oracle,
    reported_accuracy,
    tied_with_selected,
    training_domain_validation,
    transfer_accuracy,
    validates_on_test_groups,
    validation_accuracy,
    whole_accuracy,
)

WORST_GROUP, F1_MACRO = SELECTION_RULES["ood_worst_group"], SELECTION_RULES["ood_f1_macro"]


def invented(step, out_acc, in_acc=(0.0, 0.0, 0.0), test=(0,), hparams_seed=0):
    args = {"dataset": "d", "algorithm": "ERM", "test_envs": list(test), "trial_seed": 0, "hparams_seed": hparams_seed}
    return Record(step, 0.0, {"loss": 0.0}, 0.0, 0.0, in_acc, out_acc, args, {})


def test_validation_accuracy_is_the_plain_mean_of_the_training_domains():
    record = invented(0, out_acc=(1.0, 0.25, 0.5))
    assert validation_accuracy(record) == pytest.approx(0.375)
    assert validation_accuracy(invented(0, (1.0, 0.25, 0.5), test=(0, 2))) == 0.25


def test_training_domains_without_an_out_split_are_left_out_of_the_mean():
    assert validation_accuracy(invented(0, (1.0, nan, 0.5))) == 0.5
    assert isnan(validation_accuracy(invented(0, (1.0, nan, nan))))
    records = [invented(0, (1.0, nan, 0.5)), invented(300, (0.0, nan, 0.6)), invented(600, (1.0, nan, 0.4))]
    assert training_domain_validation(records) is records[1]


def test_training_domain_validation_does_not_look_at_the_test_domain():
    records = [
        invented(0, out_acc=(0.9, 0.5, 0.5), in_acc=(0.9, 1.0, 1.0)),
        invented(300, out_acc=(0.1, 0.9, 0.2), in_acc=(0.2, 0.9, 0.9)),
        invented(600, out_acc=(0.8, 0.5, 0.55), in_acc=(0.8, 1.0, 1.0)),
    ]
    assert training_domain_validation(records) is records[1]
    assert reported_accuracy(records[1]) == 0.2


def test_training_domain_validation_chooses_over_hyper_parameters_and_steps():
    records = [
        invented(step, (0.0, value, value), hparams_seed=seed)
        for seed, step, value in [(0, 0, 0.1), (0, 300, 0.6), (1, 0, 0.7), (1, 300, 0.5)]
    ]
    assert training_domain_validation(records) is records[2]


def test_oracle_compares_last_steps_only():
    records = [
        invented(300, out_acc=(0.6, 0.1, 0.1), in_acc=(0.65, 0, 0), hparams_seed=0),
        invented(0, out_acc=(0.99, 0.9, 0.9), hparams_seed=0),
        invented(0, out_acc=(0.2, 0.9, 0.9), hparams_seed=1),
        invented(300, out_acc=(0.5, 0.9, 0.9), hparams_seed=1),
    ]
    assert oracle(records) is records[0]
    assert reported_accuracy(oracle(records)) == 0.65


def test_reported_accuracy_averages_several_test_domains():
    assert reported_accuracy(invented(0, (0, 0, 0), in_acc=(0.2, 0.9, 0.6), test=(0, 2))) == pytest.approx(0.4)
    # A group may have validation images alone
    assert reported_accuracy(invented(0, (0, 0, 0), in_acc=(nan, 0.9, 0.6), test=(0, 2))) == 0.6


def test_a_run_without_test_domains_is_selected_by_validation_and_by_no_oracle():
    records = [invented(step, (value,) * 3, test=()) for step, value in [(0, 0.5), (300, 0.7), (600, 0.6)]]
    assert training_domain_validation(records) is records[1]
    assert all(isnan(value(records[0])) for value in (reported_accuracy, whole_accuracy, transfer_accuracy))
    with pytest.raises(RecordError, match="holds out no domain to look at; select by training_domain_validation"):
        oracle(records)


@pytest.mark.parametrize("name", SELECTION_RULES)
def test_no_records(name):
    with pytest.raises(RecordError, match="first evaluation"):
        SELECTION_RULES[name]([])


def cross_validation_runs(target, num_domains, hparams_seeds, seed, **options):
    """Runs {t} and {t, v} of one trial, shuffled among each other as folders on a disk are."""
    held_out = [(target,)] + [tuple(sorted((target, other))) for other in range(num_domains) if other != target]
    runs = {
        (test, draw): invented_records(test, num_domains=num_domains, hparams_seed=draw, seed=seed, **options)
        for test, draw in product(held_out, hparams_seeds)
    }
    return dict(sorted(runs.items(), key=lambda item: seed_hash(item[0], seed)))


def literal_cross_validation(runs, target, num_domains, hparams_seeds, steps):
    """The rule as it is written down, by looking every number up; the value and the accuracy on the test domain."""
    best = None
    for draw in sorted(hparams_seeds, reverse=True):
        for step in steps:
            total = 0.0
            for other in range(num_domains):
                if other != target:
                    held_out = (min(target, other), max(target, other))
                    (record,) = [record for record in runs[held_out, draw] if record.step == step]
                    total += record.in_acc[other]
            value = total / (num_domains - 1)
            (alone,) = [record for record in runs[(target,), draw] if record.step == step]
            if best is None or value > best[0]:
                best = (value, alone)
    return best[1]


@pytest.mark.parametrize("num_domains", [3, 4, 6])
@pytest.mark.parametrize("levels", [4, 1024])  # with and without equal values
def test_cross_validation_against_the_written_rule(num_domains, levels):
    steps, draws = (0, 300, 600), (0, 1, 2)
    differ = 0
    for seed, target in product(range(10), range(num_domains)):
        runs = cross_validation_runs(target, num_domains, draws, seed, levels=levels, at=steps)
        records = [record for run in runs.values() for record in run]
        chosen = leave_one_domain_out_cv(records)
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


def test_cross_validation_names_the_runs_that_it_needs():
    with pytest.raises(RecordError, match=r"in all the runs that hold out \{1, 0\}, \{1, 2\}"):
        leave_one_domain_out_cv(invented_records((1,)) + invented_records((0, 1)))
    with pytest.raises(RecordError, match=r"one common test domain were expected, got those of \[0, 1\]"):
        leave_one_domain_out_cv(invented_records((1,)) + invented_records((0,)) + invented_records((0, 1)))


def test_the_highest_draw_of_equals_as_in_domainbed():
    records = [invented(0, (0.0, 0.5, 0.5), hparams_seed=draw) for draw in (0, 2, 1)]
    assert training_domain_validation(records) is records[1]
    assert oracle(records) is records[1]


@pytest.mark.parametrize("rule", [training_domain_validation, oracle])
def test_an_averaged_network_stands_for_its_run_alone(rule):
    trained = [invented(step, (0.9, 0.9, 0.9)) for step in (0, 300)]
    averaged = replace(invented(301, (0.2, 0.2, 0.2)), averaged=True)
    assert rule([*trained, averaged]) is averaged
    other = invented(300, (0.3, 0.3, 0.3), hparams_seed=1)
    assert rule([*trained, averaged, other]) is other


def test_cross_validation_takes_averaged_networks_of_all_runs():
    runs = cross_validation_runs(0, 3, (0,), seed=1)
    ends = [replace(run[-1], step=601, averaged=True) for run in runs.values()]
    chosen = leave_one_domain_out_cv([*(record for run in runs.values() for record in run), *ends])
    assert chosen.averaged
    assert chosen.test_domains == (0,)


def test_a_value_that_is_not_a_number_is_never_chosen():
    records = [invented(0, (nan, nan, 0.5)), invented(300, (nan, 0.1, 0.1)), invented(600, (nan, nan, 0.9))]
    assert training_domain_validation(records) is records[1]
    assert oracle(records) is records[2]


def shifted(step, worst, f1, validation=0.5, **options):
    """An evaluation with scores on the ood validation split, and tests that would choose otherwise."""
    scores = {"worst_accuracy": worst, "f1_macro": f1}
    misleading = {"worst_accuracy": 1 - worst, "f1_macro": 1 - f1}
    return replace(
        invented(step, (nan, validation, validation), **options), roles={"ood_val": scores, "ood": misleading}
    )


def test_worst_group_and_f1_of_validation_under_shift_choose_each_its_own():
    records = [shifted(0, 0.2, 0.1, 0.9), shifted(300, 0.4, 0.3), shifted(600, 0.3, 0.6), shifted(900, 0.4, 0.6)]
    assert WORST_GROUP(records) is records[1]  # the first of equals
    assert F1_MACRO(records) is records[2]
    assert training_domain_validation(records) is records[0]
    drawn = [*records, shifted(0, 0.4, 0.6, hparams_seed=1)]
    assert WORST_GROUP(drawn) is drawn[-1]  # the highest draw of equals
    averaged = [*records, replace(shifted(901, 0.1, 0.1), averaged=True)]
    assert F1_MACRO(averaged) is averaged[-1]


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


def test_records_without_these_scores_say_what_is_lacking_in_one_line():
    old = [invented(0, (0, 1, 1)), shifted(300, 0.5, 0.5)]
    with pytest.raises(RecordError, match="1 of 2 evaluations lack f1_macro on the ood validation split") as caught:
        F1_MACRO(old)
    assert "\n" not in str(caught.value)
    with pytest.raises(RecordError, match="lack worst_accuracy"):
        WORST_GROUP([shifted(0, nan, 0.5)])  # all images in "Other"


def test_the_whole_domain_weighs_images_alike():
    record = invented(0, (0.0, 0.5, nan), in_acc=(1.0, 0.75, 0.25), test=(0,))
    sizes = {"split_sizes": [[6, 2], [0, 4], [8, 0]]}
    assert whole_accuracy(replace(record, args={**record.args, **sizes})) == 6 / 8
    # By its rule, DomainBed's split of unknown size has these shares
    assert whole_accuracy(record) == pytest.approx(0.8)
    assert whole_accuracy(replace(record, args={**record.args, "holdout_fraction": 0.5})) == 0.5
    # A split by photograph has no shares, but its numbers do
    by_photograph = {**record.args, "split_by_photograph": True}
    assert isnan(whole_accuracy(replace(record, args=by_photograph)))
    assert whole_accuracy(replace(record, args={**by_photograph, **sizes})) == 6 / 8
    # Several test domains count alike, and a split without images does not count
    several = {**record.args, **sizes, "test_envs": [0, 2]}
    assert whole_accuracy(replace(record, args=several)) == (6 / 8 + 0.25) / 2


def test_ties_are_those_of_the_selected_record():
    records = [invented(step, (0.0, value, 0.5)) for step, value in enumerate((0.25, 0.5, 0.25, 0.5))]
    assert training_domain_validation(records) is records[1]  # the earliest, as DomainBed's argmax
    assert tied_with_selected(records) == [records[1], records[3]]
    averaged = replace(records[0], averaged=True)
    assert tied_with_selected([*records, averaged]) == [averaged]
    assert len(tied_with_selected([invented(step, (0.0, nan, nan)) for step in range(2)])) == 2
