"""tools/collect_results.py on folders of invented runs, and on what a sweep of real ones leaves."""

import csv
import json
import re

import pytest
from PIL import Image

from tests.invented import invented_records, write_run, write_sweep
from tests.load_tool import run_tool
from tests.results.cells import cells_of
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import make_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_sweep(root, dataset="colored_digits", model="a", skip=[((0,), 0, 0), ((0,), 0, 1)])
    write_sweep(root, dataset="colored_digits", model="b")
    return root


@pytest.fixture
def shown(capsys):
    """Runs the tool and returns what it prints."""

    def run(*words):
        run_tool("collect_results", *words)
        return capsys.readouterr().out

    return run


def csv_rows(text):
    return list(csv.DictReader(text.splitlines()))


def test_every_rule_that_there_are_runs_for_has_a_table(folder, shown):
    out = shown(folder)
    titles = [line for line in out.splitlines() if line.startswith("colored_digits, ")]
    assert [title.partition("by ")[2] for title in titles[:3]] == [
        "training-domain validation",
        "leave-one-domain-out cross-validation",
        "test-domain validation (oracle)",
    ]
    assert len(titles) == 3 + 3  # of three domains, those that hold out a pair have a single source
    assert "(2 of 3 seeds)" in out
    assert "ERM, a: test domains [0], trial seeds [0], hparams seed 1" in out


@pytest.mark.parametrize(("format_", "read"), [("csv", csv_rows), ("json", json.loads)])
def test_other_programs_get_every_cell_with_its_number_of_seeds(folder, capsys, format_, read):
    run_tool("collect_results", folder, "--rules", "oracle", "--format", format_)
    streams = capsys.readouterr()
    (table,) = make_tables(find_runs([folder])[0], ["oracle"])
    rows = iter(read(streams.out))
    for key, cells in cells_of(table).items():
        for column, cell in zip(table.columns, cells, strict=True):
            row = next(rows)
            names = [row[name] for name in ("dataset", "rule", "model", "column")]
            assert names == ["colored_digits", "oracle", key.model, column]
            assert float(row["mean"]) == pytest.approx(100 * cell.mean, abs=1e-5)
            assert float(row["standard_error"]) == pytest.approx(100 * cell.error, abs=1e-5)
            assert (int(row["seeds"]), int(row["expected_seeds"])) == (len(cell.values), 3)
    assert not list(rows)
    assert "missing in colored_digits, selection by test-domain validation (oracle): ERM, a" in streams.err


@pytest.mark.parametrize(("format_", "read", "empty"), [("csv", csv_rows, ""), ("json", json.loads, None)])
def test_a_cell_without_a_value_has_none(tmp_path, shown, format_, read, empty):
    write_run(tmp_path / "a", invented_records([1]))
    rows = read(shown(tmp_path, "--rules", "oracle", "--format", format_, "--columns", "f1_macro"))
    assert [row["mean"] == empty for row in rows] == [False, False, True]


def test_whole_domain_is_another_number(folder, tmp_path, shown, capsys):
    words = (folder, "--rules", "oracle")
    assert shown(*words) != shown(*words, "--whole-domain")
    write_run(tmp_path / "single", invented_records([1, 2]))
    run_tool("collect_results", tmp_path, "--whole-domain")
    assert "--whole-domain has no effect on: toy, trained on domain 0 alone" in capsys.readouterr().err


def test_differences_of_rows_with_names_follow_their_table(tmp_path, shown):
    for name in ("dense", "gmoe"):
        write_sweep(tmp_path / name, dataset="colored_digits", model=name, row=name, hparams_seeds=(0,))
    tables = shown(tmp_path, "--rules", "training_domain_validation", "oracle", "--format", "markdown")
    assert tables.count("**Differences to dense, points**") == 1
    assert re.search(r"\| gmoe +\| [+-][\d.]+ .* of 9 pairs, \d of 3 domains", tables)
    whole = shown(tmp_path, "--rules", "training_domain_validation", "--format", "markdown", "--whole-domain")
    assert whole.splitlines()[-6:] != tables.splitlines()[-6:]
    assert ("whole domains" in whole, "whole domains" in tables) == (True, False)


def test_pictures(folder, shown, tmp_path):
    shown(folder, "--plot", tmp_path / "bars.png", "--rules", "oracle")
    single = Image.open(tmp_path / "bars.png")
    shown(folder, "--plot", tmp_path / "more.png", "--rules", "oracle", "training_domain_validation")
    assert Image.open(tmp_path / "more.png").height > 1.5 * single.height
    assert len(single.convert("RGB").getcolors(1 << 24)) > 10


def test_the_papers_figures_stand_beside_a_recipe_s_folder(tmp_path, shown, capsys):
    recipe = {"dataset": "PACS", "model": "gmoe_small_patch16", "pretrained": True, "steps": 5001}
    write_sweep(tmp_path / "recipe", num_domains=4, hparams_seeds=(0,), **recipe)
    write_sweep(tmp_path / "other", num_domains=4, hparams_seeds=(0,), **{**recipe, "steps": 300})
    stated = "88.1 ± 0.1 (GMoE, Table 1); 88.1 (GMoE, Table 15)"
    words = (tmp_path / "recipe", "--rules", "training_domain_validation", "--papers", "--format")
    out = shown(*words, "markdown")
    assert (out.count("(papers)"), out.count(stated)) == (1, 1)
    (average,) = [row for row in csv_rows(shown(*words, "csv")) if row["column"] == "average"]
    assert average["papers"] == stated
    run_tool("collect_results", tmp_path / "other", "--papers")
    streams = capsys.readouterr()
    assert "(papers)" not in streams.out
    assert "papers: PACS, ERM, gmoe_small_patch16: no recipe has its settings" in streams.err


def test_what_no_table_counts_is_named_on_lines_of_its_own(tmp_path, capsys):
    write_sweep(tmp_path / "sweep", dataset="colored\ndigits", skip=[((0,), 0, 0)])
    write_run(tmp_path / "sweep" / "none\nheld", invented_records([]))
    run_tool("collect_results", tmp_path / "sweep", "--rules", "oracle", "ood_f1_macro", "--format", "csv")
    errors = capsys.readouterr().err
    assert r"missing in colored\ndigits" in errors
    assert re.search(r"left out: .*none\\nheld", errors)
    assert "ood_f1_macro: no run has" in errors
    for test in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3]):
        write_run(tmp_path / "runs" / f"held_{len(test)}", invented_records(test, num_domains=5))
    run_tool("collect_results", tmp_path / "runs")
    assert re.findall(r"holds out (\d) domains, in no table: .*/held_(\d)", capsys.readouterr().err) == [("3", "3")]
    run_tool("collect_results", tmp_path / "runs", "--rules", "oracle")  # others are left out by choice
    assert "in no table" not in capsys.readouterr().err


REFUSED = [
    (["--rules", "ood_f1_macro"], "RecordError: ood_f1_macro: "),
    (["--new-site", "--rules", "oracle"], r"ArgumentError: rules=\['oracle'\]: "),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_options_without_an_effect_are_refused(words, message, folder, shown):
    with pytest.raises(SystemExit, match=rf"^collect_results\.py: {message}[^\n]*$"):
        shown(folder, *words)


def test_the_accuracy_at_a_new_site(folder, shown):
    text = shown(folder, "--new-site")
    assert "95% prediction interval for one new site: none, because 3 held-out domains are fewer than 4" in text
    assert "Differences to " in text
    recommended = {row["recommended"]: row for row in csv_rows(shown(folder, "--new-site", "--format", "csv"))}
    assert (recommended["True"]["pair_pairs"], recommended["False"]["pair_pairs"]) == ("", "8.0")
    assert {row["pair_p"] for row in json.loads(shown(folder, "--new-site", "--format", "json"))} >= {None}
    assert r"\begin{tabular}" in shown(folder, "--new-site", "--format", "latex")
