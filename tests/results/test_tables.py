"""Tables of invented runs: rows, cells, means and errors by hand, missing runs, and the three formats."""

import json
import re
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest

from tests.invented import invented_records, write_run, write_sweep
from tests.results.cells import cells_of, table_of
from timm_moe_dg.errors import ArgumentError, RecordError
from timm_moe_dg.metrics import CLASS_SCORES
from timm_moe_dg.protocols.planner import single_source
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.selection import training_domain_validation, whole_accuracy
from timm_moe_dg.results.comparison import cell_text, cell_texts, compare, paired_tests, render, with_improvements
from timm_moe_dg.results.runs import FinishedRun, RowKey, domain_names, find_runs
from timm_moe_dg.results.tables import OPTIONAL_COLUMNS, average, make_tables, why_no_table

ROW = RowKey("ERM", "vit")


def run_of(test, in_acc=(0.5, 0.5, 0.5), out_acc=(0.5, 0.5, 0.5), folder="run", **options) -> FinishedRun:
    (record,) = invented_records(test, at=(0,), num_domains=len(in_acc), **options)
    return FinishedRun(folder, [replace(record, in_acc=in_acc, out_acc=out_acc)])


def test_what_is_reported_can_be_the_whole_domain():
    runs = [run_of((0,), in_acc=(0.5, 1, 1), out_acc=(1.0, 0, 0))]
    (table,) = make_tables(runs, ["oracle"], whole_accuracy)
    assert cells_of(table)[ROW][0].values == {0: pytest.approx(0.8 * 0.5 + 0.2 * 1.0)}


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
    assert "(2 of 3 seeds)" in render(validation, "text")
    assert "Missing runs:" in render(validation, "markdown")


def test_only_domains_that_some_run_holds_out_were_planned():
    runs = [run_of((0,), folder="a"), run_of((0,), trial_seed=1, folder="b"), run_of((2,), folder="c")]
    runs += [run_of((0, 2), trial_seed=seed, folder=f"d{seed}") for seed in (0, 1)]
    missing = {table.title: table.missing for table in make_tables(runs)}
    assert [phrase for phrases in missing.values() for phrase in phrases] == [
        "ERM, vit: test domains [2], trial seeds [1], hparams seed 0"
    ] * 3
    assert [table.trained_on for table in make_tables(runs, ["single_source"])] == ["domain 1"]


def test_runs_without_test_domains_are_in_no_table():
    runs = [run_of([0]), run_of([1]), run_of([2])]
    final = run_of([], folder="final", model="other")
    pairs = zip(make_tables([*runs, final]), make_tables(runs), strict=True)
    assert all(first.scores.equals(second.scores) for first, second in pairs)
    assert make_tables([final]) == []


def test_single_source_reports_out_splits():
    runs = []
    for seed in range(2):
        for held_out in single_source(4):
            records = invented_records(held_out, num_domains=4, trial_seed=seed)
            runs.append(FinishedRun(f"{held_out}{seed}", records))
    tables = make_tables(runs)
    assert [table.rule for table in tables] == ["single_source"] * 4
    for source, table in enumerate(tables):
        others = [domain for domain in range(4) if domain != source]
        assert table.columns == [f"domain {source} (IID)", *(f"domain {domain}" for domain in others), "average OOD"]
        for seed in range(2):
            (run,) = [run for run in runs if run.folder == f"{tuple(others)}{seed}"]
            chosen = max(run.records, key=lambda record: record.out_acc[source])
            assert chosen is training_domain_validation(run.records)
            row = [cell.values[seed] for cell in cells_of(table)[ROW]]
            expected = [chosen.out_acc[domain] for domain in (source, *others)]
            assert row == [*expected, pytest.approx(np.mean([chosen.out_acc[domain] for domain in others]))]


def test_averages_of_several_data_sets(tmp_path):
    write_sweep(tmp_path, dataset="one")
    write_sweep(tmp_path, dataset="two", num_domains=4)
    first, second, averages = make_tables(find_runs([tmp_path])[0], ["oracle"])
    cells = cells_of(averages)[ROW]
    assert averages.columns == ["one", "two", "average"]
    assert cells[0] == cells_of(first)[ROW][-1]
    assert cells[2].mean == pytest.approx((cells_of(first)[ROW][-1].mean + cells_of(second)[ROW][-1].mean) / 2)


def test_data_with_its_own_test_domains_have_a_table_of_their_scores():
    def scored(seed, accuracy):
        scores = {"accuracy": accuracy, "worst_accuracy": accuracy / 2, "f1_macro": nan}
        run = run_of((1, 2), (0.5, nan, nan), (0.5, nan, nan), trial_seed=seed)
        return FinishedRun(run.folder, [replace(run.records[0], roles={"ood": scores, "id": scores})])

    (table,) = make_tables([scored(0, 0.5), scored(1, 0.75)])
    assert table.columns[:2] == ["id accuracy", "id worst group"]
    assert cells_of(table)[ROW][3].values == {0: 0.5, 1: 0.75}
    assert cells_of(table)[ROW][4].mean == pytest.approx(0.3125)
    assert render(table, "text").splitlines()[-1].split().count("-") == 2
    assert "nan" not in render(table, "text")


def scored_run(seed, *validation, **options):
    """A run with an evaluation for each (worst group, F1) on the ood validation split; its ood accuracy is the step."""
    base = run_of((1, 2), (0.5, nan, nan), (0.5, nan, nan), trial_seed=seed, **options)
    records = []
    for step, scores in enumerate(validation):
        test = {"accuracy": step / 8, "worst_accuracy": 0.0, "f1_macro": 0.0}
        roles = {"ood": test} | ({"ood_val": {"worst_accuracy": scores[0], "f1_macro": scores[1]}} if scores else {})
        records.append(replace(base.records[0], step=step, roles=roles))
    return FinishedRun(f"{seed}", records)


def test_tables_by_validation_under_shift():
    runs = [scored_run(0, (0.1, 0.9), (0.5, 0.2), (0.3, 0.3)), scored_run(1, (0.5, 0.1), (0.2, 0.3), (0.3, 0.8))]
    runs.append(scored_run(2, None))
    worst, f1 = make_tables(runs, ["ood_worst_group", "ood_f1_macro"])
    assert worst.columns == ["ood accuracy", "ood worst group", "ood F1-macro"]  # validation is no result
    assert cells_of(worst)[ROW][0].values == {0: 1 / 8, 1: 0.0}
    assert cells_of(f1)[ROW][0].values == {0: 0.0, 1: 2 / 8}
    assert worst.title == "toy, its own test domains, selection by the worst group of the ood validation split"
    assert worst.missing == ["ERM, vit: trial seeds [2], or their scores on the ood validation split"]
    assert make_tables(runs[2:], ["ood_f1_macro"]) == []
    assert "1 of 1 evaluations lack f1_macro" in why_no_table("ood_f1_macro", runs[2:])


def test_a_table_selected_on_held_out_groups_is_labeled_oracle():
    facts = [["train", "Europe", "official"], *[["ood", "Asia", "official"]] * 2]
    args = {"domain_facts": facts, "split_sizes": [[5, 5], [5, 5], [5, 0]]}
    runs = [scored_run(0, (0.1, 0.9), **args)]
    titles = {table.rule: table.title for table in make_tables(runs)}
    assert "oracle" not in titles["official"]
    assert titles["ood_f1_macro"].endswith("validation split (oracle: the split has held-out groups of the test)")
    assert "oracle" in titles["ood_worst_group"]


def test_mean_and_standard_error_over_trial_seeds():
    shares = [{0: 0.5, 1: 0.6, 2: 0.85}, {2: 0.5}, {}, {0: nan, 1: 0.5}]
    table = table_of({ROW: shares}, list("abcd"), expected=3)
    mean, single, missing, without = cells_of(table)[ROW]
    assert mean.mean == pytest.approx(0.65)
    assert mean.error == pytest.approx(np.std([0.5, 0.6, 0.85]) / np.sqrt(3))
    assert isnan(single.error)
    assert isnan(missing.mean)
    assert isnan(without.mean)
    assert cell_texts(table).loc[ROW].tolist() == ["65.0 ± 8.5", "50.0 (1 of 3 seeds)", "missing", "-"]
    assert cell_text(0.5, nan, 1, 1) == "50.0"


def test_the_average_is_taken_within_a_seed():
    """Domains that vary against each other have an average that does not vary."""
    shares = table_of({ROW: [{0: 0.2, 1: 0.8, 2: 0.1, 3: nan}, {0: 0.8, 1: 0.2, 3: 0.5}]}, list("ab")).scores
    averages = average(shares, 2).droplevel("row")
    assert averages[[0, 1]].to_dict() == {0: 0.5, 1: 0.5}
    assert isnan(averages[3])
    assert 2 not in averages


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        ("text", ["algorithm model domain 0", "\n- - - - - -\n", "ERM vit 50.0 missing 50.0 missing"]),
        ("markdown", ["| ERM | vit | 50.0 | missing | 50.0 | missing |", "|-|-|-|-|-|-|"]),
        ("latex", [r"ERM & vit & 50.0 & missing & 50.0 & missing \\", r"\begin{tabular}{llcccc}", r"50\% \& more\_so"]),
    ],
)
def test_formats(format_, expected):
    (table,) = make_tables([run_of((0,)), run_of((2,))], ["oracle"])
    text = render(replace(table, title="50% & more_so"), format_)
    for line in expected:
        assert line in re.sub("-+", "-", re.sub(" +", " ", text))


def test_text_columns_are_aligned_and_numbers_are_printed_as_they_are():
    runs = [run_of((0,), (accuracy, 0.5, 0.5), model=model) for model, accuracy in (("a", 1.0), ("model 1e5", 0.095))]
    (table,) = make_tables(runs, ["oracle"])
    header, rule, first, second = render(table, "text").splitlines()[2:6]
    start = header.index("domain 0")
    assert rule[start - 2 : start + 2] == "  --"
    assert (first[start:].split()[0], second[start:].split()[0]) == ("100.0", "9.5")


def test_names_are_text_in_every_format():
    name = "a|b <img src=x> \\input{x} \x1b[31m\nc"
    (table,) = make_tables([run_of((0,), model=name)], ["oracle"])
    text, markdown, latex = (render(table, format_) for format_ in ("text", "markdown", "latex"))
    assert "a|b <img src=x> \\input{x} \\x1b[31m\\nc" in text
    assert "a&#124;b &#60;img src=x&#62;" in markdown
    assert "<" not in markdown
    assert r"\textbackslash{}input\{x\}" in latex
    assert r"\input" not in "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert "\x1b" not in text + markdown + latex


@pytest.mark.parametrize(("second", "names"), [("ab", "ab"), ("xy", ["domain 0", "domain 1"])])
def test_domains_of_a_folder_have_the_names_that_its_runs_agree_on(second, names):
    runs = [run_of([0], (0.5, 0.5), (0.5, 0.5), domains=list("ab"))]
    runs.append(run_of([1], (0.5, 0.5), (0.5, 0.5), domains=list(second)))
    (table, *_) = make_tables(runs, ["training_domain_validation"])
    assert table.columns == [*names, "average"]
    assert domain_names(invented_records([0], dataset="colored_digits")) == ["+90%", "+80%", "-90%"]


def test_settings_make_rows_of_their_own():
    common = {"steps": 5001, "model_kwargs": {"depth": 4}, "output": "a", "seed": 7}
    runs = [
        run_of((0,), **common),
        run_of((1,), **{**common, "output": "b", "seed": 8}),
        run_of((0,), **{**common, "steps": 15_001}),
        run_of((0,), **{**common, "model_kwargs": {"depth": 4, "router": "linear"}}),
        run_of((0,), **common, averaging="swad"),
        run_of((0,), **common, hparams={"penalty": 2}),
    ]
    (table,) = make_tables(runs, ["oracle"])
    assert sorted(map(str, table.rows)) == [
        "ERM + swad, vit",
        "ERM, vit, penalty=2, steps=5001",
        "ERM, vit, router=linear, steps=5001",
        "ERM, vit, steps=15001",
        "ERM, vit, steps=5001",
    ]
    assert [len(runs) for row, runs in table.runs.items() if row.variant == "steps=5001"] == [2]


def test_other_data_and_options_given_by_hand_make_rows_that_say_so():
    given = {"lr": 0.5, "batch_size": 8, "filled_in": ["batch_size"]}
    runs = [
        run_of((0,), data="ab12"),
        run_of((1,), data="cd34"),
        run_of((1,), data="ab12", **{**given, "filled_in": ["lr", "batch_size"]}),
        run_of((0,), data="ab12", **given, trial_seed=1),
        run_of((0,), data="ab12", weights_sha256="ef56", trial_seed=2),
    ]
    (table,) = make_tables(runs, ["oracle"])
    assert sorted(map(str, table.rows)) == [
        "ERM, vit, data=ab12",
        "ERM, vit, data=ab12, lr=0.5",
        "ERM, vit, data=ab12, weights_sha256=ef56",
        "ERM, vit, data=cd34",
    ]


def test_rows_of_two_networks_name_their_data_and_are_not_compared_if_these_differ():
    made = [("a", "ab12"), ("b", "ab12"), ("b", "cd34"), ("c", None)]
    runs = [run_of((domain,), model=model, data=data) for model, data in made for domain in range(3)]
    (table,) = make_tables(runs, ["oracle"])
    assert [str(row) for row in table.rows] == ["ERM, a, data=ab12", "ERM, b, data=ab12", "ERM, b, data=cd34", "ERM, c"]
    tested = [(test.first.model, test.second.variant) for test in paired_tests(table)]
    assert tested == [("a", "data=ab12"), ("a", ""), ("b", ""), ("b", "")]
    assert "cd34" not in compare([table], "a", "b", "text")
    with pytest.raises(ArgumentError, match=r"compare=\['a', 'data=cd34'\]: have different data; give rows"):
        compare([table], "a", "data=cd34", "text")
    improved = cells_of(with_improvements(table, "ERM, a, data=ab12"))
    assert [bool(cells[-1].values) for cells in improved.values()] == [True, True, False, True]
    columns = [run_of((0,), model=model, data=model, metadata_columns=[model]) for model in ("a", "b")]
    assert paired_tests(make_tables(columns, ["oracle"])[0])  # fingerprints with other columns cannot be compared


def test_the_same_run_twice_is_an_error_that_names_both(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, invented_records((0,)))
    with pytest.raises(RecordError, match=r"a'.*b'\]: are both toy, ERM, vit, test domains \[0\]"):
        make_tables(find_runs([tmp_path])[0])
    assert len(find_runs([tmp_path / "a", tmp_path / "a"])[0]) == 1


SPELLED = [
    ({"hparams": {"mixup_alpha": 1}}, {"hparams": {"mixup_alpha": 1.0}}),
    ({"hparams": '{"mixup_alpha": 1}'}, {"hparams": {"mixup_alpha": 1.0}}),  # DomainBed's form
    ({"model_kwargs": {"num_experts": 4}}, {"model_kwargs": {"num_experts": 4.0}}),
    ({"model_kwargs": {"moe_layers": [2, 3]}}, {"model_kwargs": {"moe_layers": (2, 3)}}),
    ({"model_kwargs": {"moe_layers": [8, 10]}}, {"model_kwargs": {"moe_layers": "last_two"}}),
    ({"class_balanced": True}, {"class_balanced": 1}),
    ({"momentum": 1}, {"momentum": 1.0}),
    ({"model_kwargs": {"num_experts": 6}}, {}),  # a default that is spelled out
    ({"lr": 5e-5, "filled_in": []}, {"lr": 5e-5, "filled_in": ["lr"]}),
    ({"num_classes": 7, "filled_in": []}, {"num_classes": 7, "filled_in": ["num_classes"]}),
    ({"label_smoothing": 0.0}, {}),
    ({"domains": ["a", "b", "c"]}, {"domains": ["A", "b", "c"]}),  # `data` tells other data
    ({"initial_checkpoint": "a.pt", "weights_sha256": "1"}, {"initial_checkpoint": "./b.pt", "weights_sha256": "1"}),
    ({"weights_sha256": "1"}, {"weights_sha256": "2"}),  # one start for each trial seed
    ({"epochs": 2.0, "steps": 37}, {"epochs": 2, "steps": 41}),
]


@pytest.mark.parametrize(("first", "second"), SPELLED, ids=map(str, SPELLED))
def test_settings_of_one_effect_are_one_row(first, second):
    model = {"model": "gmoe_small_patch16"}
    runs = [run_of((0,), trial_seed=seed, **model, **options) for seed, options in enumerate((first, second))]
    (table,) = make_tables(runs, ["oracle"])
    ((cell, *_),) = cells_of(table).values()
    assert len(cell.values) == 2


def test_a_sweep_of_epochs_has_an_average():
    """The smallest training domain differs between held-out domains, and so do the steps of an epoch."""
    runs = [run_of((domain,), epochs=2.0, steps=30 + domain) for domain in range(3)]
    runs += [run_of((domain,), epochs=3.0, steps=45 + domain) for domain in range(3)]
    (table,) = make_tables(runs, ["oracle"])
    assert [str(row) for row in table.rows] == ["ERM, vit, epochs=2.0", "ERM, vit, epochs=3.0"]
    assert [cells[-1].values for cells in cells_of(table).values()] == [{0: 0.5}] * 2


def test_a_rate_given_by_hand_is_a_row_beside_rates_that_are_drawn():
    common = {"lr": 5e-5, "model": "gmoe_small_patch16"}
    given = [run_of((0,), hparams_seed=draw, filled_in=[], **common) for draw in range(2)]
    drawn = [run_of((0,), hparams_seed=draw, filled_in=["lr"], **common) for draw in range(2)]
    (table,) = make_tables([*given, *drawn], ["oracle"])
    assert [row.variant for row in table.rows] == ["lr=5e-05", ""]


def test_runs_of_one_seed_from_other_weights_are_rows_of_their_own():
    runs = [run_of((0,), weights_sha256=digest, trial_seed=seed) for digest in "ab" for seed in range(2)]
    (table,) = make_tables(runs, ["oracle"])
    assert [row.variant for row in table.rows] == ["weights_sha256=a", "weights_sha256=b"]


def test_scores_on_held_out_domains_are_columns():
    metrics = {name: [0.1, 0.2, 0.3] for name in CLASS_SCORES}
    record = Record.from_json(replace(run_of((0,)).records[0], metrics=metrics).to_json())
    assert record.metrics == metrics
    for name in CLASS_SCORES:
        assert OPTIONAL_COLUMNS[name].value(record) == pytest.approx(0.1)
    assert isnan(OPTIONAL_COLUMNS["auc"].value(run_of((0,)).records[0]))  # of older runs
    for damaged in ({"auc": [0.1]}, {"auc": 0.1}, [1]):
        with pytest.raises(RecordError, match="metrics"):
            Record.from_json(json.dumps({**json.loads(record.to_json()), "metrics": damaged}))


def test_titles_with_characters_of_a_format_string_are_columns_in_latex():
    records = [replace(run.records[0], args={**run.args, "domains": ["a^b", "{0}", "~c"]}) for run in [run_of((0,))]]
    (table,) = make_tables([FinishedRun("run", records)], ["training_domain_validation"])
    assert r"algorithm & model & a\^{}b & \{0\} & \textasciitilde{}c & average \\" in render(table, "latex")
