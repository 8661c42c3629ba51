"""Facts about the runs of a sweep."""

from dataclasses import replace
from itertools import product

import pytest

from tests.invented import invented_records, write_run, write_sweep
from tests.results.cells import cells_of
from timm_moe_dg.report.pages import render
from timm_moe_dg.report.pictures import Missing
from timm_moe_dg.report.sweep_facts import read_sweep


def test_dots_lie_where_their_numbers_are_on_the_tables_scale(tmp_path):
    write_sweep(tmp_path, hparams_seeds=(0,))
    compared = read_sweep(tmp_path).compared[0]
    low, high = compared.scale
    (cells,) = cells_of(compared.table).values()
    (row,) = compared.rows.values()
    for cell, dots in zip(cells, row, strict=True):
        places = [low + (high - low) * place / 100 for place, _ in dots.dots]
        assert places == pytest.approx([100 * value for value in cell.values.values()])
        assert all(0 <= place <= 100 for place, _ in dots.dots)
        assert dots.dots[0][1] == f"seed 0: {100 * cell.values[0]:.1f}"


def test_tables_have_the_numbers_of_images_behind_their_accuracies(tmp_path):
    sizes = [[80, 20], [40, 10], [3, 1]]
    for domain in range(3):
        write_run(tmp_path / str(domain), invented_records([domain], split_sizes=sizes))
    for source in range(3):
        others = [domain for domain in range(3) if domain != source]
        write_run(tmp_path / f"single{source}", invented_records(others, split_sizes=sizes))
    compared = read_sweep(tmp_path).compared
    assert compared[0].images == {"domain 0": "80", "domain 1": "40", "domain 2": "3"}
    assert compared[-1].images == {"domain 0": "20", "domain 1": "10", "domain 2": "1"}
    scores = {"accuracy": 0.5, "worst_accuracy": 0.5, "worst_group": "a", "f1_macro": 0.5, "num_samples": {"a": 7}}
    for seed in range(2):
        roles = {"id": scores, "ood": {**scores, "num_samples": {"a": 8 + seed, "b": 1}}, "id_val": scores}
        (record,) = invented_records([1, 2], at=(0,), trial_seed=seed)
        write_run(tmp_path / "own" / str(seed), [replace(record, roles=roles)])
    assert read_sweep(tmp_path / "own").compared[0].images == {"id": "7", "ood": "9 or 10"}


def test_columns_that_no_run_has_are_named_apart(tmp_path):
    for domain in (0, 2):
        write_run(tmp_path / str(domain), invented_records([domain]))
    compared = read_sweep(tmp_path).compared[0]
    assert list(compared.columns) == ["domain 0", "domain 2"]
    assert list(compared.empty) == ["domain 1", "average"]
    assert [len(cells) for cells in compared.rows.values()] == [2]


def test_the_papers_figures_have_a_column_beside_a_recipe_s(tmp_path):
    recipe = {"dataset": "PACS", "model": "gmoe_small_patch16", "pretrained": True, "steps": 5001}
    write_sweep(tmp_path / "a", num_domains=4, hparams_seeds=(0,), **recipe)
    write_sweep(tmp_path / "b", num_domains=4, hparams_seeds=(0,), **{**recipe, "aux_form": "tutel"})
    compared = next(t for t in read_sweep(tmp_path).compared if t.table.rule == "training_domain_validation")
    assert list(compared.columns)[-2:] == ["average", "average (papers)"]
    stated = [cells[-1].text for cells in compared.rows.values()]
    assert sorted(stated) == ["", "88.1 ± 0.1 (GMoE, Table 1); 88.1 (GMoE, Table 15)"]
    assert all(len(cells) == len(compared.columns) for cells in compared.rows.values())
    facts = read_sweep(tmp_path)
    html = render("sweep.html", facts=facts, cautions=facts.cautions)
    assert html.count("<th>average (papers)</th>") == 2  # also by cross-validation
    assert html.count(f"<td>{max(stated)}</td>") == 1


def test_only_what_all_runs_have_is_given(tmp_path):
    for name, lr in (("a", 0.1), ("b", 0.2)):
        write_run(tmp_path / name, invented_records([0], lr=lr, steps=77))
    options = read_sweep(tmp_path).options
    assert options["steps"] == 77
    assert "lr" not in options


def test_without_a_finished_run_there_is_a_reason_in_place_of_tables(tmp_path):
    write_run(tmp_path / "half", invented_records([0]), finished=False)
    facts = read_sweep(tmp_path)
    assert isinstance(facts.compared, Missing)
    assert [run.name for run in facts.unfinished] == ["half"]
    assert facts.cautions == ["Unfinished runs: 1 of 1. The tables leave them out."]


def test_scores_of_a_data_sets_own_test_domains_are_tested_column_by_column(tmp_path):
    """Also in tables of rules other than training-domain validation, which have no column of averages."""
    scores = {"accuracy": 0.5, "worst_accuracy": 0.25, "f1_macro": 0.5}
    for model, seed in product(("a", "b"), range(2)):
        records = [
            replace(record, roles={"ood_val": scores, "ood": scores})
            for record in invented_records([1, 2], trial_seed=seed, model=model)
        ]
        write_run(tmp_path / model / str(seed), records)
    tables = {compared.table.rule: compared for compared in read_sweep(tmp_path).compared}
    assert tables.keys() == {"official", "ood_worst_group", "ood_f1_macro"}
    for compared in tables.values():
        assert [test.of for test in compared.tests] == ["ood accuracy", "ood worst group", "ood F1-macro"]
