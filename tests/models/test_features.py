"""Feature extraction and reconfiguration, as timm's VisionTransformer does them."""

import itertools

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from tests.models.cases import BY_NAME, overlay, randomize, upcycled

GMOE, MOGE_TINY = BY_NAME["gmoe_tiny_patch16"], BY_NAME["moge_tiny"]


def assert_equal_results(one, other, **tolerance) -> None:
    """Compares nested results of forward_intermediates, structure and values."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_results(one[key], other[key], **tolerance)
    else:
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal_results(a, b, **tolerance)


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


@pytest.fixture(scope="module")
def shared_and_dense():
    """MoGE in shared mode and the dense model whose feed-forwards are its shared experts."""
    torch.manual_seed(0)
    dense = randomize(MOGE_TINY.small_dense(reg_tokens=2)).eval()
    model = randomize(upcycled(MOGE_TINY, dense, reg_tokens=2)).eval()
    weights = {key.replace(".mlp.shared.", ".mlp."): value for key, value in model.state_dict().items()}
    dense.load_state_dict({key: weights[key] for key in dense.state_dict()})
    assert type(dense) is VisionTransformer
    return model, dense


COMBINATIONS = [
    dict(zip(["return_prefix_tokens", "norm", "stop_early", "intermediates_only", "output_dict"], flags, strict=True))
    for flags in itertools.product([False, True], repeat=5)
]


@torch.no_grad()
@pytest.mark.parametrize("output_fmt", ["NCHW", "NLC"])
@pytest.mark.parametrize("indices", [None, 2, [0, -2]], ids=["all", "last two", "first and third"])
def test_moge_forward_intermediates_is_timms_in_every_combination_of_arguments(shared_and_dense, indices, output_fmt):
    model, dense = shared_and_dense
    images = torch.randn(2, 3, 32, 32)
    for combination in COMBINATIONS:
        arguments = {"indices": indices, "output_fmt": output_fmt, **combination}
        ours, theirs = (one.forward_intermediates(images, **arguments) for one in (model, dense))
        assert_equal_results(ours, theirs, rtol=0, atol=1e-6)


@torch.no_grad()
def test_moge_forward_intermediates_without_prefix_tokens_is_timms():
    options = {"class_token": False, "global_pool": "avg"}
    dense = randomize(MOGE_TINY.small_dense(**options)).eval()
    model, images = upcycled(MOGE_TINY, dense, **options).eval(), MOGE_TINY.images()
    for combination in COMBINATIONS:
        ours, theirs = (one.forward_intermediates(images, **combination) for one in (model, dense))
        assert_equal_results(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    "arguments", [{}, {"n": 2, "norm": True}, {"n": [1, 3], "reshape": True, "return_prefix_tokens": True}]
)
def test_moge_get_intermediate_layers_is_timms(shared_and_dense, arguments):
    model, dense = shared_and_dense
    images = torch.randn(2, 3, 32, 32)
    ours, theirs = (one.get_intermediate_layers(images, **arguments) for one in (model, dense))
    assert_equal_results(ours, theirs, rtol=0, atol=1e-6)


@torch.no_grad()
def test_moge_get_intermediate_layers_takes_metadata():
    model, (images, metadata) = randomize(MOGE_TINY.small()).eval(), MOGE_TINY.inputs()
    ours = model.get_intermediate_layers(images, 4, metadata=metadata)
    expected = model.forward_intermediates(images, 4, output_fmt="NLC", intermediates_only=True, metadata=metadata)
    assert_equal_results(ours, expected)
    assert not torch.equal(ours[-1], model.get_intermediate_layers(images, 4)[-1])


def test_moge_forward_intermediates_refuses_an_unknown_format():
    with pytest.raises(ValueError, match="output_fmt='NHWC'"):
        MOGE_TINY.small().forward_intermediates(MOGE_TINY.images(), output_fmt="NHWC")


@torch.no_grad()
@pytest.mark.parametrize("case", [GMOE, MOGE_TINY], ids=lambda case: case.name)
def test_pruning_keeps_the_features_that_were_asked_for(case):
    model, inputs = randomize(case.small()).eval(), case.inputs()
    keywords = {"metadata": inputs[1]} if case.metadata else {}
    before = model.forward_intermediates(inputs[0], indices=[0, 2], intermediates_only=True, **keywords)
    assert model.prune_intermediate_layers([0, 2]) == [0, 2]
    assert len(model.blocks) == 3
    after = model.forward_intermediates(inputs[0], indices=[0, 2], intermediates_only=True, **keywords)
    assert_equal_results(after, before)
    assert torch.equal(model(*inputs), model.forward_features(*inputs))  # the head is gone, pooling included


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


def test_attributes_that_timm_reads(family):
    model, dense = family.small(reg_tokens=2), family.small_dense(reg_tokens=2)
    names = ("num_classes", "in_chans", "num_features", "head_hidden_size", "embed_dim", "num_prefix_tokens")
    for name in (*names, "feature_info", "grad_checkpointing", "global_pool"):
        assert getattr(model, name) == getattr(dense, name)


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


@pytest.mark.parametrize("case", [GMOE, MOGE_TINY], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "name", ["drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"]
)
def test_a_dropout_rate_of_timms_acts_in_training_only(case, name):
    model, inputs = randomize(case.small(**{name: 0.5}, **case.without_chance)), case.inputs()
    assert torch.equal(model.eval()(*inputs), model(*inputs))
    model.train()
    assert not torch.equal(model(*inputs), model(*inputs))


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


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("case", [GMOE, MOGE_TINY], ids=lambda case: case.name)
def test_every_parameter_that_pruning_leaves_is_used(case, index):
    # the mixtures are in blocks 1 and 3 of 4, so that the first tap needs no metadata
    model = case.small(moe_layers=[1, 3]).train()
    model.prune_intermediate_layers([index], prune_norm=True)
    features = model.forward_intermediates(case.images(), indices=[index], intermediates_only=True)
    sum(feature.sum() for feature in features).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    if case.metadata:
        assert any("metadata_encoder" in name for name, _ in model.named_parameters()) == (index > 0)
        assert model(*case.inputs()).shape == (3, 5, 32)
