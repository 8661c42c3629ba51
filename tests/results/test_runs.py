"""Finished runs: found, named and grouped into rows."""

import pytest

from tests.invented import invented_records, write_run
from tests.results.test_tables import run_of
from timm_moe_dg.errors import RecordError
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import make_tables


@pytest.mark.parametrize(("second", "names"), [("ab", "ab"), ("xy", ["domain 0", "domain 1"])])
def test_domains_of_a_folder_have_the_names_that_its_runs_agree_on(second, names):
    runs = [run_of([0], (0.5, 0.5), (0.5, 0.5), domains=list("ab"))]
    runs.append(run_of([1], (0.5, 0.5), (0.5, 0.5), domains=list(second)))
    (table, *_) = make_tables(runs, ["training_domain_validation"])
    assert table.columns == [*names, "average"]


def test_settings_make_rows_of_their_own():
    common = {"steps": 5001, "model_kwargs": {"depth": 4}, "output": "a", "seed": 7}
    runs = [
        run_of((0,), **common),
        run_of((1,), **{**common, "output": "b", "seed": 8}),
        run_of((0,), **{**common, "steps": 15_001}),
        run_of((0,), **{**common, "model_kwargs": {"depth": 4, "router": "linear"}}),
        run_of((0,), **common, averaging="swad"),
        run_of((0,), **common, hparams={"penalty": 2}),
    ]
    (table,) = make_tables(runs, ["oracle"])
    assert sorted(map(str, table.rows)) == [
        "ERM + swad, vit",
        "ERM, vit, penalty=2, steps=5001",
        "ERM, vit, router=linear, steps=5001",
        "ERM, vit, steps=15001",
        "ERM, vit, steps=5001",
    ]
    assert [len(runs) for row, runs in table.runs.items() if row.variant == "steps=5001"] == [2]


def test_the_same_run_twice_is_an_error_that_names_both(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, invented_records((0,)))
    with pytest.raises(RecordError, match=r"a'.*b'\]: are both toy, ERM, vit, test domains \[0\]"):
        make_tables(find_runs([tmp_path])[0])
    assert len(find_runs([tmp_path / "a", tmp_path / "a"])[0]) == 1


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(RecordError, match="no such folder"):
        find_runs([tmp_path / "missing"])
