"""Tables of invented runs: rows, cells, means and errors by hand, and missing runs."""

from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest

from tests.invented import invented_records, write_sweep
from tests.results.cells import cells_of, held_out_run, run_of, table_of
from tests.results.test_runs import AFRICA, ALL, ASIA, regional
from timm_moe_dg.metrics import CLASS_SCORES
from timm_moe_dg.protocols.planner import single_source
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import training_domain_validation
from timm_moe_dg.results.runs import FinishedRun, RowKey, find_runs
from timm_moe_dg.results.tables import OPTIONAL_COLUMNS, average, is_tabled, make_tables

ROW = RowKey("ERM", "vit")


def test_missing_runs_are_named_with_domains_and_seeds(tmp_path):
    write_sweep(tmp_path, skip=[((2,), 1, 0), ((2,), 1, 1), ((0, 1), 0, 1)], dataset="toy")
    runs, _ = find_runs([tmp_path])
    validation, cross_validation = make_tables(runs, ["training_domain_validation", "leave_one_domain_out_cv"])
    assert validation.missing == [
        "ERM, vit: test domains [2], trial seeds [1], hparams seed 0",
        "ERM, vit: test domains [2], trial seeds [1], hparams seed 1",
    ]
    assert cross_validation.missing[-1] == "ERM, vit: test domains [0, 1], trial seeds [0], hparams seed 1"
    assert sorted(cells_of(validation)[ROW][2].values) == [0, 2]


def test_only_domains_that_some_run_holds_out_were_planned():
    runs = [run_of((0,), folder="a"), run_of((0,), trial_seed=1, folder="b"), run_of((2,), folder="c")]
    runs += [run_of((0, 2), trial_seed=seed, folder=f"d{seed}") for seed in (0, 1)]
    missing = [phrase for table in make_tables(runs) for phrase in table.missing]
    assert missing == ["ERM, vit: test domains [2], trial seeds [1], hparams seed 0"] * 3
    assert [table.trained_on for table in make_tables(runs, ["single_source"])] == ["domain 1"]


def test_seeds_and_rows_of_another_protocol_are_not_missing():
    held_out = [run_of((domain,), trial_seed=seed) for domain in range(3) for seed in (0, 1)]
    sources = [run_of(domains, algorithm="CORAL", trial_seed=2) for domains in single_source(3)]
    tables = make_tables([*held_out, *sources], ["training_domain_validation", "single_source"])
    assert [[row.algorithm for row in table.rows] for table in tables] == [["ERM"], *[["CORAL"]] * 3]
    assert [set(table.expected) for table in tables] == [{2}, {1}, {1}, {1}]
    assert not any(table.missing for table in tables)


def test_runs_that_no_table_counts():
    runs = [run_of([0]), run_of([1]), run_of([2])]
    final = run_of([], folder="final", model="other")  # trained on all domains
    pairs = zip(make_tables([*runs, final]), make_tables(runs), strict=True)
    assert all(first.scores.equals(second.scores) for first, second in pairs)
    assert make_tables([final]) == []
    five = {"in_acc": (0.5,) * 5, "out_acc": (0.5,) * 5}
    one, two, three = (run_of(range(number), **five) for number in (1, 2, 3))
    assert [is_tabled(run, make_tables([one, two, three])) for run in (one, two, three)] == [True, True, False]
    assert not is_tabled(two, make_tables([two]))  # a pair alone is no cross-validation


def test_single_source_reports_out_splits():
    runs = [
        FinishedRun(Path(f"{held_out}{seed}"), invented_records(held_out, num_domains=4, trial_seed=seed))
        for seed in range(2)
        for held_out in single_source(4)
    ]
    tables = make_tables(runs)
    assert [table.rule for table in tables] == ["single_source"] * 4
    for source, table in enumerate(tables):
        others = [domain for domain in range(4) if domain != source]
        assert table.columns == [f"domain {source} (IID)", *(f"domain {domain}" for domain in others), "average OOD"]
        for seed in range(2):
            (run,) = [run for run in runs if run.folder == Path(f"{tuple(others)}{seed}")]
            chosen = max(run.records, key=lambda record: record.out_acc[source])
            assert chosen is training_domain_validation(run.records)
            row = [cell.values[seed] for cell in cells_of(table)[ROW]]
            expected = [chosen.out_acc[domain] for domain in (source, *others)]
            assert row == [*expected, pytest.approx(np.mean(expected[1:]))]


def test_averages_of_several_data_sets(tmp_path):
    write_sweep(tmp_path, dataset="one")
    write_sweep(tmp_path, dataset="two", num_domains=4)
    first, second, averages = make_tables(find_runs([tmp_path])[0], ["oracle"])
    cells, parts = cells_of(averages)[ROW], [cells_of(table)[ROW][-1] for table in (first, second)]
    assert averages.columns == ["one", "two", "average"]
    assert cells[0] == parts[0]
    assert cells[2].mean == pytest.approx((parts[0].mean + parts[1].mean) / 2)


def measured(dataset, metric="accuracy", split="in", *tests):
    """A run with another score on each split, on two data sets of three domains."""
    scores = {"f1_macro": [0.1] * 3, "out_f1_macro": [0.2] * 3, "whole_f1_macro": [0.3] * 3}
    options = {"dataset": dataset, "metric": metric, "reported_split": split, "split_sizes": [[8, 2]] * 3}
    (record,) = invented_records(list(tests), at=(0,), **options)
    record = replace(record, in_acc=(0.5,) * 3, out_acc=(1.0,) * 3, metrics=scores)
    return FinishedRun(Path(f"{options}{tests}"), [record])


def test_metrics_and_reported_parts_have_tables_and_averages_of_their_own():
    kinds = [("accuracy", "in"), ("accuracy", "whole"), ("f1_macro", "whole")]
    runs = [measured(name, *kind, test) for name in ("a", "b") for kind in kinds[1:] for test in range(3)]
    runs += [measured("a", *kinds[0], test) for test in range(3)]
    tables = {table.title: cells_of(table)[ROW][-1].mean for table in make_tables(runs, ["training_domain_validation"])}
    assert tables == {
        "a, selection by training-domain validation": 0.5,
        "a, whole domains, selection by training-domain validation": pytest.approx(0.6),
        "b, whole domains, selection by training-domain validation": pytest.approx(0.6),
        "a, F1-macro, whole domains, selection by training-domain validation": pytest.approx(0.3),
        "b, F1-macro, whole domains, selection by training-domain validation": pytest.approx(0.3),
        "averages of the domains, whole domains, selection by training-domain validation": pytest.approx(0.6),
        "averages of the domains, F1-macro, whole domains, selection by training-domain validation": pytest.approx(0.3),
    }
    # Columns of class scores are of the part that the title names
    for dataset_split, split, rule, expected in (
        ("in", None, "training_domain_validation", 0.1),
        ("in", "whole", "training_domain_validation", 0.3),
        ("whole", None, "oracle", 0.1),
        ("in", None, "single_source", 0.2),
        ("whole", None, "single_source", 0.3),
    ):
        tests = [[1, 2], [0, 2], [0, 1]] if rule == "single_source" else [[0], [1], [2]]
        runs = [measured("a", "accuracy", dataset_split, *test) for test in tests]
        for table in make_tables(runs, [rule], split, [OPTIONAL_COLUMNS["f1_macro"]]):
            assert cells_of(table)[ROW][-1].mean == pytest.approx(expected)
            assert ("whole domains" in table.title) == (expected == 0.3)
            assert ("scores on out-splits" in table.title) == (expected == 0.2)
    # The oracle selects on the out-split, so it reports the in-split
    own = make_tables([measured(name, "accuracy", "whole", test) for name in "ab" for test in range(3)], ["oracle"])
    assert [cells_of(table)[ROW][-1].mean for table in own] == [0.5] * 3  # two data sets, and their averages
    assert not any("whole" in table.title for table in own)


def official_run(seed, *validation, **options):
    """A run with an evaluation for each (worst group, F1) on the ood validation split; its ood accuracy is the step."""
    base = run_of((1, 2), (0.5, nan, nan), (0.5, nan, nan), trial_seed=seed, **options)
    records = []
    for step, scores in enumerate(validation):
        roles = {"ood": {"accuracy": step / 8, "worst_accuracy": step / 16, "f1_macro": nan}}
        roles |= {"ood_val": {"worst_accuracy": scores[0], "f1_macro": scores[1]}} if scores else {}
        records.append(replace(base.records[0], step=step, roles=roles))
    return FinishedRun(Path(f"{seed}"), records)


def test_tables_by_validation_under_shift():
    runs = [official_run(0, (0.1, 0.9), (0.5, 0.2), (0.3, 0.3)), official_run(1, (0.5, 0.1), (0.2, 0.3), (0.3, 0.8))]
    runs.append(official_run(2, None))
    official, worst, f1 = make_tables(runs, ["official", "ood_worst_group", "ood_f1_macro"])
    assert worst.columns == ["ood accuracy", "ood worst group", "ood F1-macro"]  # validation is no result
    assert cells_of(official)[ROW][0].values == {0: 0.0, 1: 0.0, 2: 0.0}  # all are validated alike: the first step
    assert [cell.values for cell in cells_of(worst)[ROW][:2]] == [{0: 1 / 8, 1: 0.0}, {0: 1 / 16, 1: 0.0}]
    assert cells_of(f1)[ROW][0].values == {0: 0.0, 1: 2 / 8}
    assert isnan(cells_of(f1)[ROW][2].mean)
    assert worst.title == "toy, its own test domains, selection by the worst group of the ood validation split"
    assert worst.missing == ["ERM, vit: trial seeds [2], or their scores on the ood validation split"]
    assert make_tables(runs[2:], ["ood_f1_macro"]) == []


def test_a_table_selected_on_held_out_groups_is_labeled_oracle():
    facts = [["train", "Europe", "official"], *[["ood", "Asia", "official"]] * 2]
    runs = [official_run(0, (0.1, 0.9), domain_facts=facts, split_sizes=[[5, 5], [5, 5], [5, 0]])]
    titles = {table.rule: table.title for table in make_tables(runs)}
    assert "oracle" not in titles["official"]
    assert titles["ood_f1_macro"].endswith("validation split (oracle: the split has held-out groups of the test)")
    assert "oracle" in titles["ood_worst_group"]


def test_models_per_region_stand_apart_from_models_of_all_regions():
    runs = [regional(ALL, (0.5, 0.75, 0.5), seed=seed) for seed in range(2)]
    runs += [
        regional(AFRICA, (0.5, 0.5, 0.0)),
        regional(ASIA, (0.5, 0.0, 0.25)),
        regional(AFRICA, (0.5, 0.5, 0.0), seed=1),
    ]
    runs += [regional(ALL, (0.5, 0.75, 0.5), model="whole")]
    official, per_region = make_tables(runs, by_group=True)
    assert (official.rule, per_region.rule) == ("official", "per_region")
    assert official.columns == ["id accuracy", "id worst group", "id F1-macro", "id Africa", "id Asia"]
    assert [cell.mean for cell in cells_of(official)[ROW][-2:]] == [0.75, 0.5]
    assert per_region.columns == ["id accuracy", "id worst group", "id Africa", "id Asia"]
    assert cells_of(per_region)[ROW][0].values == {0: 0.4375}
    assert per_region.missing == ["ERM, vit: trial seeds [1], or a region's model"]
    assert list(official.runs) == list(official.rows) == [ROW, RowKey("ERM", "whole")]
    assert list(per_region.runs) == list(per_region.rows) == [ROW]


def test_regions_held_out_in_turn_share_a_table_of_means_over_them():
    runs = [held_out_run("Africa", 0.2 + seed / 10, {"Asia": 0.8, "Europe": 0.6}, seed) for seed in (0, 1)]
    runs += [held_out_run("Asia", 0.5, {"Africa": 0.4, "Europe": 1.0}, seed) for seed in (0, 1)]
    (table,) = make_tables(runs, by_group=True)
    assert table.title.endswith("held out in turn: Africa; Asia")
    means = dict(zip(table.columns, [cell.mean for cell in cells_of(table)[ROW]], strict=True))
    assert means["id accuracy"] == pytest.approx((0.7 + 0.7) / 2)
    assert means["ood accuracy"] == pytest.approx(((0.2 + 0.5) / 2 + (0.3 + 0.5) / 2) / 2)
    # A region counts in the runs that it has this role in
    assert [means[name] for name in ("ood Africa", "id Africa", "id Europe")] == pytest.approx([0.25, 0.4, 0.8])
    assert not table.missing
    (partial,) = make_tables(runs[:-1], by_group=True)
    assert partial.missing == [f"{ROW}: held out Asia, trial seeds [1]"]
    assert list(cells_of(partial)[ROW][0].values) == [0]


def test_mean_and_standard_error_over_trial_seeds():
    table = table_of({ROW: [{0: 0.5, 1: 0.6, 2: 0.85}, {2: 0.5}, {}, {0: nan, 1: 0.5}]}, list("abcd"), expected=3)
    mean, single, missing, without = cells_of(table)[ROW]
    assert mean.mean == pytest.approx(0.65)
    assert mean.error == pytest.approx(np.std([0.5, 0.6, 0.85]) / np.sqrt(3))
    assert all(map(isnan, (single.error, missing.mean, without.mean)))


def test_the_average_is_taken_within_a_seed():
    """Domains that vary against each other have an average that does not vary."""
    shares = table_of({ROW: [{0: 0.2, 1: 0.8, 2: 0.1, 3: nan}, {0: 0.8, 1: 0.2, 3: 0.5}]}, list("ab")).scores
    averages = average(shares, 2).droplevel("row")
    assert averages[[0, 1]].to_dict() == {0: 0.5, 1: 0.5}
    assert isnan(averages[3])
    assert 2 not in averages


def test_scores_on_held_out_domains_are_columns():
    metrics = {name: [0.1, 0.2, 0.3] for name in CLASS_SCORES}
    record = Record.from_json(replace(run_of((0,)).records[0], metrics=metrics).to_json())
    assert record.metrics == metrics
    for name in CLASS_SCORES:
        assert OPTIONAL_COLUMNS[name].value(record) == pytest.approx(0.1)
    assert isnan(OPTIONAL_COLUMNS["auc"].value(run_of((0,)).records[0]))  # of older runs
