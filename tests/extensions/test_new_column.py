"""A new column is one line in `OPTIONAL_COLUMNS`: text, Markdown, LaTeX, comparison and plot show it."""

import re
from types import MappingProxyType

import pytest

from tests.invented import write_sweep
from tests.load_tool import load_tool
from timm_moe_dg.analysis.plots import bars_of
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import OPTIONAL_COLUMNS, Column, make_tables

GAP = Column("gap of splits", lambda record: record.in_acc[0] - record.out_acc[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for model in ("a", "b"):
        write_sweep(root / model, dataset="colored_digits", model=model, hparams_seeds=(0,))
    return root


@pytest.fixture
def printed(folder, capsys, monkeypatch):
    """Returns a function that runs the tool with the toy column and returns the lines that it prints."""
    tool = load_tool("collect_results")
    monkeypatch.setattr(tool, "OPTIONAL_COLUMNS", MappingProxyType({**OPTIONAL_COLUMNS, "gap": GAP}))

    def run(*words):
        tool.main([str(folder), "--rules", "oracle", "--columns", "gap", *map(str, words)])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture(scope="module")
def expected(folder):
    """Percent of row b: the runs' last records, averaged over the held-out domains, then over the seeds."""
    runs = [run for run in find_runs([folder / "b"])[0] if len(run.test_domains) == 1]
    gaps = [run.records[-1].in_acc[0] - run.records[-1].out_acc[0] for run in runs]
    assert len(gaps) == 9  # three domains, three seeds
    return f"{100 * sum(gaps) / 9:.1f} ± "


def test_text(printed, expected):
    header, row = (next(line for line in printed() if re.match(start, line)) for start in ("algorithm", "ERM +b"))
    assert header.split()[-4:] == ["average", "gap", "of", "splits"]
    assert row.index(expected) == header.index("gap of splits")


def test_markdown(printed, expected):
    lines = [re.sub(" +", " ", line) for line in printed("--format", "markdown") if line.startswith("|")]
    assert lines[0].endswith("| average | gap of splits |")
    assert lines[1].count("-|") == lines[0].count("|") - 1
    assert lines[3].split(" | ")[-1].startswith(expected)


def test_latex(printed, expected):
    lines = printed("--format", "latex")
    assert r"\begin{tabular}{llccccc}" in lines
    lines = [re.sub(" +", " ", line).strip() for line in lines]
    assert any(line.endswith(r"& gap of splits \\") for line in lines)
    (row,) = [line for line in lines if line.startswith("ERM & b")]
    assert row.split(" & ")[-1].startswith(expected.replace("±", r"$\pm$"))


def test_comparison(printed, expected):
    (row,) = [line for line in printed("--compare", "b", "a", "--format", "markdown") if line.startswith("| gap of")]
    assert row.split(" | ")[1].startswith(expected)


def test_the_plot_and_its_data(printed, folder, expected, tmp_path):
    (table,) = make_tables(find_runs([folder])[0], ["oracle"], further=[GAP])
    plain, *_ = make_tables(find_runs([folder])[0], ["oracle"])
    assert table.columns == [*plain.columns, "gap of splits"]
    cells = plain.summary()
    for row in table.rows:
        heights, errors = bars_of(table.summary().loc[row])
        assert heights[:-1] == bars_of(cells.loc[row])[0]
        assert len(errors) == len(table.columns)
        if row.model == "b":
            assert expected.startswith(f"{heights[-1]:.1f} ")
    pytest.importorskip("matplotlib")
    printed("--plot", tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_every_kind_of_table_takes_every_column(folder):
    runs, _ = find_runs([folder])
    columns = list(OPTIONAL_COLUMNS.values())
    tables = make_tables(runs, further=columns)
    assert {table.rule for table in tables} >= {"training_domain_validation", "oracle", "single_source"}
    for table in tables:
        assert table.columns[-len(columns) :] == [column.title for column in columns]
        assert len(table.summary()) == len(table.columns) * len(table.rows)
