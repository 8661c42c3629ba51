"""A classifier's inputs are what its outputs follow from, whatever the network, and nothing stays behind."""

import pytest
import timm
import torch

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.networks.trained import WithFeatures

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3}


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("gmoe_tiny_patch16", {**SMALL, "moe_layers": (1,), "img_size": 32}),
        ("moge_tiny", {**SMALL, "moe_layers": (1,), "img_size": 32}),
        ("erm_le_tiny_patch16", {**SMALL, "img_size": 32}),
        ("resnet18", {}),
    ],
)
def test_outputs_follow_from_what_was_collected(name, kwargs):
    network = timm.create_model(name, num_classes=5, **kwargs).eval()
    inputs = [torch.randn(2, 3, 32, 32)]
    if hasattr(network, "metadata_encoder"):
        inputs.append(torch.tensor([[10.0, 20.0], [-10.0, 5.0]]))
    with torch.no_grad():
        logits, features = WithFeatures(network)(*inputs)
        assert torch.equal(network(*inputs), logits)
    assert features.shape == (2, network.num_features)
    assert torch.allclose(network.get_classifier()(features), logits, atol=1e-6)
    assert not network.get_classifier()._forward_pre_hooks


def test_a_network_without_a_single_classifier_is_refused():
    with pytest.raises(ArgumentError, match="model='VisionTransformer': has no single classifier"):
        WithFeatures(timm.create_model("vit_tiny_patch16_224", num_classes=0, depth=1))
