"""Columns beside coordinates: an encoder for each, concatenated, and what is unknown among them."""

import pytest
import torch
import torch.nn.functional as F

from timm_moe_dg.errors import MetadataError
from timm_moe_dg.layers.encoders import ColumnsEncoder, LocationIdEmbedding, MetadataEncoder, SinCosEncoder
from timm_moe_dg.layers.encoders.metadata import COLUMN_FEATURES, NumberEncoder

NAN = float("nan")
STATISTICS = {"month": (6.5, 3.0), "elevation": (500.0, 250.0)}
METADATA = torch.tensor(
    [
        [10.0, 20.0, 1.0, 900.0],
        [NAN, NAN, 7.0, 100.0],  # no place
        [-30.0, 5.0, NAN, 400.0],  # no month
        [-30.0, 5.0, NAN, NAN],
        [NAN, NAN, NAN, NAN],
    ]
)


def encoder() -> ColumnsEncoder:
    torch.manual_seed(0)
    return ColumnsEncoder(SinCosEncoder(8), STATISTICS)


def written_out(module: ColumnsEncoder, row: list[float]) -> torch.Tensor:
    """One sample's embedding, part by part."""
    place = module.location(torch.tensor([row[:2]]))[0] if row[0] == row[0] else torch.zeros(8)
    parts = [place]
    for number, (mean, std), value in zip(module.numbers, STATISTICS.values(), row[2:], strict=True):
        hidden, last = number.hidden, number.last
        standard = torch.tensor([(value - mean) / std])
        known = F.gelu(standard @ hidden.weight.T + hidden.bias) @ last.weight.T + last.bias
        parts.append(known if value == value else torch.zeros(COLUMN_FEATURES))
    return torch.cat(parts)


def test_the_embedding_is_the_place_s_and_each_column_s_and_zeros_stand_for_what_is_unknown():
    module = encoder()
    found = module(METADATA)
    assert found.shape == (5, module.out_features) == (5, 8 + 2 * COLUMN_FEATURES)
    for row, values in zip(found, METADATA.tolist(), strict=True):
        torch.testing.assert_close(row, written_out(module, values))
    assert (found[0] != 0).any()
    assert not found[4].any()


def test_a_sample_has_metadata_if_anything_of_it_is_known_and_gradients_stay_finite():
    module = MetadataEncoder(encoder())
    embedding, present = module(torch.zeros(5, 1), METADATA)
    assert present.tolist() == [True, True, True, True, False]
    embedding[present].square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in module.parameters())


def test_a_column_moves_the_embedding_by_itself_and_only_its_own_part():
    module, other = encoder(), METADATA[:1].clone()
    other[0, 3] += 100.0
    changed = (module(METADATA[:1]) != module(other))[0]
    assert changed[-COLUMN_FEATURES:].any()
    assert not changed[:-COLUMN_FEATURES].any()


def test_the_encoder_is_the_same_under_torchscript():
    module = MetadataEncoder(encoder()).eval()
    scripted = torch.jit.script(module)
    for one, other in zip(scripted(torch.zeros(5, 1), METADATA), module(torch.zeros(5, 1), METADATA), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("metadata", [torch.zeros(3, 2), torch.zeros(3), torch.zeros(3, 5)])
def test_another_width_is_refused_with_the_columns(metadata):
    with pytest.raises(MetadataError, match=r"give \(batch, 4\): longitude, latitude, month, elevation"):
        MetadataEncoder(encoder())(torch.zeros(3, 1), metadata)


def test_mistakes_are_named():
    with pytest.raises(MetadataError, match=r"latitude=95\.0"):
        MetadataEncoder(encoder())(torch.zeros(1, 1), torch.tensor([[10.0, 95.0, 1.0, 1.0]]))
    with pytest.raises(MetadataError, match=r"metadata_columns=\['month', 'elevation'\]: columns stand beside coord"):
        ColumnsEncoder(LocationIdEmbedding(4), STATISTICS)
    with pytest.raises(MetadataError, match=r"std=0\.0: give a positive one"):
        NumberEncoder(1.0, 0.0)
