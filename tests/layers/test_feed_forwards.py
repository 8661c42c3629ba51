"""Dense feed-forwards of every form: experts that are copies or parts of them compute the same."""

import copy
from functools import partial

import pytest
import timm
import torch
from timm.layers import ConvMlp, GluMlp, Mlp, SwiGLU
from timm.models.inception_next import ConvMlp as InceptionConvMlp
from timm.models.metaformer import StarReLU
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import nn

import timm_moe_dg
from timm_moe_dg.layers import MoeMlp
from timm_moe_dg.layers.feed_forwards import DENSE_FORMS, GatedActivation, read_feed_forward

FORMS = {
    "Mlp": Mlp(8, 16),
    "Mlp, inner norm": Mlp(8, 16, norm_layer=nn.LayerNorm),
    "Mlp, 1x1 convolutions": Mlp(8, 16, use_conv=True),
    "Mlp, no biases": Mlp(8, 16, bias=False, act_layer=nn.SiLU),
    "Mlp, tanh form of GELU": Mlp(8, 16, act_layer=partial(nn.GELU, approximate="tanh")),
    "Mlp, StarReLU": Mlp(8, 16, act_layer=partial(StarReLU, scale_value=0.7, bias_value=-0.3)),
    "GluMlp": GluMlp(8, 32, gate_last=True),
    "GluMlp, gate first": GluMlp(8, 32, act_layer=nn.SiLU, gate_last=False, norm_layer=nn.LayerNorm),
    "GluMlp, 1x1 convolutions": GluMlp(8, 32, use_conv=True, bias=(True, False)),
    "SwiGLU": SwiGLU(8, 16),
    "SwiGLU, inner norm": SwiGLU(8, 16, norm_layer=nn.LayerNorm, bias=False),
    "GeGluMlp": GeGluMlp(8, 16),
    "NormMlp": NormMlp(8, 16),
    "ConvMlp": ConvMlp(8, 16),
    "ConvMlp of InceptionNeXt": InceptionConvMlp(8, 16, act_layer=partial(nn.PReLU, init=0.6)),
}
SIZES = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 4}
EXACT = {"rtol": 0, "atol": 1e-10}


@pytest.fixture(params=FORMS, name="dense")
def _dense(request):
    dense = copy.deepcopy(FORMS[request.param]).double().eval()
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.5)
    return dense


def inputs(dense):
    shape = (2, 8, 3, 5) if read_feed_forward(dense).channels_first else (2, 3, 5, 8)
    return torch.randn(shape, dtype=torch.float64)


def test_every_form_is_tried_here():
    assert {type(dense) for dense in FORMS.values()} == set(DENSE_FORMS)


@pytest.mark.parametrize(
    "options", [{"top_k": 2}, {"top_k": 4}, {"shared_expert": True}, {"num_experts": 1, "top_k": 1}], ids=str
)
def test_a_layer_made_of_a_dense_one_computes_the_same(dense, options):
    layer, x = MoeMlp.from_dense(dense, **{"num_experts": 4, **options}), inputs(dense)
    torch.testing.assert_close(layer(x), dense(x), **EXACT)
    if layer.gamma is not None:
        nn.init.constant_(layer.gamma, 50.0)  # the shared expert alone
        nn.init.zeros_(layer.fc2.weight)
        torch.testing.assert_close(layer(x), dense(x), **EXACT)


def test_the_experts_have_parameters_of_their_own_that_all_get_gradients(dense):
    layer, x = MoeMlp.from_dense(dense, num_experts=2, top_k=2).train(), inputs(dense)
    layer(x).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.fc1.parameters())
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert not set(map(id, layer.parameters())) & set(map(id, dense.parameters()))
    with torch.no_grad():
        layer.fc2.weight[0] *= 2
    assert (layer.eval()(x) - dense(x)).abs().max() > 0.1


def test_frozen_parameters_stay_frozen(dense):
    dense.requires_grad_(False)
    layer = MoeMlp.from_dense(dense, num_experts=3)
    trained = {name for name, parameter in layer.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in layer.named_parameters() if name.startswith("router.")}


def test_a_gated_mixture_of_its_own_multiplies_by_the_gate():
    layer = MoeMlp(8, 16, act_layer=nn.SiLU, gated=True, num_experts=1, top_k=1).eval()
    gate, value = layer.fc1.weight[0].chunk(2)
    x = torch.randn(3, 8)
    expected = (nn.functional.silu(x @ gate.T) * (x @ value.T)) @ layer.fc2.weight[0].T
    torch.testing.assert_close(layer(x), expected)
    assert isinstance(layer.experts.act, GatedActivation)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_shared_expert_from_random_weights_has_the_form_of_the_experts(gated, channels_first):
    options = {"num_experts": 2, "shared_expert": True, "expert_width": 0.5}
    layer = MoeMlp(8, 16, gated=gated, channels_first=channels_first, **options).double().eval()
    x = torch.randn((3, 8, 1, 5) if channels_first else (3, 5, 8), dtype=torch.float64)
    nn.init.zeros_(layer.fc2.weight)
    nn.init.zeros_(layer.fc2.bias)
    torch.testing.assert_close(layer(x), layer.shared(x) / 2)
    assert layer.fc2.weight.shape == (2, 8, 8)
    if not channels_first:
        assert MoeMlp.from_dense(layer.shared, num_experts=2).fc1.weight.shape[1] == (32 if gated else 16)


@pytest.mark.parametrize(("num_experts", "width"), [(4, 0.5), (8, 0.25), (2, 1.0)])
@pytest.mark.parametrize("dense", ["Mlp", "GluMlp", "SwiGLU", "ConvMlp"], indirect=True)
def test_narrow_experts_equal_the_dense_source_on_average(dense, num_experts, width):
    layer, x = MoeMlp.from_dense(dense, num_experts=num_experts, expert_width=width), inputs(dense)
    assert layer.fc2.weight.shape == (num_experts, 8, 16 * width)
    axis = 1 if read_feed_forward(dense).channels_first else -1
    rows, expected = (part.movedim(axis, -1).reshape(-1, 8) for part in (x, dense(x)))
    torch.testing.assert_close(layer.experts.forward_all(rows).mean(0), expected, **EXACT)


@pytest.mark.parametrize("make", [Mlp, SwiGLU])
def test_a_share_of_the_units_is_drawn_again_with_mean_and_deviation_of_what_was_there(make):
    dense = make(64, 128)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, mean=0.3, std=0.1)
    same = MoeMlp.from_dense(dense, num_experts=3)
    state = torch.get_rng_state()
    layer = MoeMlp.from_dense(dense, num_experts=3, expert_reinit=0.3)
    rows, columns = (layer.fc1.weight != same.fc1.weight).all(2), (layer.fc2.weight != same.fc2.weight).all(1)
    assert columns.sum(1).tolist() == [38] * 3  # floor(0.3 x 128)
    assert torch.equal(rows, torch.cat([columns] * (rows.shape[1] // 128), 1))  # in both halves of a gate
    assert torch.equal(layer.fc1.weight[~rows], same.fc1.weight[~rows])
    assert torch.equal(layer.fc2.bias, same.fc2.bias)
    assert not torch.equal(columns[0], columns[1])
    for drawn in (layer.fc1.weight[rows], layer.fc2.weight.transpose(1, 2)[columns], layer.fc1.bias[rows]):
        errors = 4 / drawn.numel() ** 0.5  # four standard errors, and as much for what was there
        assert drawn.mean().item() == pytest.approx(0.3, abs=0.1 * 2 * errors)
        assert drawn.std().item() == pytest.approx(0.1, abs=0.1 * 2 * errors)
    torch.set_rng_state(state)
    MoeMlp.from_dense(dense, num_experts=3)  # without a share, the numbers of before are drawn
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    MoeMlp(64, 128, num_experts=3)
    assert make is not Mlp or torch.equal(after, torch.get_rng_state())


def test_upcycled_networks_equal_their_source_or_warn(recwarn):
    images = torch.randn(2, 3, 32, 32)
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES).eval()
    expected = dense(images)
    state = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dense.state_dict(), "num_classes": 4}}
    create = partial(timm.create_model, "gmoe_tiny_patch16", **SIZES, **state)

    def upcycle(**options):
        return timm_moe_dg.upcycle(copy.deepcopy(dense), **options)

    for build in (create, upcycle):
        model = build(shared_expert=True, router="self", router_kwargs={"choice": "threshold"})
        torch.testing.assert_close(model.eval()(images), expected, rtol=0, atol=1e-5)
        assert not [warning for warning in recwarn if "upcycled" in str(warning.message)]
        torch.manual_seed(1)
    narrow = create(expert_width=0.5, num_experts=4)
    with pytest.warns(UserWarning, match=r"expert_width=0.5: the upcycled network does not compute"):
        other = upcycle(expert_width=0.5, num_experts=4)
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        pair = [model.get_parameter(f"blocks.0.mlp.experts.{name}") for model in (narrow, other)]
        assert torch.equal(*pair), name
    with pytest.warns(UserWarning, match=r"expert_reinit=0.5: the upcycled network does not compute"):
        other = upcycle(expert_reinit=0.5)
    for model in (create(expert_reinit=0.5), other):
        kept = model.blocks[0].mlp.experts.fc2.weight == dense.blocks[0].mlp.fc2.weight
        assert kept.all(1).sum(1).tolist() == [64] * 6
