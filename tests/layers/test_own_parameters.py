"""Parameters of modules' own: older scalar values load, and the names without weight decay survive scripting."""

import pytest
import torch
from torch import nn

from tests.models.cases import BY_NAME, CASES, Case, overlay
from timm_moe_dg.layers import CosineRouter, GeoMoeMlp, OwnParameters, undecayed_parameters


def scalars(model: nn.Module) -> set[str]:
    """Names of the scales and gates, which once had the shape ()."""
    return {name for name in model.state_dict() if name.endswith(("logit_scale", "gamma"))}


def as_before(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict as it was written when scales and gates had no axis."""
    return {name: value.reshape(()) if name in scalars(model) else value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("layer", [CosineRouter(8, 4, 2), GeoMoeMlp(8, 16, context_features=12)])
def test_no_parameter_is_a_scalar(layer: nn.Module) -> None:
    assert {parameter.ndim for parameter in layer.parameters()} <= {1, 2, 3}
    assert scalars(layer)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_older_checkpoint_with_scalars_computes_the_same_bit_by_bit(case: Case) -> None:
    model = case.small()
    older = as_before(model)
    assert [value.shape for name, value in older.items() if name in scalars(model)] == [()] * len(scalars(model))
    loaded, through_timm = case.small(), case.small(**overlay(older))
    loaded.load_state_dict(older)
    for other in (loaded, through_timm):
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
        assert torch.equal(other.eval()(*case.inputs()), model.eval()(*case.inputs()))
    assert all(older[name].shape == () for name in scalars(model))  # what was given is left as it was


def test_another_shape_is_still_refused() -> None:
    router = CosineRouter(8, 4, 2)
    with pytest.raises(RuntimeError, match="size mismatch for logit_scale"):
        router.load_state_dict({**router.state_dict(), "logit_scale": torch.zeros(2)})


def test_absent_biases_are_not_named() -> None:
    model = BY_NAME["gmoe_tiny_patch16"].small(proj_bias=False)
    assert undecayed_parameters(model) <= dict(model.named_parameters()).keys()
    assert undecayed_parameters(CosineRouter(8, 4, 2)) == {"codes", "logit_scale"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_scripted_model_still_names_what_does_not_decay(name: str) -> None:
    model = BY_NAME[name].small()
    assert torch.jit.script(model).no_weight_decay() == model.no_weight_decay()
    assert {name.rpartition(".")[2] for name in model.no_weight_decay()} >= {"bias", "codes", "logit_scale"}


def test_a_module_that_does_not_say_how_it_is_drawn_is_named() -> None:
    with pytest.raises(RuntimeError, match="OwnParameters does not say"):
        OwnParameters().init_weights()
