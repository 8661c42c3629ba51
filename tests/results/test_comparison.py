"""Two rows side by side: differences within seeds, and the papers' figures in their own columns."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests.invented import invented_records, write_run, write_sweep
from tests.results.cells import cells_of, table_of
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.results.comparison import compare
from timm_moe_dg.results.runs import FinishedRun, RowKey, find_runs
from timm_moe_dg.results.tables import make_tables

GMOE, VIT = "gmoe_small_patch16", "deit_small_patch16_224"


def test_differences_are_taken_within_seeds():
    rows = {
        RowKey("ERM", "a"): [{0: 0.5, 1: 0.7, 2: 0.9}] * 4,
        RowKey("ERM", "b"): [{0: 0.4, 1: 0.6, 2: 0.8}, {0: 0.6, 1: 0.8, 2: 1.0}, {2: 0.95}, {}],
    }
    table = table_of(
        rows, list("wxyz"), expected=3, runs={row: [FinishedRun(Path("run"), invented_records([0]))] for row in rows}
    )
    differences = [row[3] for row in rows_of(compare([table], "a", "b", "markdown"))[2:]]
    assert differences == ["+10.0 ± 0.0", "-10.0 ± 0.0", "-5.0 (1 of 3 seeds)", "missing"]


@pytest.fixture(scope="module")
def pacs(tmp_path_factory):
    """A mixture model and its dense twin on all of PACS, from published weights."""
    root = tmp_path_factory.mktemp("pacs")
    for model in (GMOE, VIT):
        write_sweep(
            root / model, dataset="PACS", num_domains=4, model=model, pretrained=True, steps=5001, hparams_seeds=(0,)
        )
    return root


def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_papers_figures_have_columns_of_their_own(pacs):
    tables = make_tables(find_runs([pacs])[0], ["training_domain_validation"])
    header, _, *rows = rows_of(compare(tables, GMOE, VIT, "markdown"))
    assert header[:4] == ["domain", f"ERM, {GMOE}", f"ERM, {VIT}", "difference"]
    assert header[4:] == [f"paper's figure for ERM, {GMOE}", f"paper's figure for ERM, {VIT}"]
    assert [row[0] for row in rows] == ["art_painting", "cartoon", "photo", "sketch", "average"]
    assert all(row[4:] == ["", ""] for row in rows[:4])  # the papers state averages only
    assert rows[4][4:] == [
        "88.1 ± 0.1 (GMoE, Table 1); 88.1 (GMoE, Table 15)",
        "86.2 ± 0.1 (GMoE, Table 1); 86.2 (GMoE, Table 15); 86.6 ± 0.1 (SF-MoE, Table 1)",
    ]
    (table,) = tables
    first, second = (
        next(cells for row, cells in cells_of(table).items() if row.model == model)[-1] for model in (GMOE, VIT)
    )
    differences = [100 * (first.values[seed] - second.values[seed]) for seed in range(3)]
    assert rows[4][3] == f"{np.mean(differences):+.1f} ± {np.std(differences) / np.sqrt(3):.1f}"


def test_rows_can_be_named_by_folders(pacs):
    tables = make_tables(find_runs([pacs])[0], ["oracle"])
    by_folder = compare(tables, str(pacs / GMOE), str(pacs / VIT), "text")
    assert by_folder == compare(tables, GMOE, VIT, "text")
    assert "paper" not in by_folder  # the papers state no oracle


def test_names_that_no_table_has_are_listed(pacs):
    tables = make_tables(find_runs([pacs])[0], ["oracle"])
    with pytest.raises(ArgumentError, match=rf"no table has both; the rows are: ERM, {VIT}; ERM, {GMOE}"):
        compare(tables, GMOE, "resnet50", "text")


def test_single_source_figures_stand_beside_their_domain(tmp_path):
    for seed, model in product(range(2), (GMOE, VIT)):
        of = {"dataset": "DomainNet", "model": model, "pretrained": True, "steps": 15_001}
        records = invented_records((0, 1, 3, 4, 5), num_domains=6, trial_seed=seed, **of)
        write_run(tmp_path / model / str(seed), records)
    tables = make_tables(find_runs([tmp_path])[0])
    rows = {row[0]: row[4:] for row in rows_of(compare(tables, GMOE, VIT, "markdown"))}
    assert rows["painting (IID)"] == ["69.3 (GMoE, Table 12)", "69.0 (GMoE, Table 12)"]
    assert rows["quickdraw"] == ["5.3 (GMoE, Table 12)", "5.0 (GMoE, Table 12)"]
    assert rows["average OOD"] == ["", ""]


def test_n_and_a_paired_test_stand_below(pacs):
    tables = make_tables(find_runs([pacs])[0], ["oracle"])
    line = compare(tables, GMOE, VIT, "latex").splitlines()[-1]
    assert line.startswith("% Differences paired by trial seed")
    (table,) = tables
    rows = [next(cells for row, cells in cells_of(table).items() if row.model == model) for model in (GMOE, VIT)]
    for position, domain in enumerate(table.columns):
        values = [rows[0][position].values[seed] - rows[1][position].values[seed] for seed in range(3)]
        one_sided = all(value > 0 for value in values) or all(value < 0 for value in values)
        assert f"{domain}: n = 3, p = " in line
        if one_sided:
            assert f"{domain}: n = 3, p = 0.25" in line
