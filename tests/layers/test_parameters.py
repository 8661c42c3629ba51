"""Shapes of parameters, and the names without weight decay."""

import pytest
from torch import nn

from tests.models.cases import BY_NAME
from timm_moe_dg.layers import CosineRouter, GeoMoeMlp, OwnParameters, undecayed_parameters


@pytest.mark.parametrize("layer", [CosineRouter(8, 4, 2), GeoMoeMlp(8, 16, context_features=12)])
def test_no_parameter_is_a_scalar(layer: nn.Module) -> None:
    assert {parameter.ndim for parameter in layer.parameters()} <= {1, 2, 3}


def test_absent_biases_are_not_named() -> None:
    model = BY_NAME["gmoe_tiny_patch16"].small(proj_bias=False)
    assert undecayed_parameters(model) <= dict(model.named_parameters()).keys()
    assert undecayed_parameters(CosineRouter(8, 4, 2)) == {"codes", "logit_scale"}


@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_model_names_what_does_not_decay(name: str) -> None:
    model = BY_NAME[name].small()
    assert {name.rpartition(".")[2] for name in model.no_weight_decay()} >= {"bias", "codes", "logit_scale"}


def test_a_module_without_an_initialization_is_named() -> None:
    with pytest.raises(NotImplementedError, match="OwnParameters defines no reset_parameters"):
        OwnParameters().init_weights()
