"""Pictures of tables: bars are the table's means and errors, and what is missing stays missing."""

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest

from tests.invented import ARGS, make_record
from tests.results.cells import table_of
from timm_moe_dg.analysis.plots import bars_of, chance, plot_accuracies
from timm_moe_dg.results.runs import FinishedRun, RowKey

ROW = RowKey("ERM", "vit")


def test_bars_are_percent_with_standard_errors_and_gaps():
    heights, errors = bars_of(table_of({ROW: [{0: 0.5, 1: 0.7}, {0: 0.25}, {}]}, list("abc")).summary())
    assert heights[:2] == pytest.approx([60.0, 25.0])
    assert isnan(heights[2])
    assert errors == pytest.approx([100 * 0.1 / 2**0.5, 0.0, 0.0])


def runs_of(*classes):
    return [FinishedRun(Path("run"), [make_record(args={**ARGS, "num_classes": number})]) for number in classes]


def test_bars_have_the_line_of_chance_and_the_number_of_seeds(tmp_path, figures):
    rows = {ROW: [{0: 0.5, 1: 0.7}, {0: 0.5}], RowKey("ERM", "gmoe_x"): [{}, {}]}
    table = table_of(rows, ["a", "b"], runs={row: runs_of(5) for row in rows})
    plot_accuracies([table], tmp_path / "a.png")
    axes = figures[0].axes[0]
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == ":"] == [20.0]
    assert {text.get_position()[1] for text in axes.texts if text.get_text() == "missing"} == {21.0}  # above chance
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["ERM, gmoe_x (0 seeds)", "ERM, vit (1 to 2 seeds)"]
    assert chance(table) == 20.0
    assert isnan(chance(replace(table, runs={ROW: runs_of(4, 5)})))  # of different numbers of classes
    assert isnan(chance(replace(table, runs={})))
