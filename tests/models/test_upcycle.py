"""Upcycling from a dense checkpoint: equal logits at full size, copied weights, and sources that differ."""

import logging

import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_model_data_config
from timm.layers import resample_abs_pos_embed

from tests.models.cases import BY_NAME, FAMILIES, Case, mixture_layers, overlay, randomize, upcycled

TOLERANCE = 1e-5


# The sizes of GMoE differ by their width alone
@pytest.fixture(scope="module", params=[*FAMILIES, BY_NAME["moge_small_patch32_384"]], ids=lambda case: case.name)
def full_size(request):
    """A registered model, its dense twin with weights away from their initial values, and the case."""
    case: Case = request.param
    torch.manual_seed(0)
    dense = randomize(case.build_dense(), std=0.02).eval()
    mixture = case.build(**overlay(dense.state_dict(), num_classes=1000)).eval()
    mixture.pretrained_cfg.pop("state_dict")
    return case, mixture, dense


def photographs(model: torch.nn.Module) -> torch.Tensor:
    """scikit-learn's two photographs, preprocessed as the model asks for."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    return torch.stack([transform(Image.fromarray(image)) for image in load_sample_images().images])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.slow
@torch.no_grad()
def test_logits_equal_the_dense_models_on_random_images_and_photographs(full_size):
    case, mixture, dense = full_size
    noise = torch.randn(2, 3, case.img_size, case.img_size, generator=torch.Generator().manual_seed(0))
    images = torch.cat([photographs(dense), noise])
    expected = dense(images)
    assert expected.std() > 0.1  # and not the near-zero logits of a fresh classifier
    logits = [mixture(images)]
    if case.metadata:
        logits.append(mixture(images, case.locations(4)))
    for answer in logits:
        torch.testing.assert_close(answer, expected, rtol=0, atol=TOLERANCE)
    (layer, *_) = mixture_layers(mixture).values()
    layer.experts.fc2.weight.mul_(1.1)  # the comparison notices a wrong expert
    inputs = (images, case.locations(4)) if case.metadata else (images,)
    assert difference(mixture(*inputs), expected) > 100 * TOLERANCE


@torch.no_grad()
def test_every_expert_is_the_dense_feed_forward_bit_by_bit(small_pair):
    mixture, dense = small_pair
    for name, layer in mixture_layers(mixture).items():
        mlp = dense.get_submodule(name)
        for part in ("fc1", "fc2"):
            for kind in ("weight", "bias"):
                source = getattr(getattr(mlp, part), kind)
                for expert in getattr(getattr(layer.experts, part), kind):
                    assert torch.equal(expert, source), (name, part, kind)
                if getattr(layer, "shared", None) is not None:
                    assert torch.equal(getattr(getattr(layer.shared, part), kind), source)


@torch.no_grad()
def test_everything_outside_the_mixture_layers_is_the_dense_model(small_pair):
    mixture, dense = small_pair
    layers = tuple(f"{name}." for name in mixture_layers(mixture))
    ours, theirs = mixture.state_dict(), dense.state_dict()
    outside = {key for key in theirs if not key.startswith(layers)}
    assert outside == {key for key in ours if not key.startswith((*layers, "metadata_encoder."))}
    assert len(outside) > 40
    assert all(torch.equal(ours[key], theirs[key]) for key in outside)


@pytest.fixture
def small_pair(case):
    """The small variant of each model, upcycled, and its dense twin."""
    dense = randomize(case.small_dense()).eval()
    return upcycled(case, dense).eval(), dense


def test_no_parameter_shares_memory_with_another_or_with_the_source(small_pair, tmp_path):
    mixture, dense = small_pair
    storages = [tensor.untyped_storage().data_ptr() for tensor in mixture.state_dict().values()]
    assert len(set(storages)) == len(storages)
    assert not set(storages) & {tensor.untyped_storage().data_ptr() for tensor in dense.state_dict().values()}
    for tensor in mixture.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    safetensors.torch.save_file(mixture.state_dict(), tmp_path / "model.safetensors")  # refuses shared memory
    restored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, mixture.state_dict()[key]) for key, value in restored.items())


def test_routers_are_drawn_anew_at_each_upcycling(case):
    dense = randomize(case.small_dense())
    first, second = upcycled(case, dense).state_dict(), upcycled(case, dense).state_dict()
    drawn = {key for key in first if ".router." in key and first[key].ndim == 2} | {
        key for key in first if key.startswith("metadata_encoder.") and first[key].ndim == 2
    }
    assert drawn
    assert {key for key in first if not torch.equal(first[key], second[key])} >= drawn
    assert not any("experts" in key for key in first if not torch.equal(first[key], second[key]))


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"num_experts": 1, "top_k": 1}, {"num_experts": 3, "top_k": 3}, {"moe_layers": "SSSS"}]
)
def test_upcycled_equals_dense_for_other_options_too(family, options):
    dense = randomize(family.small_dense()).eval()
    mixture = upcycled(family, dense, **options).eval()
    inputs = family.inputs()
    torch.testing.assert_close(mixture(*inputs), dense(inputs[0]), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_mixture_checkpoint_with_fewer_mixture_layers_is_upcycled_in_the_others():
    case = BY_NAME["gmoe_tiny_patch16"]
    source = randomize(case.small(moe_layers=[2])).eval()
    model = case.small(moe_layers=[0, 2], **overlay(source.state_dict())).eval()
    torch.testing.assert_close(model(case.images()), source(case.images()), rtol=0, atol=TOLERANCE)
    assert torch.equal(model.blocks[2].mlp.router.codes, source.blocks[2].mlp.router.codes)


# Sources that differ from the model: classes, channels, image size, pooling


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
    headless = family.small(**{**overlay(dense.state_dict()), "num_classes": 0}).eval()
    torch.testing.assert_close(headless(images), theirs, rtol=0, atol=TOLERANCE)


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
    back = family.small(**overlay(model.state_dict()))
    assert torch.equal(back.norm.weight, model.fc_norm.weight)
    assert torch.equal(back.norm.bias, model.fc_norm.bias)


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
