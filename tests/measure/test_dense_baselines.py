"""The dense twin is the network that a mixture is made of, and the FLOP-equivalent computes as much."""

import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.measure.cost import count_macs
from timm_moe_dg.measure.dense_baselines import (
    EQUIVALENT,
    TWIN,
    layer_and_baselines,
    mixture_layers,
    model_and_baselines,
    random_inputs,
)


@pytest.mark.parametrize(
    ("make", "name", "options"),
    [
        (model_and_baselines, "gmoe_tiny_patch16", {"img_size": 32}),
        (model_and_baselines, "moge_tiny", {"img_size": 32}),
        (model_and_baselines, "gmoe", {"backbone": "test_convnext2"}),
        (layer_and_baselines, "moge_tiny", {"img_size": 32}),
        (layer_and_baselines, "gmoe", {"backbone": "test_vit"}),
        (layer_and_baselines, "gmoe", {"backbone": "test_convnext2"}),
    ],
)
def test_inputs_fit_and_the_equivalent_lies_between_the_twin_and_the_mixture(make, name, options):
    macs = {}
    for label, maker in make(name, options).items():
        model = maker().eval()
        inputs = random_inputs(model, name, options, 1, "cpu")
        macs[label] = count_macs(model, [part.detach() for part in inputs])
    # The router adds at most as much: its projection is 256 wide, the smallest of these feed-forwards 64
    assert macs[TWIN] < macs[EQUIVALENT] < macs[name] < 2 * macs[EQUIVALENT]


def test_the_dense_twin_has_the_parameters_of_the_source():
    twin = model_and_baselines("gmoe_tiny_patch16", {"img_size": 32})[TWIN]()
    dense = timm.create_model("deit_tiny_patch16_224", img_size=32)
    shapes = [{name: value.shape for name, value in model.named_parameters()} for model in (twin, dense)]
    assert shapes[0] == shapes[1]


def test_any_model_is_compared_with_besides_and_a_dense_model_has_no_mixture_layers():
    makers = model_and_baselines("gmoe_tiny_patch16", {"num_classes": 3}, "test_vit")
    assert list(makers) == ["gmoe_tiny_patch16", TWIN, EQUIVALENT, "test_vit"]
    assert makers["test_vit"]()(torch.zeros(1, 3, 160, 160)).shape == (1, 3)
    with pytest.raises(ArgumentError, match=r"model='test_vit': has no mixture layers"):
        mixture_layers(timm.create_model("test_vit"))
