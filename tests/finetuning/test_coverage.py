"""What a run tells a MoGE model about its training coordinates, and the radius that validation gives."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.data import Split
from timm_moe_dg.data.readers.digits import geo_digits
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.coverage import cover_training_coordinates, validated_radius
from timm_moe_dg.layers import thin_coordinates
from timm_moe_dg.protocols.options import RunOptions

SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}


@pytest.fixture(scope="module")
def domains():
    return geo_digits()


def plan(domains, radius, model="moge_tiny"):
    """What is read of a plan: Africa and Asia are trained on."""
    none = Split(np.arange(0), np.arange(0))
    splits = [domain.split or none for domain in domains]
    options = replace(RunOptions(), model=model, coverage_radius=radius)
    return SimpleNamespace(options=options, domains=domains, training=[0, 1], splits=splits)


def moge(**options) -> nn.Module:
    return timm.create_model("moge_tiny", moe_layers=[1], **{**SIZES, **options}).eval()


def rows(domain, part: str) -> Tensor:
    return torch.from_numpy(domain.metadata[getattr(domain.split, part)])


def test_the_index_is_of_the_in_splits_of_training_domains_alone(domains):
    model = moge()
    cover_training_coordinates(model, plan(domains, None))
    trained = torch.cat([rows(domain, "inside") for domain in domains[:2]])
    expected = thin_coordinates(trained).points
    coverage = model.metadata_encoder.coverage
    torch.testing.assert_close(coverage.points / 1e6, expected.float(), rtol=0, atol=1e-4)
    assert coverage.radius is None
    cover_training_coordinates(model, plan(domains, 123.0))
    assert model.metadata_encoder.coverage.radius == 123.0


def test_auto_is_the_smallest_radius_that_covers_all_validation_images_and_no_held_out_continent(domains):
    model = moge()
    cover_training_coordinates(model, plan(domains, "auto"))
    coverage = model.metadata_encoder.coverage
    validation = torch.cat([rows(domain, "outside") for domain in domains[:2]])
    assert len(validation) == 400
    assert coverage(validation).all()
    assert coverage.distance(validation).max() > coverage.radius - 1.0
    other = [domain for domain in domains if domain.group in ("Oceania", "North America")]
    assert not any(coverage(torch.as_tensor(domain.metadata)).any() for domain in other)


def test_images_without_coordinates_have_no_say():
    known = torch.arange(101.0)
    unknown = torch.full((50,), float("nan"))
    assert validated_radius(torch.cat([known, unknown])) == 100.0
    with pytest.raises(ArgumentError, match=r"^coverage_radius='auto': no validation image has coordinates[^\n]*$"):
        validated_radius(unknown)


@pytest.mark.parametrize("radius", [200.0, "auto"])
def test_a_radius_is_refused_where_nothing_routes_by_coordinates(domains, radius):
    shared = moge()
    shared.set_expert_mode("shared")
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES)
    for model in (moge(metadata_encoder="location_id"), shared, dense):
        cover_training_coordinates(model, plan(domains, None))  # which asks for nothing
        with pytest.raises(
            ArgumentError, match=rf"^coverage_radius={radius!r}: .* does not route by coordinates[^\n]*$"
        ):
            cover_training_coordinates(model, plan(domains, radius))
