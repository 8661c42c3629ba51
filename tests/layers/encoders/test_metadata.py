"""Metadata encoders: samples with and without metadata, and columns beside coordinates."""

import torch
import torch.nn.functional as F
from torch import nn

from timm_moe_dg.layers.encoders.location import SinCosEncoder
from timm_moe_dg.layers.encoders.metadata import COLUMN_FEATURES, ColumnsEncoder, MetadataEncoder

IMAGES = torch.zeros(3, 1, dtype=torch.float32)


def encoder() -> MetadataEncoder:
    torch.manual_seed(0)
    return MetadataEncoder(nn.Linear(2, 4), 4)


def test_rows_with_nan_are_absent_and_do_not_reach_the_others_or_the_gradients():
    module, nan = encoder(), float("nan")
    metadata = torch.tensor([[1.0, 2.0], [nan, 2.0], [3.0, 4.0]])
    embedding, present = module(IMAGES, metadata)
    assert present.tolist() == [True, False, True]
    torch.testing.assert_close(embedding[present], module.encoder(metadata[present]))
    embedding.sum().backward()
    assert module.encoder.weight.grad.isfinite().all()


def test_without_metadata_nothing_is_known_and_every_parameter_gets_a_gradient_of_zero():
    module = encoder()
    embedding, present = module(IMAGES)
    assert not present.any()
    assert torch.equal(embedding, torch.zeros(3, 4))
    embedding.sum().backward()
    assert all(not parameter.grad.any() for parameter in module.parameters())
    assert not module.eval()(IMAGES)[0].requires_grad


# Columns beside coordinates

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


def columns_encoder() -> ColumnsEncoder:
    torch.manual_seed(0)
    return ColumnsEncoder(SinCosEncoder(8), STATISTICS)


def written_out(module: ColumnsEncoder, row: list[float]) -> torch.Tensor:
    """One sample's embedding, part by part."""
    place = module.location(torch.tensor([row[:2]]))[0] if row[0] == row[0] else torch.zeros(8)
    parts = [place]
    for number, (mean, std), value in zip(module.numbers, STATISTICS.values(), row[2:], strict=True):
        hidden, last = number.hidden, number.last
        standard = torch.tensor([(value - mean) / std])
        embedding = F.gelu(standard @ hidden.weight.T + hidden.bias) @ last.weight.T + last.bias
        parts.append(embedding if value == value else torch.zeros(COLUMN_FEATURES))
    return torch.cat(parts)


def test_the_embedding_is_the_place_s_and_each_column_s_and_zeros_stand_for_what_is_unknown():
    module = columns_encoder()
    embeddings = module(METADATA)
    assert embeddings.shape == (5, module.out_features) == (5, 8 + 2 * COLUMN_FEATURES)
    for row, values in zip(embeddings, METADATA.tolist(), strict=True):
        torch.testing.assert_close(row, written_out(module, values))
    assert (embeddings[0] != 0).any()
    assert not embeddings[4].any()


def test_a_sample_has_metadata_if_anything_of_it_is_known_and_gradients_stay_finite():
    module = MetadataEncoder(columns_encoder())
    embedding, present = module(torch.zeros(5, 1), METADATA)
    assert present.tolist() == [True, True, True, True, False]
    embedding[present].square().sum().backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in module.parameters())
