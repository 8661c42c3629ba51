"""Models per region: each on its own, joined by hand; tables by group; improvement over groups."""

from dataclasses import replace
from math import nan

import pytest

from tests.invented import invented_records
from tests.results.cells import cells_of
from timm_moe_dg.errors import ArgumentError, RecordError
from timm_moe_dg.results.comparison import with_improvements
from timm_moe_dg.results.runs import FinishedRun, RowKey, joined_regions, trained_region
from timm_moe_dg.results.tables import make_tables

NAMES = ["train Africa", "train Asia", "id Africa", "id Asia", "ood Oceania"]
IMAGES = {"Africa": 30, "Asia": 10}
ROW = RowKey("ERM", "vit")


def run(held_out, *evaluations, seed=0, **options) -> FinishedRun:
    """Evaluations are (validation accuracy, accuracy on Africa, accuracy on Asia)."""
    records = []
    base = invented_records(
        held_out, at=range(len(evaluations)), num_domains=5, trial_seed=seed, domains=NAMES, **options
    )
    for record, (validation, africa, asia) in zip(base, evaluations, strict=True):
        by_region = {"Africa": africa, "Asia": asia}
        scores = {"accuracy": (30 * africa + 10 * asia) / 40, "worst_accuracy": min(africa, asia), "f1_macro": 0.5}
        roles = {"id": {**scores, "worst_group": "", "group_accuracy": by_region, "num_samples": IMAGES}}
        records.append(replace(record, out_acc=(validation, validation, nan, nan, nan), roles=roles))
    return FinishedRun(f"{held_out}{seed}{options}", records)


AFRICA, ASIA, ALL = [1, 2, 3, 4], [0, 2, 3, 4], [2, 3, 4]


def test_which_region_a_run_was_trained_on() -> None:
    assert trained_region(run(AFRICA, (0.5, 0.5, 0.5))) == "Africa"
    assert trained_region(run(ALL, (0.5, 0.5, 0.5))) is None
    (plain,) = invented_records([1, 2], at=(0,))
    assert trained_region(FinishedRun("", [plain])) is None


def test_every_regions_model_is_asked_about_its_own() -> None:
    africa = run(AFRICA, (0.25, 1.0, 0.0), (0.75, 0.5, 0.125))  # the second is selected
    asia = run(ASIA, (0.75, 0.0, 0.25), (0.5, 0.0, 1.0))  # the first
    scores = joined_regions([africa, asia]).roles["id"]
    assert scores["group_accuracy"] == {"Africa": 0.5, "Asia": 0.25}
    assert scores["accuracy"] == (30 * 0.5 + 10 * 0.25) / 40  # of images
    assert (scores["worst_group"], scores["worst_accuracy"]) == ("Asia", 0.25)
    with pytest.raises(RecordError, match=r"lack runs trained on \['Asia'\]"):
        joined_regions([africa])


def test_later_images_of_every_region_are_joined_too() -> None:
    """As in FMoW, whose test under shift has all regions, and images of none, which no model answers for."""
    runs = []
    for regional in (run(AFRICA, (0.5, 1.0, 0.0)), run(ASIA, (0.5, 0.0, 0.25))):
        (record,) = regional.records
        scores = record.roles["id"]
        halved = {region: value / 2 for region, value in scores["group_accuracy"].items()} | {"Other": 1.0}
        shifted = {**scores, "group_accuracy": halved, "num_samples": {"Africa": 10, "Asia": 30, "Other": 5}}
        runs.append(FinishedRun("", [replace(record, roles={"id": scores, "ood": shifted})]))
    roles = joined_regions(runs).roles
    assert roles["id"]["group_accuracy"] == {"Africa": 1.0, "Asia": 0.25}
    assert roles["ood"]["group_accuracy"] == {"Africa": 0.5, "Asia": 0.125}
    assert roles["ood"]["accuracy"] == (10 * 0.5 + 30 * 0.125) / 40
    (table,) = make_tables(runs)
    assert {"ood accuracy", "ood worst group"} < set(table.columns)


def test_tables_keep_them_apart_from_models_of_all_regions() -> None:
    runs = [run(ALL, (0.5, 0.75, 0.5), seed=seed) for seed in range(2)]
    runs += [run(AFRICA, (0.5, 0.5, 0.0)), run(ASIA, (0.5, 0.0, 0.25)), run(AFRICA, (0.5, 0.5, 0.0), seed=1)]
    official, regional = make_tables(runs, by_group=True)
    assert (official.rule, regional.rule) == ("official", "per_region")
    assert official.columns == ["id accuracy", "id worst group", "id F1-macro", "id Africa", "id Asia"]
    assert [cell.mean for cell in cells_of(official)[ROW][-2:]] == [0.75, 0.5]
    assert regional.columns == ["id accuracy", "id worst group", "id Africa", "id Asia"]
    assert cells_of(regional)[ROW][0].values == {0: 0.4375}
    assert regional.missing == ["ERM, vit: trial seeds [1], or a region's model"]


def test_improvement_over_groups_if_they_are_shown() -> None:
    runs = [run(ALL, (0.5, 0.75, 0.5)), run(ALL, (0.5, 0.5, 0.25), model="other")]
    (table,) = make_tables(runs, by_group=True)
    assert cells_of(with_improvements(table, "other"))[ROW][-1].mean == pytest.approx((0.5 + 1.0) / 2)
    (table,) = make_tables(runs)
    whole = with_improvements(table, "other")
    assert whole.columns[-1] == "IID improvement"
    assert cells_of(whole)[ROW][-1].mean == pytest.approx((0.75 * 30 + 5) / (15 + 2.5) - 1)


def test_a_row_without_models_per_region_is_no_row_of_their_table() -> None:
    runs = [run(ALL, (0.5, 0.75, 0.5), model="whole"), run(AFRICA, (0.5, 0.5, 0.0)), run(ASIA, (0.5, 0.0, 0.25))]
    official, regional = make_tables(runs)
    assert list(official.runs) == list(official.rows) == [RowKey("ERM", "whole")]
    assert list(regional.runs) == list(regional.rows) == [ROW]
    with pytest.raises(ArgumentError, match=r"relative_to='whole': names 0 rows of .*a model per region"):
        with_improvements(regional, "whole")


def held_out_run(region: str, ood: float, ids: dict[str, float], seed: int) -> FinishedRun:
    """A run that holds out one of three regions, which is then the "ood" group."""
    names = [f"{role} {name}" for role in ("train", "id") for name in ("Africa", "Asia", "Europe")]
    held_out = [names.index(f"train {region}"), 3, 4, 5]
    (record,) = invented_records(held_out, at=(0,), num_domains=6, trial_seed=seed, domains=names)

    def scores(groups):
        mean = sum(groups.values()) / len(groups)
        return {"accuracy": mean, "worst_accuracy": min(groups.values()), "f1_macro": 0.5, "group_accuracy": groups}

    return FinishedRun(f"{region}{seed}", [replace(record, roles={"id": scores(ids), "ood": scores({region: ood})})])


def test_regions_held_out_in_turn_share_a_table_of_means_over_them() -> None:
    runs = [
        held_out_run("Africa", 0.2 + seed / 10, {"Asia": 0.8, "Europe": 0.6}, seed)
        for seed in (0, 1)
    ] + [held_out_run("Asia", 0.5, {"Africa": 0.4, "Europe": 1.0}, seed) for seed in (0, 1)]  # fmt: skip
    (table,) = make_tables(runs, by_group=True)
    assert table.title.endswith("held out in turn: Africa; Asia")
    means = dict(zip(table.columns, [cell.mean for cell in cells_of(table)[ROW]], strict=True))
    assert means["id accuracy"] == pytest.approx((0.7 + 0.7) / 2)
    assert means["ood accuracy"] == pytest.approx(((0.2 + 0.5) / 2 + (0.3 + 0.5) / 2) / 2)
    # A region counts in the runs that it has this role in
    assert means["ood Africa"] == pytest.approx(0.25)
    assert means["id Africa"] == pytest.approx(0.4)
    assert means["id Europe"] == pytest.approx(0.8)
    assert not table.missing
    (partial,) = make_tables(runs[:-1], by_group=True)
    assert partial.missing == [f"{ROW}: held out Asia, trial seeds [1]"]
    assert list(cells_of(partial)[ROW][0].values) == [0]


def test_a_region_with_a_comma_in_its_name_is_one_region() -> None:
    runs = []
    for region in ("Africa", "Asia"):
        (record,) = held_out_run(region, 0.5, {"Europe": 0.5}, 0).records
        names = [name.replace("Africa", "Africa, south") for name in record.args["domains"]]
        runs.append(FinishedRun(region, [replace(record, args={**record.args, "domains": names})]))
    (table,) = make_tables(runs)
    assert table.title.endswith("held out in turn: Africa, south; Asia")
