"""Networks: the weights that were asked for are there, or there is an error that says which are not."""

import json

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.errors import ArgumentError, CheckpointError
from timm_moe_dg.networks.averages import load_predictor
from timm_moe_dg.networks.build import (
    build_network,
    data_config,
    lay_channels_last,
    read_config,
    save_network,
    saved_config,
)
from timm_moe_dg.networks.trained import load_trained

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3}
MIXTURE = {**SMALL, "moe_layers": (1,), "num_experts": 3}
DENSE, GMOE = "deit_tiny_patch16_224", "gmoe_tiny_patch16"


def images(number=3, size=32):
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def dense():
    torch.manual_seed(1)
    return timm.create_model(DENSE, num_classes=10, img_size=32, **SMALL).eval()


@pytest.fixture
def dense_file(dense, tmp_path):
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    return tmp_path / "dense.safetensors"


def stochastic_depth(network):
    return [getattr(block.drop_path1, "drop_prob", 0.0) for block in network.blocks][-1]


def test_plain_network_takes_size_classes_and_stochastic_depth():
    network = build_network(GMOE, 7, img_size=32, model_kwargs=MIXTURE)
    assert network(images()).shape == (3, 7)
    assert stochastic_depth(network) == pytest.approx(0.1)
    assert stochastic_depth(build_network(DENSE, 7, drop_path=0.0, model_kwargs=SMALL)) == 0.0
    assert stochastic_depth(build_network(DENSE, 7, drop_path=0.3, model_kwargs=SMALL)) == pytest.approx(0.3)


def test_network_without_stochastic_depth_or_fixed_size():
    network = build_network("dla46_c", 7, img_size=64)
    assert network(images(size=64)).shape == (3, 7)
    assert data_config(network, 64)["input_size"] == (3, 64, 64)


@pytest.mark.parametrize("model", ["resnet18", "resnet50.tv_in1k"])
def test_resnets_have_stochastic_depth_only_when_asked_for(model):
    def rates(**options):
        network = build_network(model, 7, **options)
        return {block.drop_path.drop_prob for block in network.layer4 if block.drop_path is not None}

    assert rates() <= {0.0}
    assert max(rates(drop_path=0.2)) == pytest.approx(0.2)


def test_the_same_classes_keep_the_classifier_and_others_get_a_new_one(dense, dense_file):
    options = {"initial_checkpoint": dense_file, "img_size": 32, "model_kwargs": SMALL}
    kept, network = (build_network(DENSE, number, **options).eval() for number in (10, 4))
    torch.testing.assert_close(kept(images()), dense(images()), rtol=0, atol=0)
    assert network(images()).shape == (3, 4)
    torch.testing.assert_close(network.forward_features(images()), dense.forward_features(images()), rtol=0, atol=0)


BACKBONE = {**SMALL, "backbone": f"{DENSE}.fb_in1k", "moe_layers": (1,), "num_experts": 3}


def test_dense_checkpoint_of_a_backbone_is_upcycled_and_its_mixture_loaded_again(dense, dense_file, tmp_path):
    network = build_network("gmoe", 4, initial_checkpoint=dense_file, img_size=32, model_kwargs=BACKBONE).eval()
    torch.testing.assert_close(
        network.forward_features(images()), dense.forward_features(images()), rtol=1e-5, atol=1e-5
    )
    kept = build_network("gmoe", 10, initial_checkpoint=dense_file, img_size=32, model_kwargs=BACKBONE).eval()
    torch.testing.assert_close(kept(images()), dense(images()), rtol=1e-5, atol=1e-5)
    save_file(network.state_dict(), tmp_path / "mixture.safetensors")
    again = build_network(
        "gmoe", 4, initial_checkpoint=tmp_path / "mixture.safetensors", img_size=32, model_kwargs=BACKBONE
    )
    assert torch.equal(again.eval()(images()), network(images()))


@pytest.mark.parametrize("name", [DENSE, GMOE, "test_resnet"])
@pytest.mark.parametrize("key", ["missing", "misfit"])
def test_incomplete_checkpoint_is_refused_also_with_other_classes(name, key, tmp_path):
    kwargs = {DENSE: SMALL, GMOE: MIXTURE}.get(name, {})
    network = timm.create_model(name, num_classes=10, **({"img_size": 32} if kwargs else {}), **kwargs)
    weights = dict(network.state_dict())
    victim = [name for name, value in weights.items() if value.ndim > 1 and "pos_embed" not in name][2]
    if key == "missing":
        del weights[victim]
    else:
        weights[victim] = torch.zeros(5, 5)
    save_file(weights, tmp_path / "broken.safetensors")
    with pytest.raises(CheckpointError) as caught:
        build_network(name, 4, initial_checkpoint=tmp_path / "broken.safetensors", img_size=32, model_kwargs=kwargs)
    assert victim in str(caught.value)


@pytest.mark.parametrize("content", [None, b"these are no weights"], ids=["absent", "garbage"])
def test_unreadable_checkpoint_is_named(tmp_path, content):
    path = tmp_path / "weights.pth"
    if content:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"initial_checkpoint='.*weights.pth': cannot start"):
        build_network(DENSE, 4, initial_checkpoint=path, model_kwargs=SMALL)


def test_published_weights_that_cannot_be_had(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=r"pretrained=True: the weights of test_vit cannot be had"):
        build_network("test_vit", 4, pretrained=True)


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("gmoe_tiny_patch61", {}, "model='gmoe_tiny_patch61': .*did you mean gmoe_tiny_patch16"),
        ("no/such/model", {}, "model='no/such/model'"),
        ("zzz", {}, "model='zzz'"),
        ("deit_tiny_patch16_224.no_such_tag", {}, r"model='deit_tiny_patch16_224\.no_such_tag'.*fb_in1k"),
        ("dla46_c", {"drop_path": 0.2}, "model_kwargs=.*'drop_path_rate': 0.2"),
        (GMOE, {"img_size": 100}, "img_size=100: .*96 or 112"),
        (GMOE, {"model_kwargs": {"drop_path_rate": 1}}, "drop_path_rate=1"),
        (GMOE, {"model_kwargs": {"num_expert": 4}}, "num_expert=4: .*did you mean num_experts"),
        (GMOE, {"model_kwargs": {"num_classes": 5}}, "model_kwargs=.*num_classes"),
        (GMOE, {"model_kwargs": {"pretrained": True}}, "model_kwargs=.*pretrained"),
        (GMOE, {"model_kwargs": {"metadata_columns": {"height": [0, 1]}}}, "metadata_columns="),
    ],
    ids=str,
)
def test_a_model_or_arguments_that_cannot_work_are_named(name, options, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}"):
        build_network(name, 4, **options)


@pytest.mark.parametrize("name", [DENSE, GMOE])
def test_saved_folder_reloads_with_its_classes_and_its_preprocessing(name, tmp_path):
    network = build_network(name, 4, img_size=32, model_kwargs=MIXTURE if name == GMOE else SMALL).eval()
    config = data_config(network, 32)
    save_network(network, tmp_path / "best", classes=list("abcd"), config=config)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["config.json", "model.safetensors"]
    reloaded = timm.create_model(f"local-dir:{tmp_path / 'best'}", pretrained=True).eval()
    torch.testing.assert_close(reloaded(images()), network(images()), rtol=0, atol=0)
    assert load_file(tmp_path / "best" / "model.safetensors").keys() == network.state_dict().keys()

    source, saved = f"local-dir:{tmp_path / 'best'}", json.loads((tmp_path / "best" / "config.json").read_text())
    assert saved["label_names"] == list("abcd")
    assert saved["num_classes"] == saved["pretrained_cfg"]["num_classes"] == 4
    assert "num_classes" not in saved["model_args"]
    assert saved["model_args"].get("num_experts") == (MIXTURE["num_experts"] if name == GMOE else None)
    assert read_config(tmp_path / "best" / "config.json") == saved_config(source) == saved
    assert saved_config(name) == {}

    same, other = (build_network(source, number, pretrained=True).eval() for number in (4, 5))
    torch.testing.assert_close(same(images()), network(images()), rtol=0, atol=0)
    torch.testing.assert_close(other.forward_features(images()), network.forward_features(images()), rtol=0, atol=0)
    assert other(images()).shape == (3, 5)

    photograph = Image.effect_noise((50, 70), 80).convert("RGB")
    ours = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])(photograph)
    theirs = create_transform(**timm.data.resolve_model_data_config(reloaded), is_training=False)(photograph)
    torch.testing.assert_close(ours, theirs)


def test_a_network_with_channels_last_answers_alike_and_saves_the_same_file(tmp_path):
    network = timm.create_model("resnet10t", num_classes=3).eval()
    images = torch.rand(2, 3, 64, 64)
    save_network(network, tmp_path / "usual", ("a", "b", "c"), data_config(network))
    before = network(images)
    lay_channels_last(network)
    assert not network.layer1[0].conv1.weight.is_contiguous()
    seen = []
    network.layer1[0].conv1.register_forward_hook(lambda module, inputs, output: seen.append(output))
    torch.testing.assert_close(network(images), before, rtol=1e-5, atol=1e-5)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)  # images follow the weights
    save_network(network, tmp_path / "last", ("a", "b", "c"), data_config(network))
    names = ("model.safetensors", "config.json")
    assert all((tmp_path / "usual" / one).read_bytes() == (tmp_path / "last" / one).read_bytes() for one in names)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, None),
        ({"expert_drop": 0.3, "router_noise": 0.5}, None),
        ({"top_k": 1}, "top_k=1 (2)"),
        ({"router_kwargs": {"scores": "sigmoid"}, "router": "linear"}, "router_kwargs={'scores': 'sigmoid'} (None)"),
        ({"normalize_weights": False}, "normalize_weights=False (None)"),
    ],
)
def test_options_that_differ_from_those_of_a_checkpoint_are_named(tmp_path, caplog, changes, named):
    size = {"patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "moe_layers": (1,), "num_experts": 3}
    size |= {"router": "linear"} if "router" in changes else {}
    network = build_network("gmoe_tiny_patch16", 3, img_size=32, model_kwargs={**size, "top_k": 2})
    save_network(network, tmp_path, list("abc"), data_config(network, 32))
    kwargs = {**size, "top_k": 2, **changes}
    build_network(
        "gmoe_tiny_patch16", 3, initial_checkpoint=tmp_path / "model.safetensors", img_size=64, model_kwargs=kwargs
    )
    messages = [message for message in caplog.messages if "were trained with the options" in message]
    assert len(messages) == (named is not None)
    assert (named or "") in "".join(messages)


@pytest.mark.parametrize("prefix", ["model.", "backbone.", "teacher.backbone.", "base_model.model.", "module.net."])
@pytest.mark.parametrize("model", [DENSE, "gmoe", GMOE, "resnet18"])
def test_a_common_prefix_of_all_names_is_left_out_and_named(prefix, model, dense, tmp_path, caplog):
    source = timm.create_model("resnet18", num_classes=10).eval() if model == "resnet18" else dense
    caplog.set_level("INFO")
    weights = {f"{prefix}{name}": value for name, value in source.state_dict().items()}
    save_file(weights, tmp_path / "wrapped.safetensors")
    kwargs = {DENSE: SMALL, GMOE: MIXTURE, "gmoe": BACKBONE}.get(model, {})
    network = build_network(
        model,
        10,
        initial_checkpoint=tmp_path / "wrapped.safetensors",
        img_size=32 if kwargs else None,
        model_kwargs=kwargs,
    )
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(images()), source(images()), rtol=1e-5, atol=1e-5)
    assert "state_dict" not in network.pretrained_cfg
    # timm itself removes "module."
    assert sum(repr(prefix.removeprefix("module.")) in message for message in caplog.messages) == 1


@pytest.mark.parametrize("model", [DENSE, GMOE, "test_resnet"])
def test_a_prefix_of_weights_that_do_not_fit_is_named(model, tmp_path):
    save_file(
        {f"base_model.model.{index}.lora_A.weight": torch.zeros(2, 3) for index in range(2)}, tmp_path / "w.safetensors"
    )
    with pytest.raises(CheckpointError) as caught:
        build_network(model, 10, initial_checkpoint=tmp_path / "w.safetensors")
    assert "'base_model.model.'" in str(caught.value)


@pytest.mark.parametrize(
    ("router_kwargs", "state", "start"),
    [({"bias_speed": 0.01}, "expert_bias", 0.0), ({"choice": "threshold"}, "expert_thresholds", 2.0)],
)
@pytest.mark.parametrize("model", [GMOE, "gmoe"])
@pytest.mark.parametrize("by_folder", [False, True])
def test_a_mixture_without_bias_starts_a_router_that_has_one(
    router_kwargs, state, start, model, by_folder, tmp_path, caplog
):
    caplog.set_level("INFO")
    kwargs = {**(MIXTURE if model == GMOE else BACKBONE), "router": "linear"}
    first = build_network(model, 4, img_size=32, model_kwargs=kwargs)
    save_network(first, tmp_path, list("abcd"), data_config(first, 32))
    source = {"pretrained": True} if by_folder else {"initial_checkpoint": tmp_path / "model.safetensors"}
    name = f"local-dir:{tmp_path}" if by_folder else model
    again = build_network(name, 4, img_size=32, model_kwargs={**kwargs, "router_kwargs": router_kwargs}, **source)
    buffers = {key: value for key, value in again.state_dict().items() if key.endswith(state)}
    assert buffers
    assert all((value == start).all() for value in buffers.values())
    weights = first.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items() if key not in buffers)
    assert sum(all(key in message for key in buffers) for message in caplog.messages) == 1


def damaged(folder):
    """Flips a bit of the last weight."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    "start",
    [
        lambda folder: build_network(f"local-dir:{folder}", None, pretrained=True),
        lambda folder: build_network(f"local-dir:{folder}", 3, pretrained=True),
        lambda folder: build_network(
            DENSE, 3, initial_checkpoint=folder / "model.safetensors", img_size=32, model_kwargs=SMALL
        ),
        lambda folder: build_network(
            "gmoe", 3, pretrained=True, model_kwargs={"backbone": f"local-dir:{folder}", "moe_layers": (1,)}
        ),
        lambda folder: load_trained(f"local-dir:{folder}"),
        lambda folder: load_predictor(f"local-dir:{folder.parent}"),  # an ensemble
    ],
)
def test_weights_that_changed_after_they_were_saved_are_refused(start, dense, tmp_path):
    folder = tmp_path / "0"
    save_network(dense, folder, [str(index) for index in range(10)], data_config(dense, 32))
    start(folder)
    build_network(f"local-dir:{folder}", 3)  # without its weights
    damaged(folder)
    with pytest.raises(CheckpointError) as caught:
        start(folder)
    assert str(folder / "model.safetensors") in str(caught.value)
    assert "weights_sha256" in str(caught.value)
    config = read_config(folder / "config.json")
    del config["weights_sha256"]  # as in folders of earlier versions, or on purpose
    (folder / "config.json").write_text(json.dumps(config))
    start(folder)
