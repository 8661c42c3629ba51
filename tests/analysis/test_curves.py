"""Learning curves: every number that an evaluation has, and a picture that a run can do without."""

import sys
from dataclasses import replace

import pytest

from tests.invented import make_record
from timm_moe_dg.analysis.curves import (
    FILE,
    accuracy_lines,
    draw_learning_curves,
    learning_curves,
    loss_lines,
    plot_learning_curves,
)

ROLES = {"ood": {"accuracy": 0.5, "worst_accuracy": 0.25, "worst_group": "Asia", "f1_macro": 0.4}}


def test_curves_are_losses_accuracies_domains_and_roles():
    records = [make_record(step=step, roles=ROLES, losses={"loss": 3.0 - step}) for step in (0, 1)]
    assert [line.values for line in loss_lines(records)] == [[3.0, 2.0]]
    curves = learning_curves(records, ["a", "b", "c"])
    assert curves["training-domain validation"] == [0.5, 0.5]  # of 0.6 and 0.4
    assert "test domain (in)" not in curves  # a mean over id and ood groups would have no meaning
    plain = [replace(record, roles={}) for record in records]
    assert learning_curves(plain, ["a", "b", "c"])["test domain (in)"] == [0.8, 0.8]
    assert curves["b (out)"] == [0.5, 0.5]
    assert (curves["ood accuracy"], curves["ood worst accuracy"]) == ([0.5, 0.5], [0.25, 0.25])


def test_losses_keep_their_colors_whatever_the_order_of_the_record():
    losses = {"aux_loss": 1.0, "loss": 3.0, "task_loss": 2.0}
    from_file = loss_lines([make_record(losses=losses)])
    from_run = loss_lines([make_record(losses=dict(reversed(losses.items())))])
    assert from_file == from_run
    assert [line.label for line in from_run] == ["loss", "aux_loss", "task_loss"]


def test_a_picture_that_cannot_be_drawn_or_written_does_not_fail_the_run(tmp_path, monkeypatch, caplog):
    draw_learning_curves([make_record()], "abc", tmp_path / "missing")
    assert f"{FILE} is not drawn: [Errno 2]" in caplog.text
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw_learning_curves([make_record()], "abc", tmp_path)
    assert f"{FILE} is not drawn: drawing needs matplotlib" in caplog.text
    assert not list(tmp_path.iterdir())


def test_held_out_domains_are_dashed_and_lines_without_values_are_left_out():
    curves = {"training-domain validation": [0.5], "a (out)": [0.4], "b (out)": [0.3], "c (out)": [float("nan")]}
    lines = accuracy_lines(curves, ["b (out)"])
    assert [line.label for line in lines] == list(curves)[:3]
    assert [(line.values, line.dashes) for line in lines] == [([50.0], "-"), ([40.0], "-"), ([30.0], "--")]
    assert len({line.color for line in lines}) == 3


def test_more_domains_than_colors_share_two_entries_of_the_legend():
    curves = {f"{number} (out)": [0.5] for number in range(40)} | {"ood accuracy": [0.4]}
    lines = accuracy_lines(curves, ["3 (out)", "4 (out)"])
    labels = [line.label for line in lines if line.label]
    assert labels == ["ood accuracy", "each training domain (out)", "each held-out domain (out)"]
    assert len(lines) == 41


def test_a_picture_of_one_evaluation_and_of_a_run_that_diverged(tmp_path):
    records = [make_record(losses={"loss": value, "penalty": 0.0}) for value in (1.0, float("nan"), float("inf"))]
    for number in (1, 3):
        draw_learning_curves(records[:number], ["a", "$\\frac{$", "c" * 200], tmp_path, f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000


def test_a_run_that_ends_with_an_average_of_weights_has_no_selected_step(tmp_path, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes").Axes
    labels = []
    monkeypatch.setattr(axes, "axvline", lambda *_, label, **__: labels.append(label))
    records = [make_record(step=step) for step in (0, 1)]
    plot_learning_curves(records, "abc", tmp_path / "plain.png")
    plot_learning_curves([*records, replace(records[1], averaged=True)], "abc", tmp_path / "average.png")
    assert labels == ["selected step 0"]
