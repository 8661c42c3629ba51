"""Relative improvement: GMoE's Table 3 from its own accuracies, and within seeds by hand."""

from dataclasses import replace

import pytest

from tests.invented import invented_records
from tests.results.cells import cells_of, table_of
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.results.comparison import with_improvements
from timm_moe_dg.results.papers import FIGURES
from timm_moe_dg.results.runs import FinishedRun, RowKey
from timm_moe_dg.results.tables import make_tables

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
PRINTED = {"resnet101.tv_in1k": (1.1, 12.4), "gmoe_small_patch16": (10.5, 42.3)}  # GMoE, Table 3: IID Imp., OOD Imp.


def painted(model: str) -> list[float]:
    """What a model that is trained on Paint scores on Paint and on the five others (GMoE, Table 12)."""
    mine = [f for f in FIGURES if f.trained_on == "painting" and f.model == model]
    cells = {f.column: f.value / 100 for f in mine}
    assert len(cells) == 6
    by_name = {name.lower(): value for name, value in cells.items()}
    return [by_name["painting"], *(by_name[name] for name in DOMAINS if name != "painting")]


@pytest.mark.parametrize("model", PRINTED)
def test_the_papers_improvements_follow_from_its_accuracies(model: str) -> None:
    values = {name: painted(name) for name in ("resnet50.tv_in1k", model)}
    rows = {RowKey("ERM", name): [{0: value} for value in [*row, 0.0]] for name, row in values.items()}
    columns = ["painting (IID)", *(name for name in DOMAINS if name != "painting"), "average OOD"]
    table = table_of(rows, columns, rule="single_source", expected=1, runs={row: [] for row in rows})
    improved = with_improvements(table, "resnet50.tv_in1k")
    assert improved.columns[-2:] == ["IID improvement", "OOD improvement"]
    percents = [100 * cell.mean for cell in cells_of(improved)[RowKey("ERM", model)][-2:]]
    assert percents == pytest.approx(PRINTED[model], abs=0.06)
    assert [cell.mean for cell in cells_of(improved)[RowKey("ERM", "resnet50.tv_in1k")][-2:]] == [0.0, 0.0]


def held_out_run(model: str, domain: int, seed: int, value: float) -> FinishedRun:
    (record,) = invented_records([domain], at=(0,), trial_seed=seed, model=model)
    return FinishedRun(f"{model}{domain}{seed}", [replace(record, in_acc=(value,) * 3)])


def test_it_is_taken_within_a_seed_and_over_the_seeds_that_both_have() -> None:
    values = {"a": {0: (0.5, 0.25, 0.5), 1: (0.25, 0.5, 0.5)}, "b": {0: (0.75, 0.5, 0.5), 2: (0.5, 0.5, 0.5)}}
    runs = [
        held_out_run(model, domain, seed, value)
        for model, seeds in values.items()
        for seed, row in seeds.items()
        for domain, value in enumerate(row)
    ]
    (table, *_) = make_tables(runs, ["oracle"])
    improved = with_improvements(table, "a")
    assert improved.columns[-1] == "OOD improvement"
    assert "IID improvement" not in improved.columns
    assert cells_of(improved)[RowKey("ERM", "b")][-1].values == {0: pytest.approx((0.5 + 1.0 + 0.0) / 3)}
    with pytest.raises(ArgumentError, match=r"relative_to='c': names 0 rows of toy.*ERM, a; ERM, b"):
        with_improvements(table, "c")
    with pytest.raises(ArgumentError, match="relative_to='ERM': names 2 rows"):
        with_improvements(table, "ERM")
