"""Dense feed-forwards of every form: experts made of them compute what they compute, with what they have learned."""

import copy
from functools import partial

import pytest
import torch
from timm.layers import ConvMlp, GluMlp, Mlp, SwiGLU
from timm.models.inception_next import ConvMlp as InceptionConvMlp
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import nn

from timm_moe_dg.layers import MoeMlp
from timm_moe_dg.layers.dense.feed_forwards import DENSE_FORMS, GatedActivation, read_feed_forward

FORMS = {
    "Mlp": Mlp(8, 16),
    "Mlp, inner norm": Mlp(8, 16, norm_layer=nn.LayerNorm),
    "Mlp, 1x1 convolutions": Mlp(8, 16, use_conv=True),
    "Mlp, no biases": Mlp(8, 16, bias=False, act_layer=nn.SiLU),
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


@pytest.fixture(params=FORMS, name="dense")
def _dense(request):
    torch.manual_seed(0)
    dense = copy.deepcopy(FORMS[request.param]).eval()
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.5)
    return dense


def inputs(dense):
    channels_first = read_feed_forward(dense).channels_first
    return torch.randn(*((2, 8, 3, 5) if channels_first else (2, 3, 5, 8)))


def test_every_form_is_tried_here():
    assert {type(dense) for dense in FORMS.values()} == set(DENSE_FORMS)


@pytest.mark.parametrize("top_k", [2, 4])
def test_a_layer_made_of_a_dense_one_computes_the_same(dense, top_k):
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=top_k)
    x = inputs(dense)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)


def test_the_experts_answer_to_their_own_weights(dense):
    layer = MoeMlp.from_dense(dense, num_experts=2, top_k=2)
    x = inputs(dense)
    with torch.no_grad():
        layer.fc2.weight[0] *= 2
    assert (layer(x) - dense(x)).abs().max() > 0.1


def test_every_parameter_gets_a_gradient_and_none_is_the_dense_layers(dense):
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=2).train()
    layer(inputs(dense)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.fc1.parameters())
    assert all(parameter.grad is not None for parameter in layer.parameters())
    assert not set(map(id, layer.parameters())) & set(map(id, dense.parameters()))


def test_masked_layers_compute_the_same(dense):
    layer = MoeMlp.from_dense(dense, num_experts=4, top_k=2)
    x = inputs(dense)
    vmapped = torch.vmap(layer)(x[:, None])[:, 0]
    torch.testing.assert_close(vmapped, dense(x), rtol=1e-5, atol=1e-5)


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
