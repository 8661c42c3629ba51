"""A new column is one line in `OPTIONAL_COLUMNS`: every format and the plot show it."""

import csv
from types import MappingProxyType

import pytest

from tests.invented import write_sweep
from tests.load_tool import load_tool
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import OPTIONAL_COLUMNS, Column

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


def test_every_format_shows_the_mean_gap(printed, folder, tmp_path):
    # The runs' last records, averaged over the held-out domains, then over the seeds
    runs = [run for run in find_runs([folder / "b"])[0] if len(run.test_domains) == 1]
    gaps = [run.records[-1].in_acc[0] - run.records[-1].out_acc[0] for run in runs]
    assert len(gaps) == 9  # three domains, three seeds
    expected = f"{100 * sum(gaps) / 9:.1f} ± "
    header, row = (line for line in printed() if line.startswith(("algorithm", "ERM          b")))
    assert row.index(expected) == header.index("gap of splits")
    (row,) = [line for line in printed("--format", "markdown") if line.startswith("| ERM") and "| b " in line]
    assert row.split(" | ")[-1].startswith(expected)
    (row,) = [line for line in printed("--format", "latex") if line.startswith("ERM & b")]
    assert row.split(" & ")[-1].startswith(expected.replace("±", r"$\pm$"))
    *_, last = csv.DictReader(printed("--format", "csv"))
    assert (last["column"], f"{float(last['mean']):.1f} ± ") == ("gap of splits", expected)
    printed("--plot", tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
