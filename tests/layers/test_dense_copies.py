"""Upcycled experts that are parts of a dense feed-forward, partly drawn again, or beside a shared one."""

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers import ConvMlp, GluMlp, Mlp, SwiGLU
from torch import nn

import timm_moe_dg
from timm_moe_dg.errors import RouterError
from timm_moe_dg.layers import MoeMlp

SIZES = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 4}
DENSE = {
    "Mlp": lambda: Mlp(8, 16),
    "GluMlp": lambda: GluMlp(8, 32, gate_last=False),
    "SwiGLU": lambda: SwiGLU(8, 16),
    "ConvMlp": lambda: ConvMlp(8, 16),
}


def dense_layer(name: str = "Mlp") -> nn.Module:
    torch.manual_seed(0)
    dense = DENSE[name]().double().eval()
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.5)
    return dense


def tokens(name: str = "Mlp") -> torch.Tensor:
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.transpose(1, 2).unsqueeze(2) if name == "ConvMlp" else x


@pytest.mark.parametrize("name", DENSE)
def test_a_layer_with_a_shared_expert_is_upcycled_to_its_dense_source(name):
    dense = dense_layer(name)
    layer = MoeMlp.from_dense(dense, num_experts=3, shared_expert=True).eval()
    torch.testing.assert_close(layer(tokens(name)), dense(tokens(name)), rtol=0, atol=1e-10)
    nn.init.constant_(layer.gamma, 50.0)  # the shared expert alone
    nn.init.zeros_(layer.fc2.weight)
    torch.testing.assert_close(layer(tokens(name)), dense(tokens(name)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_shared_expert_from_random_weights_has_the_form_of_the_experts(gated, channels_first):
    options = {"num_experts": 2, "shared_expert": True, "expert_width": 0.5}
    layer = MoeMlp(8, 16, gated=gated, channels_first=channels_first, **options).double().eval()
    x = tokens("ConvMlp" if channels_first else "Mlp")
    upcycled = MoeMlp.from_dense(layer.shared, num_experts=2) if not channels_first else None
    nn.init.zeros_(layer.fc2.weight)
    nn.init.zeros_(layer.fc2.bias)
    torch.testing.assert_close(layer(x), layer.shared(x) / 2)
    assert layer.fc2.weight.shape == (2, 8, 8)
    assert upcycled is None or upcycled.fc1.weight.shape[1] == (32 if gated else 16)


@pytest.mark.parametrize(("num_experts", "width"), [(4, 0.5), (8, 0.25), (2, 1.0)])
@pytest.mark.parametrize("name", DENSE)
def test_narrow_experts_equal_the_dense_source_on_average(name, num_experts, width):
    dense, x = dense_layer(name), tokens(name)
    layer = MoeMlp.from_dense(dense, num_experts=num_experts, expert_width=width).eval()
    assert layer.fc2.weight.shape == (num_experts, 8, 16 * width)
    rows, expected = ((part.transpose(1, -1) if name == "ConvMlp" else part).reshape(-1, 8) for part in (x, dense(x)))
    torch.testing.assert_close(layer.experts.forward_all(rows).mean(0), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["Mlp", "SwiGLU"])
def test_a_share_of_the_units_is_drawn_again_with_mean_and_deviation_of_what_was_there(name):
    torch.manual_seed(0)
    dense = Mlp(64, 128) if name == "Mlp" else SwiGLU(64, 128)
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
    assert name != "Mlp" or torch.equal(after, torch.get_rng_state())


def test_upcycled_networks_equal_their_source_or_warn(recwarn):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES).eval()
    expected = dense(images)
    state = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dense.state_dict(), "num_classes": 4}}
    keeps = {"shared_expert": True, "router": "self", "router_kwargs": {"choice": "threshold"}}
    for build in (lambda **kw: timm.create_model("gmoe_tiny_patch16", **SIZES, **state, **kw), upcycled(dense)):
        torch.testing.assert_close(build(**keeps).eval()(images), expected, rtol=0, atol=1e-5)
        assert not [warning for warning in recwarn if "upcycled" in str(warning.message)]
        torch.manual_seed(1)
    narrow = timm.create_model("gmoe_tiny_patch16", **SIZES, **state, expert_width=0.5, num_experts=4)
    with pytest.warns(UserWarning, match=r"expert_width=0.5: the upcycled network does not compute"):
        other = upcycled(dense)(expert_width=0.5, num_experts=4)
    for name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"):
        pair = [model.get_parameter(f"blocks.0.mlp.experts.{name}") for model in (narrow, other)]
        assert torch.equal(*pair), name
    with pytest.warns(UserWarning, match=r"expert_reinit=0.5: the upcycled network does not compute"):
        other = upcycled(dense)(expert_reinit=0.5)
    redrawn = timm.create_model("gmoe_tiny_patch16", **SIZES, **state, expert_reinit=0.5)
    for model in (redrawn, other):
        experts = model.blocks[0].mlp.experts
        kept = experts.fc2.weight == dense.blocks[0].mlp.fc2.weight
        assert kept.all(1).sum(1).tolist() == [64] * 6


def upcycled(dense: nn.Module) -> Callable[..., nn.Module]:
    return lambda **options: timm_moe_dg.upcycle(copy.deepcopy(dense), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_width": 0.0}, r"expert_width=0.0: give a share above 0, and at most 1"),
        ({"expert_width": 1.5}, r"expert_width=1.5: give a share above 0, and at most 1"),
        ({"expert_reinit": 1.5}, r"expert_reinit=1.5: give a share from 0 to 1"),
        ({"expert_width": 0.5}, r"expert_width=0.5: experts cannot be parts of a feed-forward that normalizes"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(RouterError, match=message):
        MoeMlp.from_dense(Mlp(8, 16, norm_layer=nn.LayerNorm), **options)
