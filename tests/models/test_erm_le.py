"""The ERM+LE baseline: its formula, its fallback, its weights."""

from pathlib import Path

import timm
import torch
from timm.models import save_for_hf

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.models.cases import overlay

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 4}
PLACES = torch.tensor([[10.0, 50.0], [-120.0, 30.0], [float("nan"), 0.0]])


def test_the_location_joins_the_feature_before_two_layers() -> None:
    model, images = timm.create_model("erm_le_tiny_patch16", **SIZES).eval(), torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        features = model.forward_features(images)[:, 0]
        encoded = torch.cat([model.metadata_encoder.encoder(PLACES[:2]), torch.zeros(1, 256)])
        hidden = torch.nn.functional.gelu(model.fuse(torch.cat([features, encoded], dim=1)))
        torch.testing.assert_close(model(images, PLACES), model.head(hidden))
        assert torch.equal(model(images)[2], model(images, PLACES)[2])
        assert not torch.equal(model(images)[0], model(images, PLACES)[0])


def test_it_starts_from_the_dense_weights_and_comes_back_from_its_own(tmp_path: Path) -> None:
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES)
    torch.nn.init.normal_(dense.norm.weight)
    weights = {"state_dict": dense.state_dict(), "num_classes": 4}
    model = timm.create_model(
        "erm_le_tiny_patch16", pretrained=True, pretrained_cfg_overlay=weights, metadata_drop=0.1, **SIZES
    ).eval()
    for name, value in dense.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    pooled = {"global_pool": "avg", "pretrained": True, "pretrained_cfg_overlay": weights}
    assert torch.equal(timm.create_model("erm_le_tiny_patch16", **pooled, **SIZES).fc_norm.weight, dense.norm.weight)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(images, PLACES), model(images, PLACES))
    mixture = timm.create_model("gmoe", backbone="erm_le_tiny_patch16", **SIZES, **overlay(model.state_dict(), 4))
    with torch.no_grad():
        torch.testing.assert_close(mixture.eval()(images, PLACES), model(images, PLACES))


@torch.no_grad()
def test_logits_are_the_head_on_forward_features() -> None:
    model, images = timm.create_model("erm_le_tiny_patch16", **SIZES).eval(), torch.randn(3, 3, 16, 16)
    tokens = model.forward_features(images)
    assert tokens.shape == (3, 5, 24)
    assert torch.equal(model.forward_head(tokens), model(images))
    assert torch.equal(model.forward_head(tokens, metadata=PLACES), model(images, PLACES))
    assert torch.equal(model.head(model.forward_head(tokens, pre_logits=True)), model(images))
    model.reset_classifier(0, "")
    assert model(images).shape == (3, 5, 24)
