"""Learning curves have every number of an evaluation, bars those of a table, and small pictures legible text."""

import sys
from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.invented import ARGS, make_record
from tests.results.cells import table_of
from timm_moe_dg.analysis.plots import (
    learning_curves,
    plot_accuracies,
    plot_examples,
    plot_learning_curves,
    plot_runs,
    zeros,
)
from timm_moe_dg.analysis.style import NARROW, SHARED_COLOR, expert_color, fitted, optional_picture, text_size
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.results.runs import FinishedRun, RowKey

ROLES = {"ood": {"accuracy": 0.5, "worst_accuracy": 0.25, "worst_group": "Asia", "f1_macro": 0.4}}
ROW = RowKey("ERM", "vit")


def test_curves_are_losses_accuracies_domains_and_roles():
    records = [make_record(step=step, roles=ROLES, losses={"loss": 3.0 - step}) for step in (0, 1)]
    curves = learning_curves(records, ["a", "b", "c"])
    assert curves["training-domain validation"] == [0.5, 0.5]  # of 0.6 and 0.4
    assert "test domain (in)" not in curves  # a mean over id and ood groups would have no meaning
    plain = [replace(record, roles={}) for record in records]
    assert learning_curves(plain, ["a", "b", "c"])["test domain (in)"] == [0.8, 0.8]
    assert curves["b (out)"] == [0.5, 0.5]
    assert (curves["ood accuracy"], curves["ood worst accuracy"]) == ([0.5, 0.5], [0.25, 0.25])


def test_a_picture_that_cannot_be_drawn_or_written_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    for folder, reason in (("missing", "[Errno 2]"), ("", "drawing needs matplotlib")):
        with optional_picture(tmp_path / folder / "a.png") as path:
            plot_learning_curves([make_record()], "abc", path)
        assert f"a.png is not drawn: {reason}" in caplog.text
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not list(tmp_path.iterdir())


def test_means_are_black_held_out_domains_dashed_and_lines_without_values_left_out(figures, tmp_path):
    records = [make_record(out_acc=(0.6, 0.4, float("nan")), losses={"aux_loss": 1.0, "loss": 3.0}) for _ in range(2)]
    plot_learning_curves(records, ["a", "b", "c"], tmp_path / "a.png")
    upper, lower = figures[0].axes
    held_out = records[0].test_domains
    expected = [("training-domain validation", "-"), ("test domain (in)", "--")]
    expected += [(f"{name} (out)", "--" if index in held_out else "-") for index, name in enumerate("ab")]
    assert [(line.get_label(), line.get_linestyle()) for line in upper.lines[:-1]] == expected
    assert [line.get_color() == "black" for line in upper.lines[:-1]] == [True, True, False, False]
    assert upper.lines[2].get_ydata().tolist() == pytest.approx([60.0, 60.0])
    assert [(line.get_label(), *line.get_ydata()) for line in lower.lines] == [("loss", 3, 3), ("aux_loss", 1, 1)]


def test_a_picture_of_one_evaluation_and_of_a_run_that_diverged(tmp_path):
    records = [make_record(losses={"loss": value, "penalty": 0.0}) for value in (1.0, float("nan"), float("inf"))]
    for number in (1, 3):
        plot_learning_curves(records[:number], ["a", "$\\frac{$", "c" * 200], tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000


def test_each_run_is_a_line_of_its_held_out_accuracy(tmp_path, figures):
    first = [replace(make_record(), step=step, in_acc=(acc, 0.9, 0.9)) for step, acc in ((0, 0.1), (10, 0.5))]
    first = [replace(record, args={**record.args, "test_envs": [0]}) for record in first]
    second = [replace(record, in_acc=(0.25, 0.8, 0.8)) for record in first]
    plot_runs({"one": first, "two": second}, tmp_path / "curves.png")
    lines = figures[0].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one", "two"]
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["one", "two"]
    assert np.allclose(lines[0].get_xydata(), [(0, 10), (10, 50)])
    assert np.allclose(lines[1].get_ydata(), [25, 25])


def test_the_grid_has_the_first_image_of_each_class_and_domain(tmp_path, figures):
    domains = get_benchmark("rotated_digits").read(None)
    plot_examples(domains, tmp_path / "examples.png", columns=3)
    panels = np.array(figures[0].axes).reshape(len(domains), 3)
    assert [axes.get_ylabel() for axes in panels[:, 0]] == [domain.name for domain in domains]
    assert [axes.get_title() for axes in panels[0]] == list(domains[0].classes[:3])
    first = int(np.flatnonzero(np.asarray(domains[1].targets) == 2)[0])
    assert np.array_equal(panels[1, 2].images[0].get_array(), np.asarray(domains[1].image(first)))
    assert Image.open(tmp_path / "examples.png").width > 300


def runs_of(*classes):
    return [FinishedRun(Path("run"), [make_record(args={**ARGS, "num_classes": number})]) for number in classes]


def test_bars_are_percent_with_errors_gaps_the_line_of_chance_and_the_number_of_seeds(tmp_path, figures):
    rows = {ROW: [{0: 0.5, 1: 0.7}, {0: 0.25}], RowKey("ERM", "gmoe_x"): [{}, {}]}
    table = table_of(rows, ["a", "b"], runs={row: runs_of(5) for row in rows})
    plot_accuracies([table], tmp_path / "a.png")
    axes = figures[0].axes[0]
    drawn = [lines for lines in axes.collections if len(lines.get_segments()) == 2 and lines.get_linewidth() == 1.2]
    assert [segment[0][1] for segment in drawn[0].get_segments()] == [20.0, 20.0]
    missing, bars = (np.array([bar.get_height() for bar in container]) for container in axes.containers[1::2])
    assert np.isnan(missing).all()
    assert bars == pytest.approx([60.0, 25.0])
    segments = axes.containers[2].lines[2][0].get_segments()
    assert [high[1] - low[1] for low, high in segments] == pytest.approx([2 * 100 * 0.1 / 2**0.5, 0.0])
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["ERM, gmoe_x (seeds: 0)", "ERM, vit (seeds: 1 to 2)", "guessing"]
    for runs in ({ROW: runs_of(4, 5)}, {}):  # of different numbers of classes, and none
        name, values = zeros(replace(table, runs=runs))
        assert not name
        assert all(map(isnan, values))


def test_the_most_frequent_class_takes_the_place_of_guessing():
    facts = {"split_sizes": [[10, 5]] * 3, "most_frequent": [[9, 1], [6, 0], [1, 1]]}
    common = {**ARGS, **facts, "num_classes": 2, "domains": list("abc")}

    def table_with(columns, held_out):
        records = [make_record(args={**common, "test_envs": domains}) for domains in held_out]
        runs = {ROW: [FinishedRun(Path("run"), [record]) for record in records]}
        return table_of({ROW: [{0: 0.5}] * 4}, columns, runs=runs)

    name, values = zeros(table_with(["a", "b", "c", "average"], [[0], [1]]))
    assert "most frequent class" in name
    assert values[:2] == [90.0, 60.0]
    assert isnan(values[2])
    assert values[3] == pytest.approx(75.0)
    # A table of one training domain has the out-splits of the runs that were trained on it
    table = table_with(["a (IID)", "b", "c", "average OOD"], [[1, 2], [0, 2], [0, 1]])
    _, values = zeros(replace(table, trained_on="a"))
    assert values[1:] == pytest.approx([0.0, 20.0, 10.0])


def test_each_expert_keeps_its_color():
    assert len({*map(expert_color, range(16))}) == 16
    assert (expert_color(17), expert_color(-1)) == (expert_color(1), SHARED_COLOR)


@pytest.mark.parametrize("width", [7.0, 9.0, 11.0])
def test_text_is_eight_pixels_high_in_a_narrow_picture(width):
    assert text_size(width) / 72 * NARROW / width == pytest.approx(8)


def test_names_are_wrapped():
    long = "a name that goes on and on, as those of folders and of classes of birds sometimes do in fact"
    assert all(len(line) <= 20 for line in fitted(long, 20).splitlines())
    assert (fitted("short", 20), fitted("", 20)) == ("short", " ")
    assert fitted("deit_tiny_patch16_224", 13) == "deit_tiny_\npatch16_224"
    assert fitted("two words_of a name", 13) == "two words_of\na name"
    assert fitted("_hidden", 20) == " _hidden"  # no legend leaves it out
