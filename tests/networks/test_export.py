"""Programs are compared with their model, and refused when they differ."""

from unittest.mock import Mock

import pytest
import torch
from torch import nn

from timm_moe_dg.data.bands import Bands
from timm_moe_dg.errors import ExportError
from timm_moe_dg.layers.encoders.location import LocationEncoder, LocationIdEmbedding
from timm_moe_dg.layers.encoders.metadata import MetadataEncoder
from timm_moe_dg.networks import export
from timm_moe_dg.networks.export import Format, export_model, largest_difference, preprocessing, sample_metadata


class Sum(nn.Module):
    """Two logits, from images and perhaps metadata."""

    def forward(self, images, metadata=None):
        logits = images.flatten(1)[:, :2]
        return logits if metadata is None else logits + metadata


def inputs(number=5):
    return (torch.randn(number, 3, 4, 4, generator=torch.Generator().manual_seed(0)),)


@pytest.fixture
def plain_format(monkeypatch):
    """Replaces the table of formats by one whose programs are what the test says."""

    def put(program, write=lambda model, inputs, path: path.write_text("program")):
        monkeypatch.setattr(export, "FORMATS", {"plain": Format("model.txt", write, lambda path: program)})

    return put


def test_programs_that_differ_are_refused_even_by_not_a_number(tmp_path, plain_format):
    def off_by_size(images):
        return Sum()(images) + torch.tensor([0.0, -0.01 * len(images)])

    plain_format(off_by_size)
    path, difference = export_model(Sum(), inputs(), tmp_path, "plain", tolerance=0.06)
    assert difference == pytest.approx(0.05)
    assert path.read_text() == "program"
    with pytest.raises(ExportError, match=r"format='plain': its logits differ from the model's by 5.0e-02"):
        export_model(Sum(), inputs(), tmp_path, "plain", tolerance=0.04)
    plain_format(lambda images: Sum()(images) * float("nan"))
    with pytest.raises(ExportError, match="differ from the model's by nan"):
        export_model(Sum(), inputs(), tmp_path, "plain", tolerance=1e9)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_an_error_in_batches_of_one_size_alone_is_found(size):
    program = lambda images: Sum()(images) + 0.5 * (len(images) == size)  # noqa: E731
    assert largest_difference(Sum(), program, inputs(5)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("bands", "kind", "reading", "scale"),
    [
        (Bands(3), "RGB", "RGB without transparency", "integers from 0..maximum"),
        (Bands(3, ("nir", "red", "green"), True), "nir, red, green", "these bands", "real numbers, or whole ones with"),
    ],
)
def test_the_recipe_names_three_bands_that_are_not_rgb_and_their_scale(bands, kind, reading, scale):
    config = {"input_size": (3, 8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    config |= {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}
    model = Sum()
    model.bands = bands
    recipe = preprocessing(model, config, ("cat", "dog"))
    assert recipe["inputs"]["images"] == f"float32 (batch, 3, 8, 8), {kind}"
    assert recipe["read"].startswith(f"{reading}, in full depth")
    assert recipe["scale"].startswith(scale)


def test_a_format_that_cannot_take_the_model_is_named(tmp_path, plain_format):
    plain_format(Sum(), Mock(side_effect=RuntimeError("no such operator\nand a page of explanation")))
    with pytest.raises(ExportError, match=r"format='plain': cannot be made .*\(RuntimeError: no such operator\)$"):
        export_model(Sum(), inputs(), tmp_path, "plain")


def test_sampled_metadata_has_known_places_and_an_unknown_one():
    model = Sum()
    assert sample_metadata(model, 8) is None
    model.metadata_encoder = MetadataEncoder(LocationEncoder(8))
    for encoder, row in ((LocationEncoder(8), (2,)), (LocationIdEmbedding(3, 8), ())):
        model.metadata_encoder = MetadataEncoder(encoder)
        metadata = sample_metadata(model, 8)
        assert metadata.shape == (8, *row)
        _, present = model.metadata_encoder(torch.zeros(8, 1), metadata)  # checks types and ranges besides
        assert present.sum() == 7
        assert len({tuple(place.flatten().tolist()) for place in metadata}) > 3
