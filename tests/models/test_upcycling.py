"""Any network of timm's as the dense source: equal to it at first, then a mixture in all that timm does to it."""

import copy
import json
import pickle
import warnings
from collections import OrderedDict

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import Mlp
from timm.models import save_for_hf
from timm.models._features import FeatureGetterNet
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

import timm_moe_dg
from tests.models.backbones import BACKBONES, Backbone
from tests.models.cases import mixture_layers, overlay, randomize
from timm_moe_dg.errors import ArgumentError, CheckpointError, MoeLayersError, OptionError, RouterError
from timm_moe_dg.models import upcycling
from timm_moe_dg.models.upcycling import find_feed_forwards, refused_feed_forwards

VIT = BACKBONES["Mlp"]


LARGE = ("Mlp of channels", "NormMlp", "StarReLU")  # those that cannot be built small


@pytest.fixture(params=[pytest.param(form, marks=pytest.mark.slow if form in LARGE else ()) for form in BACKBONES])
def backbone(request) -> Backbone:
    torch.manual_seed(0)
    return BACKBONES[request.param]


@pytest.fixture(scope="module")
def mixtures():
    """The mixture on each backbone with experts that differ, built once; tests leave it as it is."""
    built = {}

    def build(backbone: Backbone) -> nn.Module:
        if backbone.name not in built:
            built[backbone.name] = randomize(backbone.mixture(), std=0.02).eval()
        return built[backbone.name]

    return build


@torch.no_grad()
def test_an_upcycled_network_computes_what_the_dense_one_does(backbone):
    dense = randomize(backbone.dense(), std=0.02).eval()
    expected = dense(backbone.images())
    assert len(find_feed_forwards(dense)) == backbone.count
    mixture = timm_moe_dg.upcycle(dense, "every_two", num_experts=3)
    assert mixture is dense
    layers = mixture_layers(mixture)
    assert len(layers) == (backbone.count + 1) // 2
    torch.testing.assert_close(mixture(backbone.images()), expected, rtol=0, atol=1e-5)
    for layer in layers.values():
        layer.fc2.weight.mul_(10)
    assert (mixture(backbone.images()) - expected).abs().max() > 1e-4


@torch.no_grad()
def test_a_saved_mixture_comes_back_from_its_folder_alone(backbone, mixtures, tmp_path):
    mixture = mixtures(backbone)
    save_for_hf(mixture, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    dense = timm.get_pretrained_cfg(backbone.name)
    assert config["architecture"] == "gmoe"
    assert config["model_args"]["backbone"] == ".".join(filter(None, (backbone.name, dense.tag)))
    assert config["model_args"]["moe_layers"] == list(range(0, backbone.count, 2))
    assert config["model_args"]["top_k"] == 2
    assert tuple(config["pretrained_cfg"]["mean"]) == tuple(dense.mean)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in mixture.state_dict().items())
    assert torch.equal(again(backbone.images()), mixture(backbone.images()))


def test_every_parameter_gets_a_gradient(backbone, mixtures):
    mixture = copy.deepcopy(mixtures(backbone)).train()
    loss = mixture(backbone.images()).square().mean() + timm_moe_dg.auxiliary_loss(mixture)
    loss.backward()
    assert not [name for name, parameter in mixture.named_parameters() if parameter.grad is None]


@torch.no_grad()
def test_copies_and_pickles_work_and_name_their_own_parameters(backbone, mixtures):
    mixture = mixtures(backbone)
    exempt = mixture.no_weight_decay()
    names = set(dict(mixture.named_parameters()))
    assert {name for name in names if name.endswith((".experts.fc2.bias", ".router.codes"))} <= exempt
    for twin in (copy.deepcopy(mixture), pickle.loads(pickle.dumps(mixture))):
        assert torch.equal(twin(backbone.images()), mixture(backbone.images()))
        assert twin.no_weight_decay() == exempt
        assert twin.no_weight_decay.args[0] is twin


def test_experts_take_their_blocks_learning_rate_and_their_biases_no_decay(backbone, mixtures):
    mixture = mixtures(backbone)
    groups = param_groups_layer_decay(mixture, 0.05, mixture.no_weight_decay(), layer_decay=0.5)
    names = {id(parameter): name for name, parameter in mixture.named_parameters()}
    scale = {names[id(one)]: (group["lr_scale"], group["weight_decay"]) for group in groups for one in group["params"]}
    for name in mixture_layers(mixture):
        block = name.rpartition(".")[0]
        beside = {scale[one][0] for one in scale if one.startswith(block) and not one.startswith(name)}
        assert {scale[one][0] for one in scale if one.startswith(f"{name}.")} <= beside
        assert scale[f"{name}.experts.fc2.weight"][1] == 0.05
        assert all(scale[one][1] == 0 for one in scale if one.startswith(name) and one.endswith(("fc2.bias", "codes")))
    groups = param_groups_weight_decay(mixture, 0.05, no_weight_decay_list=mixture.no_weight_decay())
    decayed = {names[id(one)] for group in groups if group["weight_decay"] for one in group["params"]}
    assert any("experts.fc1.weight" in name for name in decayed)
    assert not any("experts.fc1.bias" in name or "codes" in name for name in decayed)


@pytest.mark.parametrize("name", ["poolformer_s12", "pit_ti_224", "csatv2"])
def test_networks_without_layer_groups_keep_those_that_timm_counts(name):
    scales = []
    with torch.device("meta"):
        networks = timm.create_model(name), timm_moe_dg.upcycle(timm.create_model(name), "every_two")
    for network in networks:
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        groups = param_groups_layer_decay(network, layer_decay=0.5)
        scales.append({names[id(one)]: group["lr_scale"] for group in groups for one in group["params"]})
    dense, mixture = scales
    assert {key: mixture[key] for key in dense.keys() & mixture.keys()} == {
        key: dense[key] for key in dense.keys() & mixture.keys()
    }
    for key in mixture.keys() - dense.keys():  # experts and routers
        block = key.partition(".mlp.")[0]
        assert mixture[key] in {dense[other] for other in dense if other.startswith(f"{block}.mlp.")}


@torch.no_grad()
def test_feature_maps_are_the_backbones(backbone):
    options = {**backbone.options, "features_only": True}
    try:
        dense = timm.create_model(backbone.name, **options)
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"nor does the dense network: {error}")
    mixture = timm.create_model("gmoe", backbone=backbone.name, **options)
    assert isinstance(mixture, FeatureGetterNet)
    assert [one.shape for one in mixture(backbone.images())] == [one.shape for one in dense(backbone.images())]
    assert mixture.output_fmt == dense.output_fmt
    assert mixture.feature_info.channels() == dense.feature_info.channels()


@torch.no_grad()
def test_feature_maps_with_channels_last_have_the_values_of_the_others():
    swin = BACKBONES["Mlp of windows"]
    last = randomize(swin.mixture(features_only=True)).eval()
    first = swin.mixture(features_only=True, output_fmt="NCHW").eval()
    first.load_state_dict(last.state_dict())
    for one, other in zip(last(swin.images()), first(swin.images()), strict=True):
        assert torch.equal(one.movedim(-1, 1), other)


# Padding


def naflex(**options):
    size = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": [0, 1], "num_experts": 3}
    still = {"capacity_factor": 0.7, "router_noise": 0.0, "expert_drop": 0.0, "num_classes": 4}
    torch.manual_seed(0)
    return randomize(timm.create_model("gmoe", backbone="naflexvit_base_patch16_gap", **size, **still, **options))


def naflex_batch(length):
    """Two images of 6 and 9 patches, padded to a length."""
    generator = torch.Generator().manual_seed(0)
    patches, valid = torch.zeros(2, length, 48), torch.zeros(2, length, dtype=torch.bool)
    coordinates = torch.zeros(2, length, 2, dtype=torch.long)
    for row, (height, width) in enumerate([(2, 3), (3, 3)]):
        count = height * width
        patches[row, :count] = torch.randn(count, 48, generator=generator)
        coordinates[row, :count] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        valid[row, :count] = True
    return {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}


@pytest.mark.parametrize("options", [{}, {"use_key_only_attn_mask": True}], ids=["symmetric", "keys alone"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_of_naflex_batches_is_neither_routed_nor_counted(options, checkpointing):
    model = naflex(**options).train()
    model.set_grad_checkpointing(checkpointing)
    results = []
    for length in (9, 30):
        model.zero_grad()
        logits, loss = model(naflex_batch(length)), timm_moe_dg.auxiliary_loss(model)
        routings = [layer.routing for layer in mixture_layers(model).values()]
        counts = [int(routing.dropped.sum()) for routing in routings]
        (logits.square().sum() + loss).backward()
        results.append((logits, loss, [parameter.grad for parameter in model.parameters()]))
        results[-1] += (torch.tensor(counts),)
        assert [int(routing.routed.sum()) for routing in routings] == [15 + 2 * model.num_prefix_tokens] * 2
    assert results[0][-1].gt(0).all()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("shape", [(6, 6), (1, 6), (2, 1, 6, 6), (2, 2, 6, 6), (2, 1, 1, 6), (1, 1, 6, 6)])
@pytest.mark.parametrize("boolean", [False, True])
def test_padding_is_told_by_masks_of_every_form(shape, boolean):
    model = naflex().eval()
    allowed = (torch.arange(6) < 4).expand(shape)
    mask = allowed if boolean else torch.zeros(shape).masked_fill(~allowed, -torch.inf)
    layer = model.blocks[0].mlp
    layer.record_routing = True
    model.blocks[0](torch.randn(2, 6, 24), attn_mask=mask)
    assert layer.routing.routed.view(2, 6).tolist() == [[True] * 4 + [False] * 2] * 2


def test_images_of_one_size_have_no_padding():
    model = naflex().train()
    model(naflex_batch(9))
    model(torch.randn(2, 3, 8, 8))
    assert all(layer.routing.routed is None for layer in mixture_layers(model).values())


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("form", ["Mlp", "Mlp, 1x1 convolutions", "SwiGLU, inner norm"])
def test_exported_and_compiled_programs_compute_the_same(form):
    mixture = randomize(BACKBONES[form].mixture()).eval()
    images = BACKBONES[form].images()
    expected = mixture(images)
    torch.testing.assert_close(torch.export.export(mixture, (images,)).module()(images), expected)
    torch.testing.assert_close(torch.compile(mixture, backend="eager", fullgraph=True)(images), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "backend"), [("Mlp", "aot_eager"), ("GluMlp", "inductor"), ("Mlp, channels last", "aot_eager")]
)
def test_compiled_programs_train_as_eager_mode_does(form, backend):
    # aot_eager takes the same two graphs as inductor, without half a minute of a compiler's work
    options = {"moe_layers": [0], "expert_drop": 0.0, "router_noise": 0.0}
    eager = randomize(BACKBONES[form].mixture(**options)).train()
    compiled = copy.deepcopy(eager)
    torch._dynamo.reset()
    images = BACKBONES[form].images()
    for model, answer in ((eager, eager), (compiled, torch.compile(compiled, fullgraph=True, backend=backend))):
        answer(images).square().mean().backward()
        model.found = answer(images).detach()
    torch.testing.assert_close(compiled.found, eager.found, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-5 * max(1, theirs.grad.abs().max()), name


# Loading


@torch.no_grad()
def test_dense_weights_are_loaded_by_timm_and_upcycled(backbone):
    dense = randomize(backbone.dense(), std=0.02).eval()
    mixture = backbone.mixture(**overlay(dense.state_dict(), num_classes=4)).eval()
    torch.testing.assert_close(mixture(backbone.images()), dense(backbone.images()), rtol=0, atol=1e-5)
    assert "state_dict" not in mixture.pretrained_cfg


@torch.no_grad()
def test_positions_channels_and_classes_are_adapted_in_dense_and_in_mixture_checkpoints(tmp_path):
    dense = randomize(VIT.dense()).eval()
    given = {"img_size": 64, "in_chans": 1, "num_classes": 3}
    theirs = VIT.dense(**{**given, **overlay(dense.state_dict(), num_classes=4)}).eval()
    ours = VIT.mixture(**{**given, **overlay(dense.state_dict(), num_classes=4)}).eval()
    images = torch.randn(2, 1, 64, 64)
    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), rtol=0, atol=1e-5)
    save_for_hf(VIT.mixture(**overlay(dense.state_dict(), num_classes=4)), tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, **given).eval()
    torch.testing.assert_close(again.forward_features(images), theirs.forward_features(images), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_mixtures_own_file_is_loaded_and_another_placement_refused(tmp_path):
    mixture = randomize(VIT.mixture()).eval()
    file = tmp_path / "mixture.safetensors"
    save_file(mixture.state_dict(), file)
    given = {"pretrained": True, "pretrained_cfg_overlay": {"file": str(file), "num_classes": 4}}
    assert torch.equal(VIT.mixture(**given).eval()(VIT.images()), mixture(VIT.images()))
    with pytest.raises(CheckpointError, match=r"moe_layers that it was trained with.*missing.*blocks\.1\.mlp\.experts"):
        VIT.mixture(**given, moe_layers=[1])
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp does not fit the checkpoint"):
        VIT.mixture(**given, num_experts=4)
    weights = mixture.state_dict()
    del weights["blocks.1.norm1.weight"]
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint \(1\): blocks\.1\.norm1\.weight"):
        VIT.mixture(**overlay(weights, num_classes=4), num_classes=9)


@torch.no_grad()
def test_a_mixtures_weights_are_loaded_without_a_warning_about_the_dense_ones(tmp_path):
    with pytest.warns(UserWarning, match="top_k=2 with combine weights"):
        save_for_hf(VIT.mixture(normalize_weights=False), tmp_path, safe_serialization=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


@torch.no_grad()
def test_a_network_upcycled_by_hand_is_saved_and_loaded_like_one_of_timms(tmp_path):
    mixture = timm_moe_dg.upcycle(VIT.dense(), moe_layers=[1], router="linear", top_k=3, num_experts=5).eval()
    save_for_hf(mixture, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(VIT.images()), mixture(VIT.images()))


def test_layers_that_share_weights_share_their_mixture():
    first = Mlp(8, 16)
    network = nn.Sequential(OrderedDict(one=first, other=Mlp(8, 16), again=first))
    timm_moe_dg.upcycle(network, [0], num_experts=2)
    assert network.one is network.again
    assert type(network.other) is Mlp


# What is refused


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("convnextv2_atto", "stages.0.blocks.0.mlp", "GlobalResponseNormMlp"),
        ("pvt_v2_b0", "stages.0.blocks.0.mlp", "MlpWithDepthwiseConv"),
        ("gmlp_s16_224", "blocks.0.mlp_channels", "GatedMlp"),
        ("levit_128s", "stages.0.blocks.0.mlp", "LevitMlp"),
        ("swiftformer_xs", "stages.0.blocks.2.linear", "Mlp"),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name(name, layer, reason):
    model = timm.create_model(name, device="meta")
    assert reason in refused_feed_forwards(model).get(layer, "")
    with pytest.raises(MoeLayersError, match=f"{name}.*has no feed-forward that experts can be copies of.*{reason}"):
        timm_moe_dg.upcycle(model)


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("mixer_s32_224", "mlp_tokens"),
        ("tnt_s_patch16_224", "mlp_in"),
        ("swinv2_cr_tiny_224", "meta_mlp"),
        ("vit_relpos_small_patch16_224", "rel_pos.mlp"),
        ("vit_base_patch16_siglip_224", "attn_pool.mlp"),
    ],
)
def test_modules_of_a_known_class_that_are_no_feed_forward_stay(name, never):
    model = timm.create_model(name, device="meta")
    assert [one for one, _ in model.named_modules() if one.endswith(never)]
    assert not [one for one in find_feed_forwards(model) if one.endswith(never)]


class Twice(Mlp):
    """A subclass may compute anything."""


def test_feed_forwards_are_counted_as_the_network_has_them():
    dense = VIT.dense()
    dense.blocks[0].mlp = Twice(48, 192)
    for moe_layers, chosen in (([1], 1), ("FFS", 2), ("every_two", 2)):
        mixture = timm_moe_dg.upcycle(copy.deepcopy(dense), moe_layers)
        assert list(mixture_layers(mixture)) == [f"blocks.{chosen}.mlp"]
        assert mixture.mixture_args["moe_layers"] == [chosen]
    for moe_layers in ([0], [0, 2], "SFF"):
        with pytest.raises(MoeLayersError, match=r"blocks\.0\.mlp cannot become a mixture \(mlp='Twice'.*among 1, 2"):
            timm_moe_dg.upcycle(dense, moe_layers)
    assert not mixture_layers(dense)


def test_a_class_that_timm_changes_is_noticed(monkeypatch):
    model = VIT.dense()
    monkeypatch.setattr(Mlp, "forward", lambda self, x: self.fc2(self.act(self.fc1(x))) - x.mean(1, keepdim=True))
    with pytest.raises(RouterError, match="mlp='Mlp': computes something else"):
        timm_moe_dg.upcycle(model)
    assert type(model.blocks[0].mlp) is Mlp


def test_drawing_and_probing_leave_the_random_state_of_the_rest_alone(monkeypatch):
    torch.manual_seed(0)
    first = timm_moe_dg.upcycle(VIT.dense(), num_experts=2).state_dict()
    monkeypatch.setattr(upcycling, "check_token_wise", lambda chosen: None)
    torch.manual_seed(0)
    second = timm_moe_dg.upcycle(VIT.dense(), num_experts=2).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_function_that_is_not_kept_is_warned_of():
    with pytest.warns(UserWarning, match="top_k=1 .*does not compute what the dense one did"):
        timm_moe_dg.upcycle(VIT.dense(), top_k=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timm_moe_dg.upcycle(VIT.dense())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backbone": "resnet18"}, MoeLayersError, "resnet18.*no feed-forward.*choose a transformer or ConvNeXt"),
        ({"backbone": "vit_tiny_patch16_224", "moe_layers": [12]}, MoeLayersError, r"moe_layers=\[12\]: .*0 to 11"),
        ({"backbone": "vit_tiny_patch16_224.nope"}, ArgumentError, "no such weights; .*augreg_in21k_ft_in1k"),
        ({"backbone": "vit_tiny_patch"}, ArgumentError, "did you mean vit_tiny_patch16_384"),
        ({"backbone": "test_vit", "metadata_encoder": "sincos"}, OptionError, "metadata_encoder.*own options are moe"),
        ({"backbone": "test_vit", "router": "metadata"}, RouterError, "choose from cosine"),
        ({"backbone": "test_vit", "top_k": 9}, RouterError, "top_k=9: choose 1 to"),
    ],
)
def test_bad_input_is_named_with_what_would_work(options, error, message):
    with pytest.raises(error, match=message):
        timm.create_model("gmoe", **options)


def test_a_tag_of_gmoe_itself_is_that_of_its_default_backbone_or_is_pointed_to_the_backbones():
    assert timm.create_model("gmoe.deit_in1k", device="meta").mixture_args["backbone"].endswith(".fb_in1k")
    with pytest.raises(ArgumentError, match=r"backbone='NAME\.openai'"):
        timm.create_model("gmoe.openai")


def test_another_way_to_features_than_the_networks_own_is_refused():
    assert VIT.mixture(features_only=True, feature_cls="getter").feature_info
    with pytest.raises(ArgumentError, match="feature_cls='hook': give 'getter'"):
        VIT.mixture(features_only=True, feature_cls="hook")


def test_a_configuration_whose_backbone_timm_has_no_longer_says_so(tmp_path):
    save_for_hf(VIT.mixture(), tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_args"]["backbone"] = "vit_base_patch16_clip_slowgelu_224.openai"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ArgumentError, match=r"does not have this network of config.json.* timm that saved it.*quickgelu"
    ):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)


def test_a_network_is_upcycled_once():
    with pytest.raises(MoeLayersError, match="has mixtures of experts already"):
        timm_moe_dg.upcycle(VIT.mixture())
