"""The answer of a comparison, against scipy, by hand on made-up scores, and by simulation."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import nan

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.stats import ttest_1samp

from tests.results.simulate_answer import CASES, RESAMPLES, made_up_scores, recommended
from tests.results.test_comparison import counted_p
from tests.results.test_new_site import DENSE, SPARSE, empty_sites, sweep
from timm_moe_dg.analysis.plots import plot_answer
from timm_moe_dg.errors import ArgumentError, RecordError
from timm_moe_dg.results import comparison
from timm_moe_dg.results.answer import (
    ZERO,
    Answer,
    answer,
    answer_frame,
    paired,
    prediction_interval,
    render_answer,
    scores_of,
)
from timm_moe_dg.results.comparison import holm, smallest_p

COSTS = {"dense": (1.0, 5), "probe": (1.0, 5), "gmoe": (1.5, 8), "moge": (1.6, 9), ZERO: (0.0, 0)}
FIVE = np.array([0.01, -0.01, 0.02, 0.0, -0.02])  # a gain that differs by domain, around zero
ONE_DOMAIN = [0.2, 0.0, 0.0, 0.0, 0.0]


@pytest.fixture(autouse=True)
def few_patterns(monkeypatch):
    monkeypatch.setattr(comparison, "_RESAMPLES", RESAMPLES)


def scores_by(gains: dict[str, Sequence[float]], zero: float = 0.2, seeds: int = 4, noise: float = 0.001):
    scores = made_up_scores(gains, seeds, noise, np.random.default_rng(0))
    return pd.concat([scores, scores[scores.row == "dense"].assign(row=ZERO, accuracy=zero)], ignore_index=True)


def answer_by(gains: dict[str, Sequence[float]], **options) -> Answer:
    return answer(scores_by({"dense": [0.0] * len(next(iter(gains.values()))), **gains}, **options), COSTS)


def test_numbers_are_those_of_scipy() -> None:
    scores = scores_of([*sweep({"dense": DENSE, "sparse": SPARSE})])
    made = answer(scores, {}, reference="ERM, dense")
    (pair,) = made.pairs.itertuples()
    differences = np.array(SPARSE) - np.array(DENSE)
    test = ttest_1samp(differences.mean(axis=1), 0)
    assert (pair.difference, pair.low, pair.high) == pytest.approx((differences.mean(), *test.confidence_interval()))
    assert (pair.p, pair.p_sites) == pytest.approx((counted_p(differences.ravel()), test.pvalue))
    assert (pair.wins, pair.pairs, pair.domains_won, pair.domains) == (6, 10, 4, 5)
    row = made.rows.loc["ERM, sparse"]
    means = np.mean(SPARSE, axis=0)
    assert (row["mean"], row.standard_error) == pytest.approx((means.mean(), means.std() / np.sqrt(2)))
    assert (row.worst_domain, row.worst, row.seeds) == ("domain 2", pytest.approx(0.45), 2)
    assert (row.low, row.high) == pytest.approx(prediction_interval(np.mean(SPARSE, axis=1)))


RULE = [  # gains, recommended row, verdicts, words of the sentences
    ("equal", {"gmoe": FIVE / 20}, {}, "dense", ["equal in practice"], ["the cheapest of the rows that are equal in"]),
    ("one better", {"gmoe": 0.05 + FIVE}, {}, "gmoe", ["better"], ["Take gmoe: at new sites it is better than dense"]),
    ("in one domain", {"gmoe": ONE_DOMAIN}, {}, "dense", ["cannot tell"], ["cannot be told apart", "not more seeds"]),
    ("all below zero", {"gmoe": 0.05 + FIVE}, {"zero": 0.9}, ZERO, ["better"], ["no row is clearly above", "(90.0%)"]),
    ("two domains", {"gmoe": [0.05, 0.1]}, {}, "dense", ["cannot tell"], ["On these domains gmoe is better", "more d"]),
    ("one domain", {"gmoe": [0.05]}, {"seeds": 9}, "dense", ["cannot tell"], ["says nothing about new sites"]),
    ("one seed", {"gmoe": 0.05 + FIVE}, {"seeds": 1}, "dense", ["cannot tell"], ["is 0.062", "at least 2 seeds"]),
    ("ties", {"gmoe": [0.0] * 3}, {"noise": 0}, "dense", ["equal in practice"], ["that are equal in practice"]),
    ("probe ties", {"probe": [0.0] * 3}, {"noise": 0}, "probe", ["equal in practice"], ["The probe alone is one of"]),
    ("worse probe", {"probe": FIVE - 0.05}, {}, "dense", ["worse"], ["the only row"]),
    ("weak probe", {"probe": FIVE - 0.5}, {}, "dense", ["worse"], ["(20.0%): dense. The probe alone is none of them"]),
    ("two better", {"gmoe": 0.05 + FIVE, "moge": 0.052 + FIVE}, {}, "gmoe", ["better"] * 2, ["Take gmoe"]),
    ("the best", {"gmoe": 0.05 + FIVE, "moge": 0.1 + FIVE}, {}, "moge", ["better"] * 2, ["Take moge"]),
    ("weak, not told", {"probe": [-x for x in ONE_DOMAIN]}, {}, "dense", ["cannot tell"], ["the only row"]),
    ("alone", {"dense": [0.0] * 5}, {}, "dense", [], ["Take dense, the only row"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("gains", "options", "row", "verdicts", "words"), [case[1:] for case in RULE], ids=[c[0] for c in RULE]
)
def test_the_rule(gains, options, row, verdicts, words) -> None:
    made = answer_by(gains, **options)
    assert (made.recommended, list(made.pairs.verdict)) == (row, verdicts)
    assert all(word in " ".join(made.verdict) for word in words), made.verdict
    assert len(made.verdict) <= 4


@pytest.mark.parametrize(
    ("case", "low", "high"),
    [
        (CASES[0], 0, 0.08),
        (CASES[1], 0, 0.1),
        (CASES[2], 0.8, 1),
        # A difference of 3.76 standard errors is found in 80%, each 2.5 points x sqrt(2 / 25)
        ((3.76 * 0.025 * np.sqrt(2 / 25), *CASES[2][1:]), 0.7, 0.9),
    ],
)
def test_the_rule_seldom_errs_in_simulated_comparisons(case, low, high) -> None:
    """The shares of thousands are at most 1, 3 and at least 80 percent, see `simulate_answer`."""
    assert low <= recommended(40, *case) <= high


def test_p_values_are_corrected_and_the_detectable_difference_follows_by_hand() -> None:
    gains = {"gmoe": ONE_DOMAIN, "moge": [x / 2 for x in ONE_DOMAIN]}
    scores = scores_by({"dense": [0.0] * 5, **gains}, noise=0.02)
    made, pairs = answer(scores, COSTS), {name: paired(scores, name, "dense").unstack() for name in gains}
    assert list(made.pairs.p_sites) == pytest.approx(
        holm([ttest_1samp(p.mean(axis=1), 0).pvalue for p in pairs.values()])
    )
    assert list(made.pairs.p_holm) == holm(made.pairs.p)
    error = np.mean([pair.mean(axis=1).std() / np.sqrt(5) for pair in pairs.values()])
    assert share_found(stated_points(made), error, 0.05 / 2) == pytest.approx(0.8, abs=0.01)  # of two rows
    same = scores_by({"dense": [0.0] * 5, "gmoe": [0.025] * 5}, noise=0.035)
    pair = paired(same, "gmoe", "dense").unstack()
    between = max(pair.mean(axis=1).var() - pair.var(axis=1).mean() / 4, 0)
    assert share_found(3.76106, 1, 0.05) == pytest.approx(0.8, abs=0.005)
    needed = pair.var(axis=1).mean() / (5 * (pair.mean().mean() / 3.76106) ** 2 - between)
    assert f"takes about {np.ceil(needed):.0f} seeds, or more" in answer(same, COSTS).verdict[-1]


def stated_points(made: Answer) -> float:
    """The difference that a verdict says is found, as a share."""
    return float(made.verdict[-1].partition("about ")[2].split()[0]) / 100


def share_found(difference: float, error: float, level: float, domains: int = 5) -> float:
    """Share of t tests that find a difference whose mean over domains has a standard error."""
    draws = np.random.default_rng(0).normal(difference, error * np.sqrt(domains), (100_000, domains))
    return float(np.mean(ttest_1samp(draws, 0, axis=1).pvalue < level))


def test_rows_hardly_above_the_most_frequent_class_are_left_out() -> None:
    gains = {"dense": [0.0] * 5, "gmoe": 0.05 + FIVE, "moge": 0.058 + FIVE}
    level = scores_by(gains, noise=0).query("row == 'dense'").accuracy.mean()
    made = answer(scores_by(gains, noise=0, zero=level + 0.004), COSTS)  # five points above begin beyond gmoe
    assert (made.recommended, made.rows.standard_error.isna().any()) == ("moge", False)
    assert answer(scores_by(gains, seeds=1), COSTS).rows.standard_error.isna().all()


def test_rows_are_compared_on_common_runs_and_lacking_ones_are_listed() -> None:
    scores = scores_by({"dense": [0.0] * 5, "gmoe": 0.05 + FIVE, "moge": [0.05] * 5})
    lacking = (scores.row == "gmoe") & ((scores.domain == "domain 1") | (scores.seed == 0))
    made = answer(scores[~lacking & (scores.row != "moge")], COSTS)
    (pair,) = made.pairs.itertuples()
    assert (pair.pairs, pair.domains, pair.difference) == (12, 4, pytest.approx(0.0525, abs=0.002))
    assert (pair.verdict, made.recommended) == ("better", "dense")  # gmoe lacks a domain
    other = scores[~lacking].assign(seed=scores.seed + 10 * (scores.row == "moge"))
    made = answer(other, COSTS)
    assert list(made.pairs.verdict) == ["better", "cannot tell"]  # without a common run
    text = render_answer(made, "text")
    assert "Left out, because runs of held-out domains are missing: gmoe (domain 1)." in text
    assert "Pairs with dense, as runs are missing: gmoe 12 of 40, moge 0 of 40." in text
    assert list(made.pairs.p_holm.isna()) == [False, True]
    assert made.pairs.p_holm[0] == made.pairs.p[0]  # the row without a test is none of the family
    assert (
        answer(other[other.row != "gmoe"], COSTS).verdict[-1]
        == "No runs form a pair, because no row has a held-out domain and seed of another."
    )
    with pytest.raises(ArgumentError, match=r"^rows=\['most_frequent'\]"):
        answer(scores[scores.row == ZERO], COSTS)


def test_p_is_that_of_the_difference_with_unequal_seeds() -> None:
    """Six pairs of +2 points in one domain and one of -3 in the other differ by -0.5, the mean over domains."""
    gains = {"a": [0.02] * 6, "b": [-0.03]}
    lines = [(d, n, 0.5 + x, 0.5) for d, by_seed in gains.items() for n, x in enumerate(by_seed)]
    frame = pd.DataFrame(lines, columns=["domain", "seed", "gmoe", "dense"])
    scores = frame.melt(["domain", "seed"], var_name="row", value_name="accuracy").assign(balanced=nan)
    (pair,) = answer(scores, {}).pairs.itertuples()
    signs = np.array(list(product([-1, 1], repeat=7)))
    means = (signs @ np.array([*np.repeat(0.02 / 6, 6), -0.03]) / 2).round(12)
    assert pair.difference == pytest.approx(-0.005)
    assert pair.p == np.mean(abs(means) >= 0.005)


def test_without_costs_the_reference_is_one_of_the_rows() -> None:
    scores = scores_by({"dense": [0.0] * 5, "gmoe": FIVE / 20})
    assert answer(scores, {}).verdict[0].startswith("Take dense, one of the rows that are equal in practice")
    assert answer(scores, COSTS).verdict[0].startswith("Take dense, the cheapest of the rows")


def test_every_format_has_every_row_and_names_are_text() -> None:
    made = answer_by({"probe": [0.0] * 5, "a|b": 0.05 + FIVE})
    assert "a&#124;b" in render_answer(made, "markdown")
    assert "nan" not in render_answer(answer_by({"gmoe": [0.05]}, seeds=1), "text")
    assert r"\begin{tabular}" in render_answer(made, "latex")
    printed = json.loads(render_answer(made, "json"))
    assert [row["name"] for row in printed["rows"]] == ["dense", "probe", "a|b", ZERO]
    assert printed["rows"][2]["accuracy"]["domain 0"] == pytest.approx(100 * made.domains.loc["a|b", "domain 0"])
    assert (printed["rows"][2]["gmacs"], printed["rows"][0]["parameters"]) == (None, 5)
    assert printed["pairs"][1]["interval"] == pytest.approx([100 * made.pairs.low[1], 100 * made.pairs.high[1]])
    assert (printed["recommended"], printed["verdict"]) == ("a|b", made.verdict)
    lines = list(csv.DictReader(render_answer(made, "csv").splitlines()))
    assert [line["recommended"] for line in lines] == ["False", "False", "True", "False"]
    assert float(lines[2]["pair_difference"]) == pytest.approx(100 * made.pairs.difference[1])
    renamed = answer_frame(replace(made, domains=made.domains.rename(columns={"domain 0": "mean"})))
    assert renamed["mean"].tolist() == pytest.approx(list(100 * made.rows["mean"]))


def test_scores_of_runs_have_the_names_of_rows_and_the_most_frequent_class() -> None:
    scores = scores_of(empty_sites([0.9, 0.95], row="gmoe"))
    assert scores.groupby("row").accuracy.mean().to_dict() == pytest.approx({"gmoe": 0.925, ZERO: 0.835})
    others = [run for steps in (1, 2) for run in sweep({"vit": DENSE}, row="dense", steps=steps)]
    assert set(scores_of(others).row) == {"dense, steps=1", "dense, steps=2"}
    alike = [*sweep({"vit": DENSE}, row="dense"), *sweep({"resnet": DENSE}, row="dense")]
    assert set(scores_of(alike).row) == {"dense (ERM, vit)", "dense (ERM, resnet)"}
    runs = [
        replace(run, records=[replace(r, metrics={"balanced_accuracy": (0.3,) * 2}) for r in run.records])
        for run in empty_sites([0.9] * 2)
    ]
    assert scores_of(runs).balanced.tolist() == pytest.approx([0.3, 0.3, nan, nan], nan_ok=True)
    assert set(scores_of(sweep({"vit": DENSE})).row) == {"ERM, vit"}  # DomainBed's runs do not count classes


def test_the_smallest_p() -> None:
    assert [smallest_p(number) for number in (1, 3, 10)] == [1.0, 0.25, 2 / 2**10]
    assert smallest_p(np.int64(80)) == 2 / (RESAMPLES + 1)


@pytest.mark.parametrize(("rows", "number"), [(1, 2), (7, 16)])
def test_a_picture_has_a_point_for_each_pair(rows, number, tmp_path) -> None:
    gains = {f"row {row} " * 9: [0.01 * row] * number for row in range(rows)}
    scores = scores_by({"dense": [0.0] * number, **gains}, noise=0.02)
    plot_answer(answer(scores, COSTS), scores, tmp_path / "answer.png")
    picture = Image.open(tmp_path / "answer.png").convert("RGB")
    assert picture.size == pytest.approx((900, 165 + 112.5 * rows), abs=2)
    assert len(set(picture.getdata())) > 20
    with pytest.raises(RecordError, match="no pair to draw"):
        plot_answer(answer(scores[scores.row == "dense"], COSTS), scores, tmp_path / "none.png")
