"""A published model comes back over HTTP, bit by bit, through timm alone, and for the tools."""

import shutil

import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image

from tests.hub.published import CLASSES, NAMES, REPOSITORY, card_of_network, case_of, fine_tuned
from tests.hub_server import Repository
from tests.load_tool import load_tool
from tests.saved_run import saved_run
from timm_moe_dg.data.readers.digits import CLASSES as DIGITS
from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.hub.push import push_folder
from timm_moe_dg.networks.build import build_network
from timm_moe_dg.networks.calibration import load_calibration
from timm_moe_dg.networks.trained import load_trained

pytestmark = pytest.mark.usefixtures("hub")
HUB = f"hf-hub:{REPOSITORY}"
QUICK = ["--workers", "0", "--batch-size", "500"]


def publish(folder, network):
    card_of_network(folder, network)
    return push_folder(folder, REPOSITORY)


def equal_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@torch.no_grad()
@pytest.mark.parametrize("name", [*NAMES, "deit_tiny_patch16_224"])
def test_every_model_comes_back_bit_by_bit(name, tmp_path):
    torch.manual_seed(0)
    size = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3} if name.startswith("deit") else {}
    network = fine_tuned(name, **size)
    publish(tmp_path / "folder", network)
    again = timm.create_model(HUB, pretrained=True).eval()
    assert equal_weights(network, again)
    inputs = case_of(name).inputs() if name in NAMES else (torch.randn(2, 3, 32, 32),)
    assert torch.equal(again(*inputs), network(*inputs))


@torch.no_grad()
def test_the_shared_expert_that_was_trained_alone_answers_alone(tmp_path):
    network = fine_tuned("moge_tiny")
    network.set_expert_mode("shared")
    publish(tmp_path / "folder", network)
    images, metadata = case_of("moge_tiny").inputs()
    again = load_trained(HUB)
    assert torch.equal(again(images, metadata), network(images))
    again.set_expert_mode("routed")
    assert not torch.equal(again(images, metadata), network(images))


@torch.no_grad()
def test_other_classes_change_the_classifier_alone_also_for_fine_tuning(tmp_path):
    network = fine_tuned()
    images = case_of("gmoe_tiny_patch16").images()
    publish(tmp_path / "folder", network)
    by_timm = timm.create_model(HUB, pretrained=True, num_classes=3).eval()
    ours = build_network(HUB, 3, pretrained=True).eval()
    same = build_network(HUB, len(CLASSES), pretrained=True).eval()
    for model in (by_timm, ours):
        assert torch.equal(model.forward_features(images), network.forward_features(images))
        assert model(images).shape == (3, 3)
    assert torch.equal(same(images), network(images))


def test_a_pinned_revision_stays_what_it_was(hub, tmp_path):
    first, second = fine_tuned(), fine_tuned("gmoe_tiny_patch16", depth=3)
    pinned = publish(tmp_path / "first", first).oid
    publish(tmp_path / "second", second)
    assert len(hub.commits(REPOSITORY)) == 2
    assert equal_weights(timm.create_model(f"hf-hub:{REPOSITORY}@{pinned}", pretrained=True), first)
    assert equal_weights(timm.create_model(HUB, pretrained=True), second)


def test_without_a_connection_the_cache_is_enough(hub, tmp_path, monkeypatch):
    network = fine_tuned("moge_tiny")
    publish(tmp_path / "folder", network)
    timm.create_model(HUB, pretrained=True)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert equal_weights(timm.create_model(HUB, pretrained=True), network)
    assert len(hub.requests) == asked
    shutil.rmtree(constants.HF_HUB_CACHE)
    with pytest.raises(CheckpointError, match=r"hf-hub:someone/network cannot be had .*check the connection"):
        build_network(HUB, 3, pretrained=True)


@pytest.fixture
def best(hub, tmp_path):
    """A saved network that is published as well."""
    saved_run(tmp_path, "gmoe_tiny_patch16", DIGITS)
    hub.repositories[REPOSITORY] = Repository(tmp_path / "best")
    return f"local-dir:{tmp_path / 'best'}"


def test_a_published_network_has_its_calibration(best, hub, tmp_path, capsys):
    words = ["--dataset", "rotated_digits", "--test-domains", "rot_75", "--calibrate", *QUICK]
    with pytest.raises(SystemExit, match="calibrate=True: stores a file with the model"):
        load_tool("evaluate").main(["--model", HUB, *words])
    load_tool("evaluate").main(["--model", best, *words])
    hub.repositories[REPOSITORY] = Repository(tmp_path / "best")
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    tables = []
    for model in (HUB, best):
        capsys.readouterr()
        load_tool("predict").main(["--model", model, str(tmp_path / "black.png"), "--coverage", "0.9", *QUICK])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert ",unlike," in tables[0]


def test_a_cache_that_timm_filled_lacks_a_calibration_and_says_so_until_the_hub_has_answered(best, monkeypatch, caplog):
    timm.create_model(HUB, pretrained=True)
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert load_calibration(HUB) is None
    assert f"model='{HUB}': calibration.safetensors is not in the Hub's cache" in caplog.text
    caplog.clear()
    for is_offline in (False, True):  # the Hub answers that there is none, and the cache remembers it
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        assert load_calibration(HUB) is None
    assert not caplog.text
