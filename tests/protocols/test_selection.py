"""Selection rules on invented records, where the right answer can be seen."""

import pytest

from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols import (
    SELECTION_RULES,
    Record,
    oracle,
    reported_accuracy,
    training_domain_validation,
    validation_accuracy,
)


def invented(step, out_acc, in_acc=(0.0, 0.0, 0.0), test=(0,), hparams_seed=0):
    args = {"dataset": "d", "algorithm": "ERM", "test_envs": list(test), "trial_seed": 0, "hparams_seed": hparams_seed}
    return Record(step, 0.0, {"loss": 0.0}, 0.0, 0.0, in_acc, out_acc, args, {})


def test_validation_accuracy_is_the_plain_mean_of_the_training_domains():
    record = invented(0, out_acc=(1.0, 0.25, 0.5))
    assert validation_accuracy(record) == pytest.approx(0.375)
    assert validation_accuracy(invented(0, (1.0, 0.25, 0.5), test=(0, 2))) == 0.25


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


def test_first_of_equals():
    records = [invented(0, (0.0, 0.4, 0.6)), invented(300, (0.9, 0.5, 0.5))]
    assert training_domain_validation(records) is records[0]


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


@pytest.mark.parametrize("name", SELECTION_RULES)
def test_no_records(name):
    with pytest.raises(RecordError, match="first evaluation"):
        SELECTION_RULES[name]([])
