"""The mixture layer against timm's Mlp, and what may be done to a module; tests/properties has its equation."""

import pytest
import torch
from timm.layers import ConvMlp, GatedMlp, GlobalResponseNormMlp, LayerNorm2d, Mlp
from timm.models.metaformer import StarReLU

from timm_moe_dg.errors import OptionError, RouterError
from timm_moe_dg.layers import GeoMoeMlp, MoeMlp
from timm_moe_dg.losses import vmoe_loss


def make_layer(**kwargs) -> MoeMlp:
    torch.manual_seed(0)
    layer = MoeMlp(8, 16, **kwargs)
    for parameter in layer.parameters():
        if parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.3)
    return layer


def images(batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("normalize", [None, False])
def test_one_expert_with_top_1_is_the_dense_feed_forward(normalize):
    dense = Mlp(8, 16)
    layer = MoeMlp.from_dense(dense, num_experts=1, top_k=1, normalize_weights=normalize)
    torch.testing.assert_close(layer.eval()(images()), dense.eval()(images()), rtol=1e-6, atol=1e-6)


def test_with_top_1_the_output_is_scaled_by_the_probability():
    dense = Mlp(8, 16)
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=1).eval()
    probability = layer.router(images().reshape(-1, 8)).probabilities.amax(1).view(3, 5, 1)
    torch.testing.assert_close(layer(images()), probability * dense(images()), rtol=1e-5, atol=1e-6)


def test_padding_is_not_routed_and_takes_no_capacity():
    layer = make_layer(num_experts=4, capacity_factor=0.5, router_noise=0.0)
    alone = layer(images(1, 6))
    expected = layer.routing
    valid = torch.tensor([[True, False, True, True, False, True, True, False, False, True]])
    padded = torch.full((1, 10, 8), 9.0).masked_scatter(valid.unsqueeze(2), images(1, 6))
    layer.valid = valid
    output = layer(padded)
    torch.testing.assert_close(output[valid], alone[0])
    assert output[~valid].eq(0).all()
    assert torch.equal(layer.routing.routed, valid[0])
    assert torch.equal(layer.routing.dropped[valid[0]], expected.dropped)
    assert not layer.routing.dropped[~valid[0]].any()
    torch.testing.assert_close(vmoe_loss(layer.routing), vmoe_loss(expected))
    assert layer(padded)[~valid].ne(0).any()  # a mask is for one forward
    assert layer.routing.routed is None


def test_zero_tokens():
    layer = make_layer()
    output = layer(images()[:, :0])
    assert output.shape == (3, 0, 8)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_double_precision_gradients_equal_finite_differences():
    layer = make_layer(router_noise=0.0).double().eval()
    x = images().double().reshape(-1, 8)[:4].requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"router": "best"}, r"router='best': choose from cosine, linear, random, self"),
        ({"top_k": 7}, r"top_k=7: choose 1 to num_experts=6"),
        ({"top_k": 1, "normalize_weights": True}, r"normalize_weights=True: with top_k=1"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0: give a positive factor"),
        ({"out_features": 9}, r"out_features=9: experts return in_features=8"),
    ],
)
def test_impossible_settings_are_named(kwargs, message):
    with pytest.raises(RouterError, match=message):
        MoeMlp(8, 16, **kwargs)


@pytest.mark.parametrize(
    "act",
    [
        torch.nn.GELU(approximate="tanh"),
        StarReLU(scale_value=0.7, bias_value=-0.3),
        torch.nn.LeakyReLU(0.4),
        torch.nn.PReLU(init=0.6),
    ],
    ids=lambda act: type(act).__name__,
)
def test_arguments_and_learned_values_of_an_activation_come_along(act):
    dense = Mlp(8, 16, norm_layer=torch.nn.LayerNorm).eval()
    dense.act = act
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=2)
    torch.testing.assert_close(layer(images()), dense(images()), rtol=1e-5, atol=1e-5)
    assert not {id(parameter) for parameter in layer.parameters()} & {id(parameter) for parameter in dense.parameters()}


def test_dropout_frozen_parameters_and_the_mode_come_along():
    dense = Mlp(8, 16, drop=(0.2, 0.3))
    dense.fc1.weight.requires_grad_(False)
    layer = MoeMlp.from_dense(dense, expert_drop=0.5)
    assert (layer.experts.drop.p, layer.drop.p) == (pytest.approx(1 - 0.8 * 0.5), 0.3)
    frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"experts.fc1.weight"}
    assert layer.training
    assert not MoeMlp.from_dense(dense.eval()).training


def with_wide_kernel(mlp):
    mlp.fc1 = torch.nn.Conv2d(8, 16, 3, padding=1)
    return mlp


class Twice(Mlp):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (GlobalResponseNormMlp(8, 16), "mlp='GlobalResponseNormMlp': .*exactly timm.layers.Mlp"),
        (GatedMlp(8, 16), "mlp='GatedMlp'"),
        (ConvMlp(8, 16, norm_layer=torch.nn.BatchNorm2d), "mlp.norm='BatchNorm2d'"),
        (ConvMlp(8, 16, norm_layer=LayerNorm2d), "mlp.norm='LayerNorm2d'"),
        (Twice(8, 16), "mlp='Twice'"),
        (with_wide_kernel(Mlp(8, 16, use_conv=True)), "mlp.fc1='Conv2d'"),
        (Mlp(8, 16, 9), "mlp.fc2.out_features=9: .*in_features=8"),
        (Mlp(8, 16, norm_layer=torch.nn.BatchNorm1d), "mlp.norm='BatchNorm1d'"),
        (Mlp(8, 16, act_layer=lambda: torch.nn.PReLU(16)), "mlp.act.num_parameters=16"),
    ],
)
def test_what_experts_cannot_copy_is_refused_by_name(dense, message):
    with pytest.raises(RouterError, match=message):
        MoeMlp.from_dense(dense)


def test_a_misspelled_option_is_named_with_the_nearest():
    with pytest.raises(OptionError, match="topk=1: MoeMlp has no such option; did you mean top_k"):
        MoeMlp(8, 16, topk=1)
    with pytest.raises(OptionError, match=r"capacity_factor=1\.0: GeoMoeMlp has no such option; it takes num_experts"):
        GeoMoeMlp(8, 16, capacity_factor=1.0)
