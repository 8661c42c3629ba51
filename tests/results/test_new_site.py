"""The accuracy to expect at a new site, against scipy and arithmetic by hand on invented runs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score

from tests.invented import invented_records
from tests.results.cells import held_out_run
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.results.answer import prediction_interval
from timm_moe_dg.results.new_site import (
    new_site,
    recommendation,
    sentences,
    site_frame,
    site_tables,
)
from timm_moe_dg.results.runs import FinishedRun

Accuracies = Mapping[str, Sequence[Sequence[float]]]  # model -> accuracies on each domain, a number for each seed
DENSE = [[0.4, 0.5], [0.5, 0.6], [0.3, 0.3], [0.7, 0.6], [0.5, 0.4]]
SPARSE = [[0.5, 0.5], [0.6, 0.6], [0.4, 0.5], [0.6, 0.7], [0.5, 0.6]]


def run(held_out: Sequence[int], accuracy: float, out: float = 0.9, number: int = 5, **options) -> FinishedRun:
    """A run whose second evaluation is selected. All others have other accuracies on the held-out domains."""
    options = {"num_classes": 10, "data": "digest", **options}
    records = invented_records(held_out, num_domains=number, **options)
    values = [(0.11, out - 0.1), (accuracy, out), (0.99, out - 0.2)]
    records = [
        replace(record, in_acc=(inside,) * number, out_acc=(outside,) * number)
        for record, (inside, outside) in zip(records, values, strict=True)
    ]
    return FinishedRun(Path(f"{held_out}{options}"), records)


def sweep(accuracies: Accuracies, out: float = 0.9, **options) -> list[FinishedRun]:
    return [
        run([domain], accuracy, out, len(by_domain), model=model, trial_seed=seed, **options)
        for model, by_domain in accuracies.items()
        for domain, by_seed in enumerate(by_domain)
        for seed, accuracy in enumerate(by_seed)
    ]


def test_numbers_are_those_of_scipy() -> None:
    site = new_site(sweep({"dense": DENSE, "sparse": SPARSE}))
    means = np.mean(SPARSE, axis=1)
    assert (site.row, site.best["mean"]) == ("ERM, sparse", pytest.approx(means.mean()))
    # The interval of the mean has the width t s / sqrt(n), that of one new domain sqrt(n + 1) times as much
    mean_low, mean_high = ttest_1samp(means, 0).confidence_interval(0.95)
    half = (mean_high - mean_low) / 2 * np.sqrt(len(means) + 1)
    assert (site.best.low, site.best.high) == pytest.approx((means.mean() - half, means.mean() + half))
    assert (site.best.worst_domain, site.best.worst) == ("domain 2", pytest.approx(0.45))
    assert site.validation.to_dict() == pytest.approx({"ERM, dense": 0.9, "ERM, sparse": 0.9})
    assert f"a gap of {100 * (0.9 - means.mean()):+.1f} points" in " ".join(sentences(site))
    (pair,) = site.answer.pairs.itertuples()
    assert (pair.first, pair.second, pair.domains_won) == ("ERM, dense", "ERM, sparse", 0)
    assert list(site.domains.index) == ["domain 2", "domain 0", "domain 4", "domain 1", "domain 3"]
    assert site_frame(site).set_index("row")["mean"].to_dict() == pytest.approx({"ERM, dense": 48, "ERM, sparse": 55})


def test_a_new_domain_lies_in_95_percent_of_intervals() -> None:
    draws = np.random.default_rng(0).normal(0.5, 0.02, (3000, 6))
    within = [low <= new <= high for *seen, new in draws for low, high in [prediction_interval(seen)]]
    assert np.mean(within) == pytest.approx(0.95, abs=0.015)


def test_few_domains_have_no_interval_and_ends_are_clipped() -> None:
    assert all(map(isnan, prediction_interval([0.1, 0.2, 0.3])))
    assert prediction_interval([0.5] * 4) == (0.5, 0.5)
    low, high = prediction_interval([0.9, 0.99, 0.99, 1.0])
    assert high == 1.0
    assert low == pytest.approx(0.97 - t.ppf(0.975, 3) * np.std([0.9, 0.99, 0.99, 1.0], ddof=1) * np.sqrt(5 / 4))
    site = new_site(sweep({"vit": SPARSE[:3]}))
    assert "3 held-out domains are fewer than 4" in "".join(sentences(site))
    assert "0.0 to 100.0%" in "".join(sentences(new_site(sweep({"vit": [[0.2], [0.3], [0.9], [1.0]]}))))


@pytest.mark.parametrize(
    ("accuracies", "advice"),
    [
        ([0.12, 0.1, 0.11, 0.1], "do not deploy it, because it reaches 10.8% on held-out domains, and guessing gives"),
        ([0.8, 0.9, 0.85], "hold out at least 4 domains before you decide, because these are 3"),
        ([0.1, 0.9, 0.5, 0.6], "test it on labeled images of each new site first, because 0.0% is possible, and"),
        ([0.8, 0.8, 0.8, 0.8], "deploy it if an accuracy of 80.0% is enough at a new site"),
    ],
)
def test_each_rule_of_the_recommendation(accuracies: list[float], advice: str) -> None:
    site = new_site(sweep({"vit": [[accuracy] for accuracy in accuracies]}))
    assert recommendation(site).startswith(f"ERM, vit: {advice}")


def empty_sites(accuracies: Sequence[float], empty: float = 0.835, **facts) -> list[FinishedRun]:
    """Runs on sites of which most images are of one class."""
    sizes, right = [[200, 50]] * len(accuracies), [[round(200 * empty), round(50 * empty)]] * len(accuracies)
    facts = {"most_frequent_class": "empty", "classes_present": [[3, 3, 3]] * len(accuracies), **facts}
    facts |= {"num_classes": 3, "split_sizes": sizes, "most_frequent": right}
    return sweep({"vit": [[accuracy] for accuracy in accuracies]}, **facts)


@pytest.mark.parametrize(
    ("accuracies", "advice"),
    [
        (
            [0.835] * 6,
            "do not deploy it, .* 83.5% .*class of the training images .empty. gives 83.5%: .*nothing beyond",
        ),
        ([0.84, 0.85, 0.84, 0.83], "do not deploy it, .*hardly more"),
        ([0.8] * 4, "do not deploy it, .* 80.0% .*nothing beyond"),
        ([0.95, 0.96, 0.95, 0.94], "deploy it if an accuracy of"),
        ([0.85, 0.99, 0.99, 0.99], "test it on labeled images of each new site first"),
    ],
)
def test_a_network_is_compared_with_the_most_frequent_class(accuracies: list[float], advice: str) -> None:
    site = new_site(empty_sites(accuracies))
    assert re.match(f"ERM, vit: {advice}", recommendation(site))
    assert site.zero == pytest.approx(0.835)
    assert "(empty) gives 83.5% on the same domains" in "".join(sentences(site))
    (texts,) = site_tables(site).values()
    assert set(texts["most frequent class"]) == {"83.5"}


@pytest.mark.parametrize(
    ("metric", "zero"),
    [("accuracy", 0.835), ("balanced_accuracy", 1 / 3), ("f1_macro", 2 * 0.835 / (1 + 0.835) / 3)],
)
def test_the_zero_is_that_of_the_metric(metric: str, zero: float) -> None:
    """It equals scikit-learn's score of one answer, on 200 images of which 167 are of that class."""
    names = (metric, f"out_{metric}", f"whole_{metric}")
    runs = [
        replace(run, records=[replace(record, metrics=dict.fromkeys(names, record.in_acc)) for record in run.records])
        for run in empty_sites([0.95, 0.96, 0.95, 0.94], metric=metric)
    ]
    site = new_site(runs)
    assert site.zero == pytest.approx(zero)
    target, answer = np.repeat([0, 1, 2], [167, 20, 13]), np.zeros(200, int)
    scores = {"accuracy": accuracy_score, "balanced_accuracy": balanced_accuracy_score}
    expected = scores.get(metric, partial(f1_score, average="macro"))(target, answer)
    assert site.zero == pytest.approx(expected)
    assert site.metric in recommendation(site)
    other = "f1_macro" if metric == "accuracy" else "accuracy"
    with pytest.raises(RecordError, match="metric="):
        new_site([*runs, *empty_sites([0.5] * 4, metric=other)])


def test_accuracies_stand_beside_balanced_ones_and_a_class_of_all_answers_is_named() -> None:
    names = ("balanced_accuracy", "out_balanced_accuracy", "whole_balanced_accuracy")
    scores = {**dict.fromkeys(names, (0.2,) * 4), "same_answer": (1.0,) * 4}
    runs = [
        replace(run, records=[replace(record, metrics=scores) for record in run.records])
        for run in empty_sites([0.61] * 4, empty=0.61)
    ]
    text = " ".join(sentences(new_site(runs)))
    assert "Balanced accuracy, the mean over classes: 20.0%." in text
    assert "One class takes all answers" in text


def test_runs_that_lack_numbers_of_classes_have_the_zero_of_accuracies() -> None:
    runs = empty_sites([0.95] * 4)
    for run in runs:
        for record in run.records:
            record.args.pop("classes_present", None)
    assert new_site(runs).zero == pytest.approx(0.835)


def whole(record: Record) -> dict[str, object]:
    return {**record.args, "reported_split": "whole"}


def test_a_whole_domain_is_that_of_the_records_or_asked_for() -> None:
    runs = [
        replace(run, records=[replace(record, in_acc=(0.9,) * 4, out_acc=(0.4,) * 4) for record in run.records])
        for run in empty_sites([0.9] * 4, empty=0.5)
    ]
    assert [new_site(runs, split).best["mean"] for split in (None, "in")] == [0.9, 0.9]
    assert new_site(runs, "whole").best["mean"] == pytest.approx(0.8)
    own = [replace(run, records=[replace(record, args=whole(record)) for record in run.records]) for run in runs]
    assert new_site(own).best["mean"] == pytest.approx(0.8)
    with pytest.raises(RecordError, match="reported_split="):
        new_site([*own, *empty_sites([0.5] * 4)])


def named(accuracies: Accuracies) -> list[FinishedRun]:
    """Runs of a comparison, whose rows have names."""
    return [each for name, by_domain in accuracies.items() for each in sweep({name: by_domain}, row=name)]


def test_the_row_is_that_of_the_comparison() -> None:
    level = [[0.5, 0.52, 0.5], [0.6, 0.58, 0.6], [0.7, 0.72, 0.7], [0.8, 0.78, 0.8]]
    near = [[share + sign * 0.01 for share, sign in zip(shares, (2, -1, 1), strict=True)] for shares in level]
    # Without a reference of this name, the highest mean is it
    assert new_site(sweep({"a": level, "b": near})).row == "ERM, b"
    site = new_site(named({"dense": level, "gmoe": near}))
    assert (site.row, list(site.answer.pairs.verdict)) == ("dense", ["equal in practice"])
    higher = [[share + 0.1 + 0.001 * seed for seed, share in enumerate(shares)] for shares in level]
    assert new_site(named({"dense": level, "gmoe": higher})).row == "gmoe"
    lacking = [run for run in named({"gmoe": higher}) if run.test_domains != (1,)]
    assert new_site([*named({"dense": level}), *lacking]).row == "dense"
    assert new_site([*sweep({"a": level}), *sweep({"b": higher})[3:]]).row == "ERM, a"


def test_a_missing_run_changes_neither_the_network_nor_the_advice() -> None:
    """One of five single domains, or a domain of the only trained row, is not finished."""
    singles = [run([d], 0.8) for d in range(4)]
    pairs = [run([a, b], 0.5) for a in range(5) for b in range(a)]
    assert new_site([*singles, *pairs]).best["mean"] == pytest.approx(0.8)
    zeros = sweep({"none": [[0.2]] * 5}, row="most_frequent")
    dense = [each for each in named({"dense": [[0.8]] * 5}) if each.test_domains != (4,)]
    assert recommendation(new_site([*zeros, *dense])).startswith("dense: deploy it if an accuracy of 80.0%")
    both = [*named({"dense": [[0.8]] * 5}), *named({"gmoe": [[0.8]] * 5})][:-1]
    assert "Left out, because runs of held-out domains are missing: gmoe (domain 4)." in sentences(new_site(both))
    with pytest.raises(RecordError, match="none was trained"):
        new_site(zeros)
    uneven = new_site(named({"dense": [[0.8] * 3, [0.8], [0.8], [0.8]]}))
    assert "with 1 to 3 trial seeds." in " ".join(sentences(uneven))


def test_the_most_frequent_class_is_that_of_each_run() -> None:
    runs = [*empty_sites([0.9] * 4)[:1], *empty_sites([0.9] * 4, most_frequent_class="fox")[1:]]
    assert "(empty or fox) gives 83.5%" in new_site(runs).zero_in_words
    unnamed = new_site(empty_sites([0.9] * 4, most_frequent_class=None)).zero_in_words
    assert unnamed == "the most frequent class of the training images gives 83.5%"


def test_rows_of_fewer_images_serve_the_trend_alone() -> None:
    rows = {"dense": [0.7, 0.71, 0.72, 0.7], "gmoe": [0.5, 0.5, 0.5, 0.5]}
    runs = [
        run(
            [d],
            x + gain,
            number=4,
            model=row,
            row=row,
            holdout_fraction=part,
            split_sizes=[[round(99 * (1 - part)), 9]] * 4,
        )
        for row, by_domain in rows.items()
        for part, gain in ((0.6, 0.0), (0.2, 0.1))
        for d, x in enumerate(by_domain)
    ]
    site = new_site(runs)
    assert (site.row, list(site.answer.rows.index), list(site.answer.pairs.second)) == (
        "dense",
        ["dense", "gmoe"],
        ["dense"],
    )
    assert site.by_training_images.index.tolist() == [120, 237]
    begun = [each for each in runs if each.args["holdout_fraction"] == 0.6 or each.test_domains == (0,)]
    assert new_site(begun).best["mean"] == pytest.approx(np.mean(rows["dense"]))  # the finished sweep


def test_more_domains_and_more_images() -> None:
    singles = [run([d], 0.6 + 0.01 * d, split_sizes=[[80, 20]] * 5) for d in range(5)]
    pairs = [run([a, b], 0.5, split_sizes=[[80, 20]] * 5) for a in range(5) for b in range(a)]
    halved = [run([d], 0.57, holdout_fraction=0.6, split_sizes=[[40, 60]] * 5) for d in range(5)]
    site = new_site([*singles, *pairs, *halved])
    assert site.by_training_domains.mean(axis="columns").to_dict() == pytest.approx({3: 0.5, 4: 0.62})
    assert site.by_training_images.mean(axis="columns").to_dict() == pytest.approx({160: 0.57, 320: 0.62})
    domains, images = (line for line in sentences(site) if line.startswith("Effect"))
    assert domains.endswith(": 50.0% with 3, 62.0% with 4. Last step: +12.0 points, p = 0.062 over 5 domains.")
    assert "57.0% with 160, 62.0% with 320. Last step: +5.0 points" in images
    unknown = "".join(sentences(new_site(singles)))
    assert "--protocols leave_one_domain_out_cv" in unknown
    assert "-- --holdout-fraction 0.6" in unknown


def test_held_out_regions_are_domains_and_groups_that_were_trained_on_are_none() -> None:
    ood = {"Africa": (0.2, 0.3), "Asia": (0.5, 0.5), "Europe": (0.8, 0.7)}
    runs = [held_out_run(name, ood[name][seed], {"Asia": 0.9}, seed) for name in ood for seed in range(2)]
    site = new_site(runs)
    assert site.domains.accuracy.to_dict() == pytest.approx({"Africa": 0.25, "Asia": 0.5, "Europe": 0.75})
    (record,) = held_out_run("Africa", 0.1, {"Asia": 0.5}, 0).records
    later = {**record.roles["ood"], "group_accuracy": {"Asia": 0.5, "Europe": 0.4, "Other": 0.3}}
    with pytest.raises(RecordError, match="held-out domains=none that a run was not trained on"):
        new_site([FinishedRun(Path("fmow"), [replace(record, roles={"ood": later})])])


OTHER_COLUMNS = [run([d], 0.5, data="by year", metadata_columns=["year"]) for d in range(2)]
REFUSED = [
    ("held-out domains='domain 1'", [run([1], 0.5), run([1], 0.6, trial_seed=1)]),
    ("held-out domains=none", [run([], 0.5)]),
    ("held-out domains=", [run([0], 0.5), OTHER_COLUMNS[1]]),
    *(
        (name, [run([0], 0.5), run([1], 0.5, **{name: value})])
        for name, value in (("dataset", "other"), ("num_classes", 7), ("domains", list("abcde")), ("data", "else"))
    ),
]


@pytest.mark.parametrize(("argument", "runs"), REFUSED, ids=str)
def test_one_domain_and_other_data_are_refused(argument: str, runs: list[FinishedRun]) -> None:
    with pytest.raises(RecordError, match=rf"^{argument}"):
        new_site(runs)
    assert len(new_site([run([0], 0.5), run([1], 0.5), *OTHER_COLUMNS]).answer.pairs) == 1
