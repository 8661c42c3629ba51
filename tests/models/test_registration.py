"""What timm knows about the models without building their weights."""

import pytest
import timm
from timm.data import resolve_model_data_config

from tests.models.cases import BY_NAME, CASES, mixture_layers
from timm_moe_dg.models.gmoe import resolve_moe_layers

MODULES = {
    "gmoe": {f"gmoe_{size}_patch16" for size in ("tiny", "small", "base")} | {"sfmoe_small", "hybrid_sfmoe_r26_s16"},
    "moge": {"moge_tiny", "moge_small_patch32_384"},
    "backbone": {"gmoe", "moge", "erm_le", "text_classifier"},
}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_name_lists_our_models_and_none_of_timms(module):
    assert set(timm.list_models(module=module)) == MODULES[module]


def test_the_only_tag_is_the_default_configuration_and_names_the_dense_source(registered):
    name, tag = registered.name, registered.tag
    assert timm.list_models(f"{name}*", pretrained=True) == [f"{name}.{tag}"]
    cfg, dense = timm.get_pretrained_cfg(name), timm.get_pretrained_cfg(registered.dense)
    assert cfg == timm.get_pretrained_cfg(f"{name}.{tag}")
    assert cfg.architecture == name
    assert cfg.hf_hub_id == f"timm/{registered.dense}"
    assert not cfg.url
    assert not cfg.custom_load  # it would go past the filter that upcycles
    assert cfg.license == "apache-2.0"
    keys = "num_classes input_size mean std crop_pct interpolation first_conv classifier license"
    for key in keys.split():
        assert getattr(cfg, key) == getattr(dense, key), key


def test_preprocessing_and_image_size_are_those_of_the_dense_model(registered):
    mixture = registered.build(device="meta", weight_init="skip")
    dense = registered.build_dense(device="meta", weight_init="skip")
    assert resolve_model_data_config(mixture) == resolve_model_data_config(dense)
    assert mixture.patch_embed.img_size == (registered.img_size, registered.img_size)


@pytest.mark.parametrize(
    ("moe_layers", "expected"),
    [
        ("last_two", (8, 10)),
        ("every_two", (0, 2, 4, 6, 8, 10)),
        ("FFFFFFFFSFSF", (8, 10)),
        ([5, 11], (5, 11)),
        ((11, 5, 5), (5, 11)),
        (range(3), (0, 1, 2)),
    ],
)
def test_forms_of_moe_layers(moe_layers, expected):
    assert resolve_moe_layers(moe_layers, 12) == expected
    assert list(mixture_layers(BY_NAME["moge_tiny"].build(moe_layers=moe_layers, device="meta"))) == [
        f"blocks.{index}.mlp" for index in expected
    ]


def test_expert_options_are_frozen_per_name():
    # Saved checkpoints do not record these defaults, so a change would make them unloadable
    layers = {case.name: case.build(device="meta", weight_init="skip").blocks for case in CASES}
    frozen = {
        name: (
            [index for index, block in enumerate(blocks) if hasattr(block.mlp, "router")],
            type(blocks[8].mlp.router).__name__,
            blocks[8].mlp.experts.num_experts,
            blocks[8].mlp.router.top_k,
            blocks[8].mlp.experts.drop.p,
        )
        for name, blocks in layers.items()
    }
    gmoe, every_two = ([8, 10], "CosineRouter", 6, 2, 0.1), ([0, 2, 4, 6, 8, 10], "LinearRouter", 6, 2, 0.1)
    assert {name: (*value[:4], pytest.approx(value[4])) for name, value in frozen.items()} == {
        "gmoe_tiny_patch16": gmoe,
        "gmoe_small_patch16": gmoe,
        "gmoe_base_patch16": gmoe,
        "sfmoe_small": every_two,
        "hybrid_sfmoe_r26_s16": every_two,
        "moge_tiny": ([8, 10], "MetadataRouter", 6, 3, 0.0),
        "moge_small_patch32_384": ([8, 10], "MetadataRouter", 6, 3, 0.0),
    }
