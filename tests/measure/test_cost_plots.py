"""The picture of costs: a panel for each dense model, a line for each setting that was varied."""

import itertools

import pytest
from matplotlib.figure import Figure
from PIL import Image

from timm_moe_dg.measure.cost_plots import plot_cost


def rows(**varied):
    """Of a benchmark over all combinations, with ratios of their own."""
    conditions = {"model": ["gmoe"], "mode": ["train"], "dtype": ["float32"], "program": ["eager"]}
    conditions |= {"dispatch": ["auto"], "batch_size": [8], "num_experts": [6], **varied}
    for number, values in enumerate(itertools.product(*conditions.values())):
        row = dict(zip(conditions, values, strict=True))
        for against in (row["model"], "dense twin", "FLOP-equivalent"):
            middle = 1 + number / 10 + 5 * (against == "dense twin")
            yield {**row, "options": {"num_experts": row["num_experts"]}, "against": against} | {
                "ratio": (middle - 0.01, middle, middle + 0.02)
            }


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is written."""
    found, write = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **options: (found.append(self), write(self, *args, **options))
    )
    return found


def points(panel):
    """Of each line: x and y of its middle."""
    return [[line.get_xdata().tolist(), line.get_ydata().tolist()] for line, *_ in panel.containers]


def test_lines_are_what_was_varied_beside_the_first_quantity(figures, tmp_path):
    plot_cost(list(rows(batch_size=[1, 8], num_experts=[2, 6, 16])), tmp_path / "cost.png")
    twin, equivalent = figures[0].axes
    assert [twin.get_title(), equivalent.get_title()] == ["over the dense twin", "over the FLOP-equivalent"]
    assert twin.get_xlabel() == "experts"
    assert points(equivalent) == [
        [[2, 6, 16], pytest.approx([1.0, 1.1, 1.2])],
        [[2, 6, 16], pytest.approx([1.3, 1.4, 1.5])],
    ]
    assert points(twin)[0][1] == pytest.approx([6.0, 6.1, 6.2])
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == ["batch 1", "batch 8"]


def test_one_line_needs_no_legend(figures, tmp_path):
    plot_cost(list(rows(batch_size=[8, 32])), tmp_path / "cost.png")
    assert figures[0].axes[0].get_xlabel() == "batch"
    assert figures[0].legends == []


@pytest.mark.parametrize("varied", [{}, {"mode": ["inference", "train"], "dtype": ["float32", "bfloat16"]}])
def test_a_single_size_is_drawn_as_well(varied, tmp_path):
    plot_cost(list(rows(**varied)), tmp_path / "cost.png")
    with Image.open(tmp_path / "cost.png") as picture:
        picture.verify()
