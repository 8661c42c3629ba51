"""MoGE beyond its training coordinates: the shared path there, the routed one within, and an index that is saved."""

import json
import math

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.models.test_moge import SIZES, built
from timm_moe_dg.errors import ArgumentError, CheckpointError, MetadataError
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.trained import load_trained, set_coverage_radius

NEAR = torch.tensor([[10.0, 50.0], [12.0, 51.0], [-120.0, 30.0]])
FAR = torch.tensor([[134.0, -26.0], [-60.0, -80.0], [179.0, 0.0]])
RADIUS = 300.0


def indexed(radius: float | None = RADIUS) -> nn.Module:
    """A model that was trained near `NEAR`."""
    model = built("spherical_harmonics")
    model.set_coverage(NEAR)
    model.set_coverage_radius(radius)
    return model


def images(number: int = 3) -> Tensor:
    return torch.randn(number, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def saved(model: nn.Module, folder) -> dict[str, object]:
    save_network(model, folder, [str(index) for index in range(5)], data_config(model))
    return json.loads((folder / "config.json").read_text())["model_args"]


@torch.no_grad()
def test_within_the_radius_nothing_changes_and_far_outside_the_shared_path_answers():
    plain, model = built("spherical_harmonics"), indexed()
    assert torch.equal(model(images(), NEAR), plain(images(), NEAR))
    assert torch.equal(model(images(), FAR), plain(images()))
    assert (plain(images(), FAR) - plain(images())).abs().amax(1).min() > 1e-3
    places = torch.cat([NEAR[:1], FAR[:1], torch.full((1, 2), math.nan)])
    mixed = model(images(), places)
    torch.testing.assert_close(mixed[:1], plain(images(), NEAR[:1].expand(3, 2))[:1])
    torch.testing.assert_close(mixed[1:], plain(images())[1:])


@torch.no_grad()
@pytest.mark.parametrize("radius", [None, math.inf])
def test_without_a_radius_an_index_changes_nothing(radius):
    places = torch.cat([NEAR[:2], FAR[:1]])
    assert torch.equal(indexed(radius)(images(), places), built("spherical_harmonics")(images(), places))


def test_training_is_routed_everywhere():
    model = indexed(0.0).train()
    model(images(), FAR)
    routings = [block.mlp.routing for block in model.blocks if block.routed]
    assert routings
    assert all(routing.routed.all() for routing in routings)


@torch.no_grad()
def test_half_precision_falls_back_at_the_same_places():
    model = indexed().bfloat16()
    places = torch.cat([NEAR[:2], FAR[:1]])
    mixed = model(images().bfloat16(), places)
    assert torch.equal(mixed[2:], model(images().bfloat16())[2:])
    assert not torch.equal(mixed[:2], model(images().bfloat16())[:2])


@torch.no_grad()
def test_a_saved_folder_keeps_index_and_radius_and_another_radius_overrides(tmp_path):
    model, places = indexed(), torch.cat([NEAR[:2], FAR[:1]])
    args = saved(model, tmp_path)
    assert (args["coverage_points"], args["coverage_radius"]) == (3, RADIUS)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again.metadata_encoder.coverage.points, model.metadata_encoder.coverage.points)
    assert torch.equal(again(images(), places), model(images(), places))
    routed = built("spherical_harmonics")(images(), places)
    for other in (
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, coverage_radius=1e5).eval(),
        load_trained(f"local-dir:{tmp_path}", coverage_radius=math.inf),
    ):
        assert torch.equal(other(images(), places), routed)
    assert saved(load_trained(f"local-dir:{tmp_path}", coverage_radius=math.inf), tmp_path)["coverage_radius"] is None


def test_a_folder_without_an_index_takes_no_radius(tmp_path):
    saved(built("spherical_harmonics"), tmp_path)
    with pytest.raises(MetadataError, match=r"^coverage_radius=300.0: the model has no index[^\n]*$"):
        load_trained(f"local-dir:{tmp_path}", coverage_radius=RADIUS)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(1\): metadata_encoder.coverage.points"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True, coverage_points=3)


@torch.no_grad()
def test_an_index_does_not_hinder_starting_a_model_without_one(tmp_path):
    model = indexed()
    saved(model, tmp_path)
    weights = {"file": str(tmp_path / "model.safetensors"), "source": "", "num_classes": 5}
    start = timm.create_model("moge_tiny", pretrained=True, pretrained_cfg_overlay=weights, **SIZES).eval()
    assert start.metadata_encoder.coverage is None
    assert torch.equal(start(images(), FAR), built("spherical_harmonics")(images(), FAR))


@pytest.mark.slow
def test_the_program_of_torch_export_falls_back_too():
    model, places = indexed(), torch.cat([NEAR[:2], FAR[:1]])
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (images(2), places[1:]), dynamic_shapes=({0: batch}, {0: batch})).module()
    with torch.no_grad():
        torch.testing.assert_close(program(images(), places), model(images(), places), rtol=0, atol=1e-5)
        assert (program(images(), places) - model(images(), NEAR)).abs().amax(1)[2] > 1e-3


def test_mistakes_are_one_line():
    for radius in (-1.0, math.nan):
        with pytest.raises(MetadataError, match=r"^coverage_radius=.*: give a distance of 0 km or more[^\n]*$"):
            indexed().set_coverage_radius(radius)
    with pytest.raises(MetadataError, match=r"^coverage_radius=5.0: the model has no index[^\n]*$"):
        timm.create_model("moge_tiny", coverage_radius=5.0, **SIZES)
    ids = timm.create_model("moge_tiny", metadata_encoder="location_id", **SIZES)
    with pytest.raises(MetadataError, match=r"^metadata_encoder='LocationIdEmbedding': coverage needs [^\n]*$"):
        ids.set_coverage(NEAR)
    alone = timm.create_model("moge_tiny", shared_expert=False, **SIZES)
    alone.set_coverage(NEAR)
    with pytest.raises(MetadataError, match=r"^coverage_radius=5.0: shared_expert=False leaves no expert[^\n]*$"):
        alone.set_coverage_radius(5.0)
    with pytest.raises(ArgumentError, match=r"^coverage_radius=5.0: VisionTransformer has no metadata-routed experts$"):
        set_coverage_radius(timm.create_model("deit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=3), 5.0)
