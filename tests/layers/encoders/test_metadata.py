"""From metadata to an embedding: who has some, what the absent are given, and what is refused."""

import pytest
import torch
from torch import nn

from timm_moe_dg.errors import MetadataError
from timm_moe_dg.layers.encoders import MetadataEncoder, NoMetadata

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


def test_a_layer_that_reads_none_ignores_what_comes():
    for metadata in (None, torch.ones(3, 2)):
        embedding, present = NoMetadata(4)(IMAGES, metadata)
        assert torch.equal(embedding, torch.zeros(3, 4))
        assert not present.any()


def test_mistakes_are_named():
    with pytest.raises(MetadataError, match=r"metadata shape=\(2, 2\): give one row per image, 3"):
        encoder()(IMAGES, torch.zeros(2, 2))
    with pytest.raises(MetadataError, match="metadata_features=None: give the encoder's width"):
        MetadataEncoder(nn.ReLU())
