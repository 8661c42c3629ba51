"""The grid of a data set's images, and the curves of several runs in one picture."""

from dataclasses import replace

import numpy as np
from PIL import Image

from tests.invented import make_record
from timm_moe_dg.analysis.curves import plot_runs
from timm_moe_dg.analysis.example_plots import plot_examples
from timm_moe_dg.data import get_benchmark


def test_each_run_is_a_line_of_its_held_out_accuracy(tmp_path, figures):
    first = [replace(make_record(), step=step, in_acc=(acc, 0.9, 0.9)) for step, acc in ((0, 0.1), (10, 0.5))]
    first = [replace(record, args={**record.args, "test_envs": [0]}) for record in first]
    second = [replace(record, in_acc=(0.25, 0.8, 0.8)) for record in first]
    plot_runs({"one": first, "two": second}, tmp_path / "curves.png")
    lines = figures[0].axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one", "two"]
    assert np.allclose(lines[0].get_xydata(), [(0, 10), (10, 50)])
    assert np.allclose(lines[1].get_ydata(), [25, 25])


def test_the_grid_has_the_first_image_of_each_class_and_domain(tmp_path, figures):
    domains = get_benchmark("sprites").read(None)
    plot_examples(domains, tmp_path / "examples.png", columns=3)
    panels = np.array(figures[0].axes).reshape(len(domains), 3)
    assert [axes.get_ylabel() for axes in panels[:, 0]] == [domain.name for domain in domains]
    assert [axes.get_title() for axes in panels[0]] == list(domains[0].classes[:3])
    first = int(np.flatnonzero(np.asarray(domains[1].targets) == 2)[0])
    assert np.array_equal(panels[1, 2].images[0].get_array(), np.asarray(domains[1].image(first)))
    assert Image.open(tmp_path / "examples.png").width > 300
