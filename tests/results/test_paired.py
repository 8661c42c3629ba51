"""Paired tests: p values against counting all sign patterns, and pairs of equal seed and domain only."""

from itertools import product
from math import isnan, nan

import numpy as np
import pytest

from tests.invented import invented_records, write_run, write_sweep
from tests.results.cells import cells_of, table_of
from timm_moe_dg.results.comparison import holm, paired_tests, sign_flip_p
from timm_moe_dg.results.runs import RowKey, find_runs
from timm_moe_dg.results.tables import make_tables


def counted_p(values):
    reached = [abs(np.dot(signs, values)) >= abs(sum(values)) - 1e-12 for signs in product([1, -1], repeat=len(values))]
    return np.mean(reached)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 12])
def test_p_counts_all_sign_patterns(number):
    values = np.random.default_rng(number).normal(0.5, 1, number)
    assert sign_flip_p(values) == counted_p(values)


@pytest.mark.parametrize("seed", range(20))
def test_differences_of_shares_keep_their_ties(seed):
    """Accuracies over few images make patterns of equal means, which floating-point errors would tell apart."""
    first, second = np.random.default_rng(seed).integers(200, 230, (2, 5)) / 357
    assert sign_flip_p(first - second) == counted_p(first - second)


def test_many_pairs_are_sampled_and_come_near_the_exact_value():
    values = np.random.default_rng(1).normal(0.2, 1, 17)
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    exact = (abs(sums) >= abs(values.sum())).mean()
    assert 0.01 < exact < 0.9
    assert sign_flip_p(values) == pytest.approx(exact, abs=0.006)  # four standard deviations of 99,999 samples
    assert sign_flip_p(values) == sign_flip_p(values)


def test_extremes():
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([0.1, 0.2, -0.3]) == 1.0
    assert sign_flip_p([0.1] * 10) == 2 / 2**10
    assert sign_flip_p([0.3]) == 1.0
    assert sign_flip_p([-1, -2, 3.5, 1]) == sign_flip_p([1, 2, -3.5, -1])
    assert isnan(sign_flip_p([]))
    assert isnan(sign_flip_p([0.1, nan]))


@pytest.mark.parametrize("number", [2, 16, 17, 40])
def test_p_counts_the_observed_pattern_and_is_never_0(number):
    assert sign_flip_p([0.1] * number) >= max(2 / 2**number, 1 / 100_000)


def test_under_the_null_p_is_uniform():
    """Of symmetric noise, no more than a share of a gives p at most a."""
    p_values = np.array([sign_flip_p(np.random.default_rng(seed).normal(0, 1, 10)) for seed in range(400)])
    for level in (0.05, 0.2, 0.5):
        assert (p_values <= level).mean() == pytest.approx(level, abs=0.06)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def sweep_tables(root):
    return make_tables(find_runs([root])[0], ["training_domain_validation"])


def test_pairs_are_seeds_and_domains_that_both_rows_have(tmp_path):
    for model in ("a", "b"):
        skip = [((1,), 2, 0)] if model == "b" else []
        write_sweep(tmp_path / model, hparams_seeds=(0,), skip=skip, model=model)
    (table,) = sweep_tables(tmp_path)
    (test,) = paired_tests(table)
    first, second = (cells_of(table)[row] for row in (test.first, test.second))
    by_hand = [
        first[domain].values[seed] - second[domain].values[seed]
        for domain in range(3)
        for seed in range(3)
        if (domain, seed) != (1, 2)
    ]
    assert sorted(test.differences) == pytest.approx(sorted(by_hand))
    assert len(test.differences) == len(by_hand) == 8
    assert test.p == test.adjusted == sign_flip_p(by_hand)


def test_rows_without_a_common_pair_are_not_tested(tmp_path):
    for model, seed in (("a", 0), ("b", 1)):
        write_run(tmp_path / model, invented_records([0], trial_seed=seed, model=model))
    (table,) = sweep_tables(tmp_path)
    assert len(table.rows) == 2
    assert paired_tests(table) == []


def test_three_rows_make_three_tests_that_are_corrected(tmp_path):
    for model in ("a", "b", "c"):
        write_sweep(tmp_path / model, hparams_seeds=(0,), model=model)
    (table,) = sweep_tables(tmp_path)
    tests = paired_tests(table)
    assert len(tests) == 3
    assert [test.adjusted for test in tests] == holm([test.p for test in tests])
    assert min(test.adjusted for test in tests) == pytest.approx(min(1, 3 * min(test.p for test in tests)))


@pytest.mark.parametrize(
    ("rule", "columns", "tested"),
    [
        ("oracle", ["a", "b", "average", "validation"], {"held-out domains": [0, 1]}),
        ("single_source", ["a (IID)", "b", "c", "average OOD"], {"domains not trained on": [1, 2]}),
        ("official", ["id accuracy", "ood accuracy"], {"id accuracy": [0], "ood accuracy": [1]}),
        ("ood_f1_macro", ["id F1-macro", "ood F1-macro"], {"id F1-macro": [0], "ood F1-macro": [1]}),
    ],
)
def test_averages_are_left_out_and_different_scores_are_not_pooled(rule, columns, tested):
    cells = [{0: 2.0**position, 1: 4.0**position} for position in range(len(columns))]
    rows = {RowKey("ERM", "a"): cells, RowKey("ERM", "b"): [{0: 0.0, 1: 0.0}] * len(columns)}
    tests = paired_tests(table_of(rows, columns, rule=rule))
    assert {test.of: sorted(test.differences) for test in tests} == {
        title: sorted(value for position in positions for value in (2.0**position, 4.0**position))
        for title, positions in tested.items()
    }
