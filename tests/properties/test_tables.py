"""Cells of tables, against means by hand."""

from itertools import combinations, product
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.invented import invented_records
from tests.results.cells import cells_of
from timm_moe_dg.results.runs import FinishedRun
from timm_moe_dg.results.tables import make_tables

pytestmark = pytest.mark.slow  # up to two seconds each


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


@st.composite
def sweeps(draw):
    """Runs that hold out each domain and each pair, for some trial seeds and draws of hyper-parameters."""
    domains, levels = draw(st.integers(2, 3)), draw(st.sampled_from([2, 64]))  # with two levels, most values are equal
    trials = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True))
    draws = draw(st.lists(st.integers(0, 9), min_size=1, max_size=2, unique=True))
    steps, seed = draw(st.sampled_from([(0,), (0, 10), (0, 10, 20)])), draw(st.integers(0, 2**31))
    held_out = [*combinations(range(domains), 1), *combinations(range(domains), 2)]
    runs = {}
    for test, trial, hparams in product(held_out, trials, draws):
        same = {"num_domains": domains, "at": steps, "levels": levels, "seed": seed}
        made = invented_records(test, trial_seed=trial, hparams_seed=hparams, **same)
        runs[test, trial, hparams] = FinishedRun(Path(f"{test}-{trial}-{hparams}"), made)
    return domains, trials, draws, runs


def validation(record, held_out):
    return mean(accuracy for domain, accuracy in enumerate(record.out_acc) if domain not in held_out)


def chosen(rule, runs, domains, draws, domain, trial):
    """The record with the highest value; of equals, the highest draw of hyper-parameters, then the first step."""
    candidates = []
    for draw in draws:
        records = runs[(domain,), trial, draw].records
        for number, record in enumerate(records):
            if rule == "training_domain_validation":
                value = validation(record, (domain,))
            elif rule == "oracle":
                value = record.out_acc[domain] if number == len(records) - 1 else -1
            else:
                pairs = [(other, tuple(sorted((domain, other)))) for other in range(domains) if other != domain]
                value = mean(runs[pair, trial, draw].records[number].in_acc[other] for other, pair in pairs)
            candidates.append((value, draw, -number, record))
    return max(candidates, key=lambda candidate: candidate[:3])[3]


@given(sweeps(), st.sampled_from(["training_domain_validation", "oracle", "leave_one_domain_out_cv"]))
def test_cells_are_means_over_seeds_of_the_selected_records(sweep, rule):
    domains, trials, draws, runs = sweep
    (table,) = make_tables(list(runs.values()), [rule])
    ((cells),) = cells_of(table).values()
    assert len(cells) == domains + 1
    assert not table.missing
    accuracies = [
        [chosen(rule, runs, domains, draws, domain, trial).in_acc[domain] for trial in trials]
        for domain in range(domains)
    ]
    averages = [mean(of_seed) for of_seed in zip(*accuracies, strict=True)]
    for cell, values in zip(cells, [*accuracies, averages], strict=True):
        assert cell.values == pytest.approx(dict(zip(trials, values, strict=True)))
        assert cell.mean == pytest.approx(mean(values))
        if len(trials) > 1:
            deviation = sqrt(mean((value - mean(values)) ** 2 for value in values))
            assert cell.error == pytest.approx(deviation / sqrt(len(trials)), abs=1e-12)


@given(sweeps(), st.data())
def test_the_order_of_runs_does_not_matter_and_a_lost_one_is_named(sweep, data):
    _, _, _, runs = sweep
    table = make_tables(list(runs.values()), ["training_domain_validation"])[0]
    shuffled = list(runs.values())
    data.draw(st.randoms()).shuffle(shuffled)
    assert make_tables(shuffled, ["training_domain_validation"])[0].scores.equals(table.scores)
    lost = data.draw(st.sampled_from(sorted(key for key in runs if len(key[0]) == 1)))
    fewer = make_tables([run for key, run in runs.items() if key != lost], ["training_domain_validation"])
    (test,), trial, draw = lost
    phrase = f"test domains [{test}], trial seeds [{trial}], hparams seed {draw}"
    planned = any(key[0] == lost[0] for key in runs if key != lost)  # other runs hold out the same domain
    assert any(phrase in line for line in fewer[0].missing) == planned
