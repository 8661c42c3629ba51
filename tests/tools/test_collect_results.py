"""tools/collect_results.py on folders of invented runs, and on what a sweep of real ones leaves."""

import csv
import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from tests.invented import invented_records, write_run, write_sweep
from tests.load_tool import load_tool
from tests.results.cells import cells_of
from timm_moe_dg.analysis.plots import ablation_lines, plot_ablation
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import make_tables


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_sweep(root, dataset="colored_digits", model="a", skip=[((0,), 0, 0), ((0,), 0, 1)])
    write_sweep(root, dataset="colored_digits", model="b")
    return root


def csv_rows(text):
    return list(csv.DictReader(text.splitlines()))


def shown(capsys, *words):
    load_tool("collect_results").main([*map(str, words)])
    return capsys.readouterr().out


def test_every_rule_that_there_are_runs_for_has_a_table(folder, capsys):
    out = shown(capsys, folder)
    titles = [line for line in out.splitlines() if line.startswith("colored_digits, ")]
    assert [title.partition("by ")[2] for title in titles[:3]] == [
        "training-domain validation",
        "leave-one-domain-out cross-validation",
        "test-domain validation (oracle)",
    ]
    assert len(titles) == 3 + 3  # of three domains, those that hold out a pair have a single source
    assert "(2 of 3 seeds)" in out
    assert "ERM, a: test domains [0], trial seeds [0], hparams seed 1" in out


@pytest.mark.parametrize("format_", ["markdown", "latex"])
def test_formats_and_rules_can_be_chosen(folder, capsys, format_):
    out = shown(capsys, folder, "--format", format_, "--rules", "oracle")
    assert out.count("test-domain validation (oracle)") == 1
    row, tabular = re.search(r"\| ERM +\| a +\|", out), r"\begin{tabular}" in out
    assert (row is not None, tabular) == (format_ == "markdown", format_ == "latex")


@pytest.mark.parametrize("read", [csv_rows, json.loads], ids=["csv", "json"])
def test_other_programs_get_every_cell_with_its_number_of_seeds(folder, capsys, read):
    format_ = "json" if read is json.loads else "csv"
    load_tool("collect_results").main([str(folder), "--rules", "oracle", "--format", format_])
    streams = capsys.readouterr()
    (table,) = make_tables(find_runs([folder])[0], ["oracle"])
    rows = iter(read(streams.out))
    for key, cells in cells_of(table).items():
        for column, cell in zip(table.columns, cells, strict=True):
            row = next(rows)
            assert [row[name] for name in ("dataset", "rule", "model")] == ["colored_digits", "oracle", key.model]
            assert row["column"] == column
            assert float(row["mean"]) == pytest.approx(100 * cell.mean, abs=1e-5)
            assert float(row["standard_error"]) == pytest.approx(100 * cell.error, abs=1e-5)
            assert (int(row["seeds"]), int(row["expected_seeds"])) == (len(cell.values), 3)
    assert not list(rows)
    assert "missing in colored_digits, selection by test-domain validation (oracle): ERM, a" in streams.err
    with pytest.raises(SystemExit, match=rf"ArgumentError: format='{format_}': --compare has text, markdown, latex"):
        shown(capsys, folder, "--compare", "a", "b", "--format", format_)


def test_a_cell_without_a_value_has_none(tmp_path, capsys):
    write_run(tmp_path / "a", invented_records([1]))
    words = [tmp_path, "--rules", "oracle", "--format"]
    assert [row["mean"] is None for row in json.loads(shown(capsys, *words, "json"))] == [True, False, True, True]
    assert [row["mean"] == "" for row in csv_rows(shown(capsys, *words, "csv"))] == [True, False, True, True]


def test_whole_domain_is_another_number(folder, tmp_path, capsys):
    words = (folder, "--rules", "oracle")
    assert shown(capsys, *words) != shown(capsys, *words, "--whole-domain")
    write_run(tmp_path / "single", invented_records([1, 2]))
    load_tool("collect_results").main([str(tmp_path), "--whole-domain"])
    assert "--whole-domain has no effect on: toy, trained on domain 0 alone" in capsys.readouterr().err


def test_comparison(folder, capsys):
    out = shown(capsys, folder, "--compare", "a", "b", "--rules", "leave_one_domain_out_cv")
    assert out.splitlines()[2].split("  ")[0] == "domain"
    assert "difference" in out
    with pytest.raises(
        SystemExit, match=r"collect_results\.py: ArgumentError: compare=\['a', 'c'\]: no table has both"
    ):
        shown(capsys, folder, "--compare", "a", "c")
    with pytest.raises(SystemExit, match="relative_to='b': has no effect beside --compare; leave one of them out"):
        shown(capsys, folder, "--compare", "a", "b", "--relative-to", "b")


def test_picture(folder, capsys, tmp_path):
    shown(capsys, folder, "--plot", tmp_path / "bars.png", "--rules", "oracle")
    single = Image.open(tmp_path / "bars.png")
    shown(capsys, folder, "--plot", tmp_path / "more.png", "--rules", "oracle", "training_domain_validation")
    more = Image.open(tmp_path / "more.png")
    assert more.height > 1.5 * single.height
    assert len(single.convert("RGB").getcolors(1 << 24)) > 10


def test_a_picture_that_cannot_be_completed_leaves_the_old_one(folder, capsys, tmp_path, monkeypatch):
    picture = tmp_path / "bars.png"
    shown(capsys, folder, "--plot", picture, "--rules", "oracle")
    before = picture.read_bytes()

    def cut(figure, file, **options):
        Path(file).write_bytes(before[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", cut)
    for words in (["--plot", picture], ["--plot", tmp_path / "new.png"]):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            shown(capsys, folder, "--rules", "oracle", *words)
    assert picture.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["bars.png"]


def test_ablation(tmp_path, capsys):
    for top_k in (5, 1, 3):
        for number, shared in enumerate((True, False)):
            options = {"model_kwargs": {"top_k": top_k, "shared_expert": shared}, "model": "moge_tiny"}
            for seed in range(2):
                records = invented_records([0], dataset="toy", trial_seed=seed, **options)
                write_run(tmp_path / f"{top_k}-{number}-{seed}", records)
    (table, *_) = make_tables(find_runs([tmp_path])[0], ["oracle"])
    lines = ablation_lines(table, "top_k", "average")
    assert lines.keys() == {f"ERM, moge_tiny, shared_expert={shared}" for shared in (True, False)}
    for name, points in lines.items():
        assert [value for value, _ in points] == [1, 3, 5]
        for value, cell in points:
            (row,) = [row for row in table.rows if str(row) == f"{name}, top_k={value}"]
            assert cell.equals(table.summary().loc[row, list(table.columns).index("average")])
    png = tmp_path / "ablation.png"
    shown(capsys, tmp_path, "--rules", "oracle", "--ablation", "top_k", "domain 0", png)
    assert Image.open(png).width > 500
    with pytest.raises(ArgumentError, match="ablation='num_expert': no run has this setting"):
        ablation_lines(table, "num_expert", "average")
    with pytest.raises(ArgumentError, match="ablation='num_experts': all rows have the same value; give an option"):
        ablation_lines(table, "num_experts", "average")
    with pytest.raises(ArgumentError, match="ablation='oods': the columns are: domain 0,"):
        ablation_lines(table, "top_k", "oods")


def ablated(folder, setting, *variants):
    """The values of the longest line over runs with these options, each a table of `model_kwargs` and others."""
    for number, options in enumerate(variants):
        (folder / setting).mkdir(exist_ok=True)
        record = invented_records([0], dataset="toy", model="moge_tiny", filled_in=[], **options)
        write_run(folder / setting / str(number), record)
    (table, *_) = make_tables(find_runs([folder / setting])[0], ["oracle"])
    lines = ablation_lines(table, setting, "average")
    plot_ablation(table, setting, "average", folder / f"{setting}.png")
    assert Image.open(folder / f"{setting}.png").width > 500
    return [value for value, _ in max(lines.values(), key=len)]


def test_an_ablation_shows_the_default_that_a_run_does_not_spell_out(tmp_path):
    """The lines of MoGE's Figure 2, b and c, whose paper has six experts and top-3, and lists of blocks."""
    experts = [{"supcon_coef": 0.0}, {}, *({"model_kwargs": {"num_experts": number}} for number in (9, 3, 12))]
    assert ablated(tmp_path, "num_experts", *experts) == [3, 6, 9, 12]
    without = [{"shared_expert": False, **({"top_k": k} if k else {})} for k in (5, None, 1)]
    assert ablated(tmp_path, "top_k", *({"model_kwargs": kwargs} for kwargs in [{}, *without])) == [1, 3, 5]
    blocks = [{"model_kwargs": {"moe_layers": layers}} for layers in ([2, 3], "every_two", [8, 10])]
    assert ablated(tmp_path, "moe_layers", *blocks) == [(2, 3), (8, 10), "every_two"]
    assert ablated(tmp_path, "supcon_coef", {}, {"supcon_coef": 1.0}, {"supcon_coef": 0.0}) == [0.0, 0.1, 1.0]


def test_the_papers_figures_stand_beside_a_recipe_s_folder(tmp_path, capsys):
    """In every format, in a column of their own; other runs are told what differs."""
    recipe = {"dataset": "PACS", "model": "gmoe_small_patch16", "pretrained": True, "steps": 5001}
    write_sweep(tmp_path / "recipe", num_domains=4, hparams_seeds=(0,), **recipe)
    write_sweep(tmp_path / "other", num_domains=4, hparams_seeds=(0,), **{**recipe, "steps": 300})
    stated = "88.1 ± 0.1 (GMoE, Table 1); 88.1 (GMoE, Table 15)"
    for format_, cell in (("text", stated), ("markdown", stated), ("latex", stated.replace("±", r"$\pm$"))):
        out = shown(
            capsys, tmp_path / "recipe", "--papers", "--rules", "training_domain_validation", "--format", format_
        )
        assert out.count("(papers)") == 1
        assert out.count(cell) == 1
    (average,) = [row for row in csv_rows(shown(capsys, tmp_path / "recipe", "--papers", "--format", "csv",
        "--rules", "training_domain_validation")) if row["column"] == "average"]  # fmt: skip
    assert average["papers"] == stated
    assert "(papers)" not in shown(capsys, tmp_path / "recipe")
    load_tool("collect_results").main([str(tmp_path / "other"), "--papers"])
    streams = capsys.readouterr()
    assert "(papers)" not in streams.out
    (line,) = [line for line in streams.err.splitlines() if line.startswith("papers: ")]
    assert line == (
        "papers: PACS, ERM, gmoe_small_patch16: differs from gmoe_small (GMoE, Table 1) in steps=300 (there 5001)"
    )


def test_a_rule_without_its_scores_says_so_in_one_line(folder, capsys):
    tool = load_tool("collect_results")
    with pytest.raises(SystemExit, match=r"ood_f1_macro: records: .* lack f1_macro on the ood validation split") as end:
        tool.main([str(folder), "--rules", "ood_f1_macro"])
    assert "\n" not in str(end.value)
    tool.main([str(folder), "--rules", "ood_f1_macro", "oracle"])
    streams = capsys.readouterr()
    assert "ood_f1_macro: records" in streams.err
    assert "selection by test-domain validation" in streams.out


def test_names_with_line_breaks_stay_on_their_line(tmp_path, capsys):
    write_sweep(tmp_path, dataset="colored\ndigits", skip=[((0,), 0, 0)])
    write_run(tmp_path / "none\nheld", invented_records([]))
    load_tool("collect_results").main([str(tmp_path), "--rules", "oracle", "--format", "csv"])
    errors = capsys.readouterr().err
    assert r"missing in colored\ndigits" in errors
    assert r"left out: " in errors
    assert r"none\nheld" in errors


def test_runs_that_no_table_counts_are_named(tmp_path, capsys):
    for test in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3]):
        write_run(tmp_path / f"held_{len(test)}", invented_records(test, num_domains=5))
    load_tool("collect_results").main([str(tmp_path)])
    assert re.findall(r"holds out (\d) domains, in no table: .*/held_(\d)", capsys.readouterr().err) == [("3", "3")]
    load_tool("collect_results").main([str(tmp_path), "--rules", "oracle"])  # others are left out by choice
    assert "in no table" not in capsys.readouterr().err
    load_tool("collect_results").main([str(tmp_path / "held_2"), str(tmp_path / "held_4")])
    assert re.findall(r"holds out (\d) domains, in no table", capsys.readouterr().err) == ["2"]


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"collect_results\.py: RecordError: .*no finished runs"):
        load_tool("collect_results").main([str(tmp_path)])


def test_the_accuracy_at_a_new_site(folder, tmp_path, capsys):
    text = shown(capsys, folder, "--new-site")
    assert "95% prediction interval for one new site: none, because 3 held-out domains are fewer than 4" in text
    assert "Rows compared" in text
    (first, second) = csv_rows(shown(capsys, folder, "--new-site", "--format", "csv"))
    assert (first["comparison"], first["domains"], second["pairs"]) == ("recommended", "3", "8.0")
    assert json.loads(shown(capsys, folder, "--new-site", "--format", "json"))[0]["p"] is None
    assert r"\begin{tabular}" in shown(capsys, folder, "--new-site", "--format", "latex")
    with pytest.raises(SystemExit, match=r"rules=\['oracle'\]: has no effect beside --new-site"):
        shown(capsys, folder, "--new-site", "--rules", "oracle")
    alone = write_run(tmp_path / "alone", invented_records([1], dataset="colored_digits"))
    with pytest.raises(SystemExit, match=r"RecordError: held-out domains='\+80%': too few .*timm-moe-dg sweep$"):
        shown(capsys, alone, "--new-site")
    other = write_run(tmp_path / "other", invented_records([1]))
    with pytest.raises(SystemExit, match=r"dataset='colored_digits' in .*/alone, 'toy' in .*/other: a recommendation"):
        shown(capsys, alone, other, "--new-site")
