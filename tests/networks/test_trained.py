"""Trained networks: the classifier that they come with, the names of its classes, and the run that they lie in."""

import numpy as np
import pytest
import timm
import torch

from tests.saved_run import saved_run
from timm_moe_dg.data import FolderDomain, Split
from timm_moe_dg.errors import ArgumentError, CheckpointError, DataError
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.trained import (
    WithFeatures,
    class_positions,
    label_names,
    load_trained,
    match_classes,
    renew_classifier,
    takes_metadata,
)
from timm_moe_dg.storage.run_folder import run_arguments

CLASSES = ("cat", "dog", "owl")
TINY = {"embed_dim": 48, "depth": 2, "num_heads": 3}


@pytest.fixture
def network():
    return timm.create_model("test_vit", num_classes=3)


def test_a_saved_network_comes_with_its_classifier_and_names(tmp_path):
    saved = saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES, {"steps": 5})
    source = f"local-dir:{tmp_path / 'best'}"
    loaded = load_trained(source)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(images), saved(images), rtol=0, atol=0)
    assert not loaded.training
    assert label_names(loaded) == CLASSES
    assert run_arguments(source) == {"steps": 5}
    assert run_arguments("test_vit") == {}
    (tmp_path / "args.yaml").write_text("a: [")
    with pytest.raises(ArgumentError, match=r"model=.*args.yaml.*: cannot be read as YAML"):
        run_arguments(source)


def test_a_run_that_trained_the_shared_expert_answers_with_it(tmp_path):
    saved = saved_run(tmp_path, "moge_tiny", CLASSES)
    saved.set_expert_mode("shared")
    save_network(saved, tmp_path / "best", CLASSES, data_config(saved, 32))
    saved.set_expert_mode("routed")
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([[10.0, 50.0], [-60.0, -30.0]])
    with torch.no_grad():
        found = load_trained(f"local-dir:{tmp_path / 'best'}")(images, places)
        torch.testing.assert_close(found, saved(images), rtol=0, atol=0)
        assert not torch.equal(found, saved(images, places))


def test_metadata_are_for_networks_that_read_them_and_domains_that_have_them(network):
    moge = timm.create_model("moge_tiny", depth=1, embed_dim=48, num_heads=3, moe_layers=(0,))
    plain = FolderDomain("photo", ("a",), [], [])
    placed = FolderDomain("photo", ("a",), [], [], metadata=np.zeros((0, 2)))
    assert takes_metadata(moge, [placed, placed])
    assert not takes_metadata(moge, [placed, plain])
    assert not takes_metadata(network, [placed])


def test_names_by_index_are_put_in_order(network):
    network.pretrained_cfg["label_names"] = {"10": "c", "2": "b", "0": "a"}
    assert label_names(network) == ("a", "b", "c")
    network.pretrained_cfg["label_names"] = ["a", "b"]  # of another classifier than this one
    assert label_names(network) is None


def test_each_logit_is_matched_with_the_data_by_name(network):
    network.pretrained_cfg["label_names"] = list(CLASSES)
    assert class_positions(network, ("owl", "cat", "dog")).tolist() == [1, 2, 0]
    assert class_positions(network, CLASSES).tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match="classes='3: cat, cow, owl': the checkpoint's are 3: cat, dog, owl"):
        class_positions(network, ("cat", "cow", "owl"))
    with pytest.raises(ArgumentError, match="the checkpoint's are 3: cat, dog, owl"):
        class_positions(network, (*CLASSES, "yak"))


@pytest.mark.parametrize("classes", [("owl", "cat", "dog"), ("ant", "cat", "owl", "yak"), ("dog",), ("ant", "yak")])
@pytest.mark.parametrize("name", ["test_vit", "deit_tiny_distilled_patch16_224", "d3g_tiny_patch16", "resnet18"])
def test_a_renewed_classifier_keeps_the_rows_of_classes_by_name(name, classes, caplog):
    caplog.set_level("INFO")
    sizes = {"embed_dim": 24, "depth": 1, "num_heads": 2} if "patch16" in name else {}
    network = timm.create_model(name, num_classes=3, **sizes).eval()
    images = torch.randn(2, 3, *network.pretrained_cfg["input_size"][1:])
    with torch.no_grad():
        before = dict(zip(CLASSES, network(images).unbind(1), strict=True))
        renew_classifier(network, CLASSES, classes, len(classes) + 1)  # a logit that no class has
        for label, logit in zip((*classes, "unused"), network(images).unbind(1), strict=True):
            assert any(torch.allclose(logit, old, atol=1e-6) for old in before.values()) is (label in before)
            torch.testing.assert_close(logit, before.get(label, logit))
    kept = len({*classes} & {*CLASSES})
    assert (
        f"classifier: {kept} classes keep their rows, by name; new: {'ant' if 'ant' in classes else 'n'}" in caplog.text
    )


def test_names_that_are_not_those_of_the_rows_keep_none(network, caplog):
    caplog.set_level("INFO")
    renew_classifier(network, (*CLASSES, "yak"), CLASSES[:2], 2)
    assert "classifier: 0 classes keep their rows, by name; new: cat, dog; left out: none" in caplog.text


def test_classes_of_other_data_are_matched_and_what_the_network_lacks_is_left_out(network, caplog):
    network.pretrained_cfg["label_names"] = ["dog", "cat", "unused_2"]
    domains = [FolderDomain("a", ("cat", "cow", "dog"), [0, 1, 2, 1], ["0", "1", "2", "3"])]
    (matched,), (split,), positions = match_classes(network, domains, [Split(np.array([3, 2, 1]), np.array([0]))])
    assert matched.classes == ("dog", "cat", "unused_2")
    assert (list(matched.targets), list(matched.images)) == ([1, 0], ["0", "2"])
    assert (split.inside.tolist(), split.outside.tolist()) == ([1], [0])
    assert positions.tolist() == [0, 1, 2]
    assert "2 images of classes that the model lacks are left out: 'cow' (2)" in caplog.text
    assert "unused" not in caplog.text
    domains = [FolderDomain("a", ("dog",), [0], ["0"])]
    assert list(match_classes(network, domains, [Split(np.arange(1), np.arange(0))])[0][0].targets) == [0]
    assert "no images of the model's classes 'cat'" in caplog.text
    with pytest.raises(DataError, match="differ by spelling alone: 'Cat' in the data, 'cat' in the model"):
        match_classes(network, [FolderDomain("a", ("Cat", "dog"), [0], ["0"])], [Split(np.arange(1), np.arange(0))])
    for classes, targets in ((("cow",), [0]), (("cat", "cow"), [1])):
        with pytest.raises(ArgumentError, match="classes="):
            match_classes(network, [FolderDomain("a", classes, targets, ["0"])], [Split(np.arange(1), np.arange(0))])


def test_without_names_only_the_number_can_be_checked(network):
    network.pretrained_cfg.pop("label_names", None)
    assert class_positions(network, ("owl", "cat", "dog")).tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match="the checkpoint's are 3 without names"):
        class_positions(network, ("cat", "dog"))


def test_weights_without_a_classifier_answer_nothing(network, tmp_path):
    weights = {key: value for key, value in network.state_dict().items() if not key.startswith("head.")}
    torch.save(weights, tmp_path / "backbone.pth")
    with pytest.raises(CheckpointError, match="model='test_vit': its weights have no classifier"):
        load_trained("test_vit", initial_checkpoint=str(tmp_path / "backbone.pth"))


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("gmoe_tiny_patch16", {**TINY, "moe_layers": (1,), "img_size": 32}),
        ("moge_tiny", {**TINY, "moe_layers": (1,), "img_size": 32}),
        ("erm_le_tiny_patch16", {**TINY, "img_size": 32}),
        ("resnet18", {}),
    ],
)
def test_outputs_follow_from_what_was_collected(name, kwargs):
    network = timm.create_model(name, num_classes=5, **kwargs).eval()
    inputs = [torch.randn(2, 3, 32, 32)]
    if hasattr(network, "metadata_encoder"):
        inputs.append(torch.tensor([[10.0, 20.0], [-10.0, 5.0]]))
    with torch.no_grad():
        logits, features = WithFeatures(network)(*inputs)
        assert torch.equal(network(*inputs), logits)
    assert features.shape == (2, network.num_features)
    assert torch.allclose(network.get_classifier()(features), logits, atol=1e-6)
    assert not network.get_classifier()._forward_pre_hooks
