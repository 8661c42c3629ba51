"""`pretrained=True` through timm's builder and the Hub's own client, from the cache that a download leaves behind."""

import json
import logging
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from timm.models import save_for_hf
from torch import nn

from tests.hub_server import COMMIT, fill_cache
from tests.models.backbones import BACKBONES
from tests.models.cases import BY_NAME, CASES, SMALL, randomize
from timm_moe_dg.errors import CheckpointError

pytestmark = pytest.mark.slow  # many networks


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def dense_models() -> dict[str, nn.Module]:
    """One small dense model for each Hub repository that a registered model is upcycled from."""
    models = {}
    for seed, (source, case) in enumerate({case.dense: case for case in CASES}.items()):
        torch.manual_seed(seed)
        models[source] = randomize(case.small_dense(num_classes=1000), seed=seed).eval()
    return models


@pytest.fixture(scope="module")
def cache(dense_models: dict[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the Hub's client would have left behind after downloading every source."""
    folder = tmp_path_factory.mktemp("hub")
    for source, model in dense_models.items():
        fill_cache(folder, f"timm/{source}", model.state_dict())
    return folder


@torch.no_grad()
def test_every_model_computes_what_its_dense_source_computes(registered, dense_models, cache, caplog):
    options = {**SMALL, "img_size": registered.small_size, "cache_dir": cache, "pretrained": True}
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        same, other = (timm.create_model(registered.name, **{**options, "num_classes": n}).eval() for n in (1000, 7))
    dense, images = dense_models[registered.dense], registered.images()
    torch.testing.assert_close(same(images), dense(images), rtol=0, atol=1e-5)
    # With other classes only the classifier is new
    torch.testing.assert_close(other.forward_features(images), dense.forward_features(images), rtol=0, atol=1e-5)
    assert other(images).shape == (3, 7)
    line = f"Upcycled from timm/{registered.dense}: 12 experts filled in 2 mixture layers."
    assert [message for message in caplog.messages if "pcycled" in message] == [line] * 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["moge", "upcycled"])
def test_a_trained_mixture_comes_back_bit_by_bit(name, tmp_path):
    moge = BY_NAME["moge_tiny"]
    model = (
        moge.small(num_classes=5, moe_layers=[1, 3], num_experts=4) if name == "moge" else BACKBONES["Mlp"].mixture()
    )
    save_for_hf(randomize(model).eval(), tmp_path / "saved", safe_serialization=True)
    fill_cache(tmp_path, f"someone/{name}", model.state_dict())
    config = tmp_path / f"models--someone--{name}" / "snapshots" / COMMIT / "config.json"
    config.write_text(json.dumps(json.loads((tmp_path / "saved" / "config.json").read_text())))
    again = timm.create_model(f"hf-hub:someone/{name}", pretrained=True, cache_dir=tmp_path).eval()
    assert torch.equal(again(moge.images()), model(moge.images()))


def test_a_missing_source_and_an_incomplete_one_are_errors_although_the_classes_differ(dense_models, tmp_path):
    case = BY_NAME["gmoe_tiny_patch16"]
    options = {**SMALL, "img_size": 32, "num_classes": 7, "pretrained": True, "cache_dir": tmp_path}
    with pytest.raises(LocalEntryNotFoundError):
        timm.create_model(case.name, **options)
    weights = dense_models[case.dense].state_dict()
    del weights["blocks.1.mlp.fc1.weight"]
    fill_cache(tmp_path, f"timm/{case.dense}", weights)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(1\): blocks\.1\.mlp\.fc1\.weight"):
        timm.create_model(case.name, **options)
