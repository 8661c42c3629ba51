"""Accuracies and costs put together by method and model; what does not fit is named."""

import json

import pytest
from PIL import Image

from timm_moe_dg.analysis.bubbles import Bubble, bubbles_of, plot_bubbles, read_costs
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.results.columns import Cell
from timm_moe_dg.results.runs import RowKey
from timm_moe_dg.results.tables import Table


def cost(model, algorithm="ERM", mode="train", seconds=0.5, peak_mib=100.0):
    return {"model": model, "algorithm": algorithm, "mode": mode, "seconds": seconds, "peak_mib": peak_mib}


@pytest.fixture
def table():
    accuracies = {RowKey("ERM", "a"): 0.5, RowKey("ERM + swad", "a"): 0.75, RowKey("ERM", "b"): 0.25}
    rows = {row: [Cell({0: value, 1: value}, 2)] for row, value in accuracies.items()}
    rows[RowKey("Fish", "a")] = [Cell({}, 2)]
    return Table("toy", "oracle", "toy", ["average"], rows)


@pytest.fixture
def written(tmp_path):
    rows = [cost("a"), cost("a", mode="inference", seconds=9.0), cost("a", "ERM + swad", seconds=0.75, peak_mib=None)]
    rows += [cost("a", "Fish"), cost("c")]
    (tmp_path / "cost.json").write_text(json.dumps({"rows": rows}))
    return tmp_path / "cost.json"


def test_training_costs_are_found_by_method_and_model(table, written, tmp_path):
    found = bubbles_of(table, read_costs(written), "average")
    assert found == [Bubble("ERM, a", 0.5, 100.0, 50.0), Bubble("ERM + swad, a", 0.75, None, 75.0)]
    plot_bubbles(found, tmp_path / "bubbles.png")
    assert Image.open(tmp_path / "bubbles.png").width > 500


def test_what_does_not_fit_is_named(table, written, tmp_path):
    with pytest.raises(ArgumentError, match="bubbles='photo': the columns are: average"):
        bubbles_of(table, read_costs(written), "photo")
    with pytest.raises(ArgumentError, match=r"no row has a cost; the rows are ERM, a.* measured were ERM, c"):
        bubbles_of(table, [cost("c")], "average")
    written.write_text("[]")
    for path in (written, tmp_path / "absent.json"):
        with pytest.raises(ArgumentError, match=r"give what benchmark_algorithms\.py --output wrote"):
            read_costs(path)
