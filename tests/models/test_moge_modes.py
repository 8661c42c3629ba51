"""Modes of MoGE models: routed, shared, forced, and the fallback of each sample without metadata."""

import json

import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.errors import CheckpointError, MetadataError, RouterError
from timm_moe_dg.losses import moge_losses
from timm_moe_dg.models._load import upcycle_filter_fn
from timm_moe_dg.networks import save_network

SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}
ENCODERS = {
    "spherical_harmonics": torch.tensor([[10.0, 50.0], [-120.0, 30.0], [100.0, -20.0], [0.0, 0.0], [179.0, 80.0]]),
    "sincos": torch.tensor([[10.0, 50.0], [-120.0, 30.0], [100.0, -20.0], [0.0, 0.0], [179.0, 80.0]]),
    "location_id": torch.tensor([0, 3, 7, 8, 4]),
}


def built(encoder: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("moge_tiny", metadata_encoder=encoder, num_locations=9, **SIZES).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.mul_(20)  # so that experts matter
    return model


def unknown(metadata: Tensor, rows: list[int]) -> Tensor:
    changed = metadata.clone()
    changed[rows] = float("nan") if metadata.is_floating_point() else -1
    return changed


@pytest.mark.parametrize("encoder", ENCODERS)
def test_samples_without_metadata_get_exactly_the_shared_paths_logits(encoder: str) -> None:
    model, metadata = built(encoder), ENCODERS[encoder]
    images = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        routed, mixed, shared = model(images, metadata), model(images, unknown(metadata, [1, 3])), model(images)
        assert torch.equal(mixed[[1, 3]], shared[[1, 3]])
        torch.testing.assert_close(mixed[[0, 2, 4]], routed[[0, 2, 4]])
        assert (routed - shared).abs().amax(1).min() > 1e-3
        model.set_expert_mode("shared")
        assert torch.equal(model(images, metadata), shared)


def test_half_a_pair_of_coordinates_is_no_metadata() -> None:
    model, images = built("spherical_harmonics"), torch.randn(2, 3, 16, 16)
    half = torch.tensor([[float("nan"), 10.0], [10.0, float("nan")]])
    with torch.no_grad():
        assert torch.equal(model(images, half), model(images))


def test_a_forced_expert_answers_for_all_and_experts_differ() -> None:
    model, metadata = built("sincos"), ENCODERS["sincos"]
    images = torch.randn(5, 3, 16, 16)
    answers = []
    with torch.no_grad():
        for expert in range(6):
            model.set_expert_mode(expert)
            answers.append(model(images, metadata))
            assert torch.equal(model(images), answers[-1])  # it needs no metadata
        assert min((a - b).abs().max() for a in answers for b in answers if a is not b) > 1e-3
    with pytest.raises(RouterError, match="6"):
        model.set_expert_mode(6)


def test_encoders_by_name_and_their_errors() -> None:
    with pytest.raises(MetadataError, match=r"metadata_encoder='gps'.*sincos.*satclip"):
        timm.create_model("moge_tiny", metadata_encoder="gps", **SIZES)
    model = timm.create_model("moge_tiny", metadata_drop=0.25, metadata_features=32, **SIZES)
    assert model.metadata_encoder.encoder.drop.p == 0.25
    assert model.metadata_encoder.out_features == 32


def test_a_model_without_shared_experts_is_saved_scripted_trained_and_upcycled_as_such(tmp_path) -> None:
    model = timm.create_model("moge_tiny", shared_expert=False, router_noise=0.0, metadata_drop=0.0, **SIZES)
    save_network(model, tmp_path, "abcde", {"input_size": (3, 16, 16)})
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["shared_expert"] is False
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images, places = torch.randn(5, 3, 16, 16), ENCODERS["sincos"]
    expected = model.eval()(images, places)
    torch.testing.assert_close(again(images, places), expected)
    torch.testing.assert_close(torch.jit.script(model)(images, places), expected)
    with pytest.raises(MetadataError, match=r"metadata of samples=\[2\]"):
        model(images, unknown(places, [2]))

    model.train()(images, places).sum().backward()
    losses = moge_losses(model, torch.arange(5))
    assert "supcon_loss" not in losses  # it is the shared expert's

    dense = timm.create_model("deit_tiny_patch16_224", **SIZES)
    upcycle_filter_fn(dense.state_dict(), model)  # complete: would name what is missing
    with pytest.raises(CheckpointError, match="not in the model"):
        upcycle_filter_fn(timm.create_model("moge_tiny", **SIZES).state_dict(), model)
