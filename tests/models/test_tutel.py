"""Checkpoints of the GMoE authors' released code, made here from our weights by writing them in its layout."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models.cases import BY_NAME, Case, mixture_layers, overlay, randomize
from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.models.tutel import is_tutel_state_dict

CASES = [BY_NAME["gmoe_tiny_patch16"], BY_NAME["sfmoe_small"]]  # cosine and linear gates
FORMS = ["plain", "prefixed", "wrapped"]


def released_layer(layer: torch.nn.Module, bias_axis: bool) -> dict[str, torch.Tensor]:
    """One mixture layer as the released code stores it."""
    experts, router = layer.experts, layer.router
    weights = {
        "experts.batched_fc1_w": experts.fc1.weight,
        "experts.batched_fc2_w": experts.fc2.weight.transpose(1, 2),  # (E, D, H) -> (E, H, D)
    }
    for name, bias in (("fc1", experts.fc1.bias), ("fc2", experts.fc2.bias)):
        weights[f"experts.batched_{name}_bias"] = bias.unsqueeze(1) if bias_axis else bias
    if hasattr(router, "gate"):
        return weights | {"gates.0.wg.weight": router.gate.weight}
    return weights | {
        "gates.0.cosine_projector.weight": router.proj.weight,
        "gates.0.cosine_projector.bias": router.proj.bias,
        "gates.0.sim_matrix": router.codes.T,
        "gates.0.temperature": router.logit_scale.reshape(1),
    }


def released(model: torch.nn.Module, form: str = "plain", bias_axis: bool = False, counter: bool = False) -> dict:
    """A whole model as the released training script saves it; 'plain' is the bare network."""
    layers = mixture_layers(model)
    prefixes = tuple(f"{name}." for name in layers)
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith(prefixes)}
    for name, layer in layers.items():
        weights |= {f"{name}.{key}": value for key, value in released_layer(layer, bias_axis).items()}
        if counter:
            weights[f"{name}._num_global_experts"] = torch.tensor(layer.experts.num_experts)
    weights = {key: value.detach().clone().contiguous() for key, value in weights.items()}
    if form == "plain":
        return weights
    weights = {f"model.{key}": value for key, value in weights.items()}
    return weights if form == "prefixed" else {"args": {}, "model_num_classes": 7, "model_dict": weights}


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def source(request) -> tuple[Case, torch.nn.Module]:
    """A model whose experts and routers are away from their initial values, and its case."""
    return request.param, randomize(request.param.small()).eval()


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias_axis", [False, True], ids=["(E, H)", "(E, 1, H)"])
@pytest.mark.parametrize("counter", [False, True], ids=["early", "later"])
def test_a_released_checkpoint_gives_equal_weights_and_logits(source, form, bias_axis, counter, tmp_path):
    case, model = source
    torch.save(released(model, form, bias_axis, counter), tmp_path / "model.pkl")
    cfg = {"file": str(tmp_path / "model.pkl"), "num_classes": 10}
    converted = case.small(pretrained=True, pretrained_cfg_overlay=cfg).eval()
    assert converted.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in converted.state_dict().items())
    assert torch.equal(converted(case.images()), model(case.images()))


@torch.no_grad()
def test_a_converted_layer_computes_what_the_released_layout_means(source):
    """There x is a row: hidden = x W1' + b1, y = hidden W2 + b2, and a cosine gate compares with columns."""
    case, model = source
    weights = released(model)
    layer = case.small(**overlay(weights)).eval().blocks[2].mlp
    x, prefix = torch.randn(5, 32), "blocks.2.mlp."
    part = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    for expert in range(6):
        hidden = F.gelu(x @ part["experts.batched_fc1_w"][expert].T + part["experts.batched_fc1_bias"][expert])
        expected = hidden @ part["experts.batched_fc2_w"][expert] + part["experts.batched_fc2_bias"][expert]
        chosen, certain = torch.full((5, 1), expert), torch.ones(5, 1)
        torch.testing.assert_close(layer.experts(x, chosen, certain), expected)
    if case.name == "sfmoe_small":
        expected = x @ part["gates.0.wg.weight"].T
    else:
        projected = x @ part["gates.0.cosine_projector.weight"].T + part["gates.0.cosine_projector.bias"]
        cosine = F.normalize(projected, dim=1) @ F.normalize(part["gates.0.sim_matrix"], dim=0)
        expected = cosine * part["gates.0.temperature"].clamp(max=math.log(100)).exp()
    torch.testing.assert_close(layer.router(x).logits, expected)


@pytest.mark.parametrize("lost", ["experts.batched_fc2_w", "experts.batched_fc1_bias", "gates.0"])
def test_a_released_checkpoint_that_lacks_a_part_is_refused(source, lost):
    case, model = source
    checkpoint = released(model, "wrapped")
    weights = checkpoint.get("model_dict", checkpoint)
    for key in [key for key in weights if f"blocks.2.mlp.{lost}" in key]:
        del weights[key]
    ours = {"experts.batched_fc2_w": "experts.fc2.weight", "experts.batched_fc1_bias": "experts.fc1.bias"}
    with pytest.raises(CheckpointError, match=f"missing.*blocks.2.mlp.{ours.get(lost, 'router')}"):
        case.small(**{**overlay(checkpoint), "num_classes": 3})


def test_a_released_checkpoint_with_an_unknown_part_or_of_another_gate_is_refused():
    gmoe, sfmoe = CASES
    checkpoint = released(gmoe.small())
    checkpoint["blocks.2.mlp.gates.1.wg.weight"] = torch.zeros(6, 32)
    assert not is_tutel_state_dict(gmoe.small().state_dict())
    with pytest.raises(CheckpointError, match=r"not in the model \(1\): blocks\.2\.mlp\.gates\.1\.wg\.weight"):
        gmoe.small(**overlay(checkpoint))
    with pytest.raises(CheckpointError, match=r"missing.*router\.gate\.weight.*not in the model.*router\.codes"):
        sfmoe.small(**overlay(released(gmoe.small())))
