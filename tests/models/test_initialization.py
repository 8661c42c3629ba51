"""Initial weights: their distribution, timm's initialization modes, and models made without memory."""

import itertools
import math

import pytest
import torch

from tests.models.cases import BY_NAME, mixture_layers

MODES = ["", "jax", "jax_nlhb", "moco", "reset", "skip"]
GMOE = BY_NAME["gmoe_tiny_patch16"]
LIGHT = [GMOE, BY_NAME["moge_tiny"]]


def test_experts_start_as_different_truncated_normals_with_zero_bias(family):
    for layer in mixture_layers(family.small(embed_dim=128)).values():
        for linear in (layer.experts.fc1, layer.experts.fc2):
            assert linear.weight.std().item() == pytest.approx(0.02, rel=0.02)
            assert linear.bias.count_nonzero() == 0
            stds = linear.weight.flatten(1).std(dim=1)
            torch.testing.assert_close(stds, torch.full((6,), 0.02), rtol=0.05, atol=0)
            correlations = torch.corrcoef(linear.weight.detach().flatten(1)) - torch.eye(6)
            assert correlations.abs().max() < 0.05


def spread(parameter: torch.Tensor) -> float:
    return parameter.detach().double().std(correction=0).item() if parameter.numel() > 1 else 0.0


@pytest.mark.parametrize(("case", "mode"), [*itertools.product(LIGHT, MODES), (BY_NAME["hybrid_sfmoe_r26_s16"], "")])
def test_made_without_memory_and_initialized_later_is_distributed_as_made_at_once(case, mode):
    options = {"embed_dim": 128, "weight_init": mode}
    at_once, later = case.small(**options), case.small(device="meta", **options)
    assert {parameter.device.type for parameter in later.parameters()} == {"meta"}
    later.to_empty(device="cpu")
    for tensor in later.state_dict().values():
        tensor.fill_(7.0)  # what memory may hold
    later.init_weights()
    for name, parameter in later.named_parameters():
        if mode == "skip" and name in ("cls_token", "pos_embed"):
            continue  # timm leaves these as the memory was, when it makes them at once
        expected = at_once.get_parameter(name)
        if parameter.numel() == 1:
            torch.testing.assert_close(parameter, expected)
            continue
        # two draws of n values differ in standard deviation by about 1 / sqrt(n)
        tolerance = 1e-12 + 6 / math.sqrt(parameter.numel()) * spread(expected)
        assert abs(spread(parameter) - spread(expected)) <= tolerance, name
        assert abs((parameter.mean() - expected.mean()).item()) <= tolerance, name


@pytest.mark.parametrize("mode", MODES)
def test_experts_and_routers_start_alike_in_every_mode(mode):
    # timm's modes reach only nn.Linear; experts keep their truncated normal, as documented for stacked weights
    layer = GMOE.small(embed_dim=128, weight_init=mode).blocks[0].mlp
    assert layer.experts.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.router.proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.router.codes.std().item() == pytest.approx(0.01, rel=0.1)
    assert layer.router.logit_scale.exp().item() == pytest.approx(2.0)


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_fix_init_divides_every_output_layer_by_the_depth(case):
    model = case.small(embed_dim=128, fix_init=True, shared_expert=True)
    for index, block in enumerate(model.blocks):
        expected = pytest.approx(0.02 / math.sqrt(2 * (index + 1)), rel=0.03)
        outputs = [block.attn.proj, block.mlp.fc2]
        if getattr(block.mlp, "shared", None) is not None:  # of a mixture
            outputs.append(block.mlp.shared.fc2)
        for layer in outputs:
            assert layer.weight.std().item() == expected
        assert block.mlp.fc1.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_an_encoder_that_was_given_keeps_its_weights():
    encoder = torch.nn.Linear(3, 16)
    before = encoder.weight.detach().clone()
    model = BY_NAME["moge_tiny"].small(metadata_encoder=encoder, metadata_features=16)
    assert model.metadata_encoder.encoder is encoder
    assert torch.equal(encoder.weight, before)
