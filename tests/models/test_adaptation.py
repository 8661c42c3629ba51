"""Dense weights into models that differ from their source: classes, channels, image size, pooling, features only."""

import logging

import pytest
import torch
from timm.layers import resample_abs_pos_embed

from tests.models.cases import BY_NAME, overlay, randomize

TOLERANCE = 1e-5


@pytest.fixture
def dense(family):
    """A dense model whose weights are away from their initial values."""
    return randomize(family.small_dense()).eval()


@torch.no_grad()
def test_other_classes_keep_the_features_and_draw_a_new_classifier(family, dense):
    model = family.small(**{**overlay(dense.state_dict()), "num_classes": 3}).eval()
    images = family.images()
    ours, theirs = (one.forward_head(one.forward_features(images), pre_logits=True) for one in (model, dense))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert model.head.weight.shape == (3, 32)
    assert model.head.bias.count_nonzero() == 0


@torch.no_grad()
def test_no_classes_return_the_pooled_features(family, dense):
    model = family.small(**{**overlay(dense.state_dict()), "num_classes": 0}).eval()
    expected = dense.forward_head(dense.forward_features(family.images()), pre_logits=True)
    torch.testing.assert_close(model(family.images()), expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_one_channel_sees_the_sum_of_the_three_filters(family, dense):
    model = family.small(in_chans=1, **overlay(dense.state_dict())).eval()
    kernel, first_conv = model.pretrained_cfg["first_conv"], dense.get_submodule(model.pretrained_cfg["first_conv"])
    summed = first_conv.weight.sum(1, keepdim=True)
    torch.testing.assert_close(model.get_submodule(kernel).weight, summed)
    if family.name == "hybrid_sfmoe_r26_s16":
        return  # its stem standardizes the filters afterwards, so that the models differ
    images = family.images()[:, :1]
    torch.testing.assert_close(model(images), dense(images.expand(-1, 3, -1, -1)), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_another_image_size_resamples_the_position_embedding(family, dense):
    size = 2 * family.small_size
    model = family.small(**{**overlay(dense.state_dict()), "img_size": size}).eval()
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(dense.pos_embed, (4, 4)))
    twin = family.small_dense(img_size=size, **overlay(dense.state_dict())).eval()
    torch.testing.assert_close(model(family.images(size=size)), twin(family.images(size=size)), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_average_pooling_keeps_the_final_normalization(family, dense, caplog):
    with caplog.at_level(logging.WARNING):
        model = family.small(global_pool="avg", **overlay(dense.state_dict())).eval()
    assert "Unexpected keys" not in caplog.text
    assert torch.equal(model.fc_norm.weight, dense.norm.weight)
    assert torch.equal(model.fc_norm.bias, dense.norm.bias)
    # timm's order with average pooling: pool the unnormalized patch tokens, then normalize
    dense_norm, dense.norm = dense.norm, torch.nn.Identity()
    expected = dense.head(dense_norm(dense.forward_features(family.images())[:, 1:].mean(1)))
    torch.testing.assert_close(model(family.images()), expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_an_average_pooled_checkpoint_returns_to_token_pooling(family):
    source = randomize(family.small(global_pool="avg")).eval()
    model = family.small(**overlay(source.state_dict())).eval()
    assert torch.equal(model.norm.weight, source.fc_norm.weight)
    assert torch.equal(model.norm.bias, source.fc_norm.bias)


@torch.no_grad()
def test_features_only_gives_the_dense_models_feature_maps(family, dense):
    options = {"features_only": True, "out_indices": (0, 2)}
    ours = family.small(**overlay(dense.state_dict()), **options).eval()
    theirs = family.small_dense(**overlay(dense.state_dict()), **options).eval()
    assert ours.feature_info.reduction() == theirs.feature_info.reduction()
    assert ours.feature_info.channels() == theirs.feature_info.channels() == [32, 32]
    for one, other in zip(ours(family.images()), theirs(family.images()), strict=True):
        assert one.shape == (3, 32, 2, 2)
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_dynamic_image_size_equals_the_dense_models(family, dense):
    ours = family.small(dynamic_img_size=True, **overlay(dense.state_dict())).eval()
    theirs = family.small_dense(dynamic_img_size=True, **overlay(dense.state_dict())).eval()
    images = torch.randn(2, 3, 2 * family.small_size, 3 * family.small_size)
    torch.testing.assert_close(ours(images), theirs(images), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_layer_scale_and_register_tokens_come_from_a_source_that_has_them(family):
    options = {"init_values": 0.5, "reg_tokens": 2, "qk_norm": True}
    dense = randomize(family.small_dense(**options)).eval()
    model = family.small(**overlay(dense.state_dict()), **options).eval()
    torch.testing.assert_close(model(family.images()), dense(family.images()), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_the_hybrids_finer_grid_uses_the_weights_of_stride_32():
    case = BY_NAME["hybrid_sfmoe_r26_s16"]
    dense = randomize(case.small_dense()).eval()
    model = case.small(output_stride=16, **overlay(dense.state_dict())).eval()
    assert model.patch_embed.grid_size == (4, 4)
    assert model.feature_info[0]["reduction"] == 16
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(dense.pos_embed, (4, 4)))
    assert torch.equal(model.patch_embed.proj.weight, dense.patch_embed.proj.weight)
    fine, coarse = (one.patch_embed.backbone(case.images()) for one in (model, dense))
    assert fine.shape[-2:] == (4, 4)
    assert coarse.shape[-2:] == (2, 2)
