"""Saving a mixture model and loading it again: timm's folders, files and state dicts."""

import json
import logging

import pytest
import safetensors.torch
import timm
import torch
from timm.models import save_for_hf

from tests.models.cases import BY_NAME, overlay, randomize

OPTIONS = {"moe_layers": [1, 3], "num_experts": 4, "top_k": 3}


@pytest.fixture
def saved(case, tmp_path):
    """A trained-like model that differs from its name's defaults, and the folder it was saved to."""
    model = randomize(case.small(**OPTIONS)).eval()
    folder = tmp_path / "best"
    save_for_hf(model, folder, safe_serialization=True)
    return model, folder


@torch.no_grad()
def test_a_saved_folder_gives_the_same_weights_and_logits_bit_by_bit(case, saved):
    model, folder = saved
    again = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())
    assert torch.equal(again(*case.inputs()), model(*case.inputs()))


def test_a_saved_configuration_holds_the_options_of_the_caller_and_no_dense_source(case, saved):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == case.name
    assert OPTIONS.items() <= config["model_args"].items()
    assert "hf_hub_id" not in config["pretrained_cfg"]


@torch.no_grad()
def test_saving_a_loaded_model_again_changes_nothing(case, saved, tmp_path):
    _, folder = saved
    again = timm.create_model(f"local-dir:{folder}", pretrained=True)
    save_for_hf(again, tmp_path / "second", safe_serialization=True)
    first, second = (safetensors.torch.load_file(one / "model.safetensors") for one in (folder, tmp_path / "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_a_saved_folder_can_be_fine_tuned_for_other_classes_and_sizes(name, tmp_path):
    case = BY_NAME[name]
    model = randomize(case.small(**OPTIONS)).eval()
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=3).eval()
    tokens = again.forward_features(case.images())
    assert torch.equal(tokens, model.forward_features(case.images()))
    larger = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, img_size=64).eval()
    assert torch.equal(larger.blocks[1].mlp.experts.fc1.weight, model.blocks[1].mlp.experts.fc1.weight)
    assert larger(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_a_model_upcycled_from_a_state_dict_can_be_saved(family, tmp_path):
    model = family.small(**overlay(family.small_dense().state_dict()))
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_file_named_in_the_configuration_is_upcycled_and_logged(tmp_path, suffix, caplog):
    case = BY_NAME["sfmoe_small"]
    dense = randomize(case.small_dense()).eval()
    file = tmp_path / f"dense.{suffix}"
    save = safetensors.torch.save_file if suffix == "safetensors" else torch.save
    save(dense.state_dict(), file)
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        cfg = {"file": str(file), "num_classes": 10}
        model = case.small(pretrained=True, pretrained_cfg_overlay=cfg, num_experts=3).eval()
    torch.testing.assert_close(model(case.images()), dense(case.images()), rtol=0, atol=1e-5)
    assert f"Upcycled from {file}: 6 experts filled in 2 mixture layers." in caplog.messages


def test_a_state_dict_in_the_configuration_is_named_as_such_and_left_as_it_was(caplog):
    case = BY_NAME["gmoe_tiny_patch16"]
    weights = case.small_dense().state_dict()
    before = {key: value.clone() for key, value in weights.items()}
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        case.small(**overlay(weights))
    assert caplog.messages[-1] == "Upcycled from the given state dict: 12 experts filled in 2 mixture layers."
    assert weights.keys() == before.keys()
    assert all(torch.equal(weights[key], before[key]) for key in before)


def test_loading_a_mixture_says_that_nothing_was_upcycled(caplog, tmp_path):
    model = BY_NAME["gmoe_tiny_patch16"].small()
    save_for_hf(model, tmp_path, safe_serialization=True)
    with caplog.at_level(logging.INFO, logger="timm_moe_dg"):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert caplog.messages[-1] == f"Loaded a mixture-of-experts checkpoint from {tmp_path}: no expert upcycled."
