"""Feature extraction and reconfiguration, as timm's VisionTransformer does them."""

import copy

import pytest
import timm
import torch

from tests.models.cases import BY_NAME, overlay, randomize, upcycled

GMOE, MOGE_TINY = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"]


@torch.no_grad()
def test_logits_and_intermediates_agree_with_forward_features(family):
    model, inputs = randomize(family.small()).eval(), family.inputs()
    keywords = {"metadata": inputs[1]} if family.metadata else {}
    tokens = model.forward_features(*inputs)
    final, intermediates = model.forward_intermediates(inputs[0], output_fmt="NLC", norm=True, **keywords)
    assert torch.equal(final, tokens)
    assert len(intermediates) == 4
    assert torch.equal(intermediates[-1], tokens[:, 1:])
    assert torch.equal(model.forward_head(tokens), model(*inputs))
    assert torch.equal(model.head(model.forward_head(tokens, pre_logits=True)), model(*inputs))
    assert torch.equal(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    if family.metadata:
        assert not torch.equal(tokens, model.forward_features(inputs[0]))


@torch.no_grad()
def test_resetting_the_classifier(family):
    model, inputs = randomize(family.small()).eval(), family.inputs()
    tokens = model.forward_features(*inputs)
    model.reset_classifier(3)
    assert model.get_classifier() is model.head
    assert model.num_classes == 3
    assert model(*inputs).shape == (3, 3)
    assert torch.equal(model.forward_features(*inputs), tokens)
    model.reset_classifier(0)
    assert torch.equal(model(*inputs), tokens[:, 0])
    model.reset_classifier(0, "avg")
    assert torch.equal(model(*inputs), tokens[:, 1:].mean(1))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny", "erm_le_tiny_patch16", "d3g_tiny_patch16"])
def test_every_parameter_that_pruning_leaves_is_used(name, index):
    # The first block is dense, so that its features need no metadata
    layers = {"moe_layers": [1, 3]} if name in BY_NAME else {}
    model = timm.create_model(name, img_size=16, patch_size=8, embed_dim=24, depth=4, num_heads=3, **layers)
    images, whole = torch.randn(2, 3, 16, 16), copy.deepcopy(model).eval()
    for _ in range(2):
        model.prune_intermediate_layers([index], prune_norm=True)
    taken = {"indices": [index], "intermediates_only": True}
    model.forward_intermediates(images, **taken)[0].sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    expected = whole.forward_intermediates(images, **taken)[0].flatten(2).mT
    if "gmoe" not in name:
        places = torch.tensor([[13.4, 52.5], [2.3, 48.9]])
        assert any("metadata" in key for key, _ in model.named_parameters()) == (name == "moge_tiny" and index > 0)
        assert model.eval()(images, places).shape == (2, 5, 24)
    assert torch.equal(model.eval()(images)[:, 1:], expected)


CONSTRUCTOR = {
    "patch_size": 8,
    "global_pool": "avg",
    "class_token": False,
    "qkv_bias": False,
    "proj_bias": False,
    "qk_norm": True,
    "init_values": 0.1,
    "no_embed_class": True,
    "reg_tokens": 3,
    "pre_norm": True,
    "fc_norm": True,
    "act_layer": "relu",
    "norm_layer": "rmsnorm",
    "mlp_ratio": 2.0,
    "scale_attn_norm": True,
    "scale_mlp_norm": True,
    "pos_embed": "none",
    "final_norm": False,
    "dynamic_img_size": True,
}


# MoGE has a forward of its own; GMoE's is timm's but for the feed-forward
OF_FEED_FORWARD = ("act_layer", "norm_layer", "mlp_ratio", "scale_mlp_norm")


@torch.no_grad()
@pytest.mark.parametrize(
    ("case", "name"), [*((MOGE_TINY, name) for name in CONSTRUCTOR), *((GMOE, name) for name in OF_FEED_FORWARD)]
)
def test_a_constructor_argument_of_timms_does_what_it_does_in_the_dense_model(case, name):
    options = {name: CONSTRUCTOR[name], **({"global_pool": "avg"} if name == "class_token" else {})}
    dense = randomize(case.small_dense(**options)).eval()
    model = upcycled(case, dense, **options).eval()
    torch.testing.assert_close(model(*case.inputs()), dense(case.images()), rtol=0, atol=1e-5)
    plain = case.small_dense().state_dict()
    changed_shapes = {key: value.shape for key, value in dense.state_dict().items()} != {
        key: value.shape for key, value in plain.items()
    }
    assert changed_shapes or name in ("act_layer", "dynamic_img_size")


@torch.no_grad()
def test_bfloat16_weights_and_autocast_stay_close_to_float32(family):
    # Equal experts: a token whose rounded logits pick other experts gets the same output
    dense = randomize(family.small_dense(), std=0.02).eval()
    model, inputs = upcycled(family, dense).eval(), family.inputs()
    exact = model(*inputs)
    low = family.small(dtype=torch.bfloat16, **overlay(dense.state_dict())).eval()
    assert {parameter.dtype for parameter in low.parameters()} == {torch.bfloat16}
    rounded = low(inputs[0].bfloat16(), *inputs[1:])
    assert rounded.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(*inputs)
    scale = exact.abs().max()
    assert (rounded - exact).abs().max() < 0.05 * scale
    assert (mixed - exact).abs().max() < 0.05 * scale
