"""Kernels, mean and deviation of named bands: those of RGB images go to red, green and blue."""

import pytest
import timm
import torch

from timm_moe_dg.data.bands import Bands
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.networks.bands import bands_of, check_bands
from timm_moe_dg.networks.build import build_network, data_config, save_network

TEN = ["B02", "B03", "B04", "B05", "B06", "B07", "B08", "B8A", "B11", "B12"]
SENTINEL = [f"sentinel2:{name}" for name in TEN]
GMOE = {"patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3, "moe_layers": (1,)}


@pytest.fixture(scope="module", params=["gmoe_tiny_patch16", "resnet18"])
def rgb(request, tmp_path_factory):
    """A network of RGB images, its weights in a file, and the arguments that build it again."""
    is_vit = request.param != "resnet18"
    options = {"img_size": 32 if is_vit else None, "model_kwargs": GMOE if is_vit else {}}
    path = tmp_path_factory.mktemp("rgb") / "rgb.pth"
    network = build_network(request.param, 4, **options).eval()
    torch.save(network.state_dict(), path)
    return network, {"name": request.param, "num_classes": 4, "initial_checkpoint": path, **options}


@pytest.mark.parametrize("init", ["mean", "zero"])
def test_ten_bands_of_which_seven_are_zero_give_the_logits_of_rgb(rgb, init):
    network, options = rgb
    images = torch.randn(2, 3, 32, 32)
    bands = torch.zeros(2, 10, 32, 32)
    bands[:, [2, 1, 0]] = images  # red is B04
    ten = build_network(**options, bands=Bands.of(SENTINEL), band_init=init).eval()
    with torch.inference_mode():
        torch.testing.assert_close(ten(bands), network(images), rtol=0, atol=1e-5)
        bands[:, 5] = 1.0
        assert torch.allclose(ten(bands), network(images), atol=1e-5) == (init == "zero")


def test_blue_green_red_and_a_single_band_keep_their_kernels_mean_and_deviation(rgb):
    network, options = rgb
    stem = network.pretrained_cfg["first_conv"]
    weight = network.get_submodule(stem).weight
    config = data_config(network)
    for bands, order in ((["blue", "green", "red"], [2, 1, 0]), (["665nm"], [0])):
        other = build_network(**options, bands=Bands.of(bands))
        torch.testing.assert_close(other.get_submodule(stem).weight, weight[:, order], rtol=0, atol=0)
        assert list(data_config(other)["mean"]) == [config["mean"][color] for color in order]
        assert list(data_config(other)["std"]) == [config["std"][color] for color in order]


def test_a_saved_network_knows_its_bands_and_keeps_its_kernels(rgb, tmp_path):
    _, options = rgb
    network = build_network(**options, bands=Bands.of(SENTINEL[:3]))
    save_network(network, tmp_path / "saved", "abcd", data_config(network))
    for words in ({"name": f"local-dir:{tmp_path / 'saved'}", "pretrained": True}, None):
        # The file of weights alone, with config.json beside it, is not taken for RGB either
        words = words or {**options, "initial_checkpoint": tmp_path / "saved" / "model.safetensors"}
        again = build_network(**{"num_classes": 4, **words}, bands=Bands.of(SENTINEL[:3]))
        assert bands_of(again).names == tuple(SENTINEL[:3])
        assert all(torch.equal(value, network.state_dict()[key]) for key, value in again.state_dict().items())
        assert data_config(again)["mean"] == pytest.approx(data_config(network)["mean"])
    for bands, message in (
        (["red", "green", "blue"], "model has others; give --bands sentinel2:B02"),
        (3, "bands="),
    ):
        with pytest.raises(ArgumentError, match=message):
            build_network(f"local-dir:{tmp_path / 'saved'}", 4, pretrained=True, bands=Bands.of(bands))


def test_weights_of_as_many_bands_are_loaded_as_they_are(rgb, tmp_path, caplog):
    _, options = rgb
    network = build_network(**options, bands=Bands(5))
    assert "repeated over the bands by position; name the bands with --bands" in caplog.text
    torch.save(network.state_dict(), tmp_path / "five.pth")
    caplog.clear()
    again = build_network(**{**options, "initial_checkpoint": tmp_path / "five.pth"}, bands=Bands.of(SENTINEL[:5]))
    assert all(torch.equal(value, network.state_dict()[key]) for key, value in again.state_dict().items())
    assert "by position" not in caplog.text


def test_a_first_layer_without_a_kernel_for_each_band_is_refused(tmp_path):
    torch.save(timm.create_model("naflexvit_base_patch16_gap", depth=1).state_dict(), tmp_path / "a.pth")
    options = {"initial_checkpoint": tmp_path / "a.pth", "model_kwargs": {"depth": 1}}
    with pytest.raises(ArgumentError, match=r"bands=\['blue', 'nir'\]: the first layer of .* has no kernel"):
        build_network("naflexvit_base_patch16_gap", 4, bands=Bands.of(["blue", "nir"]), **options)


def test_images_of_other_bands_are_refused(rgb):
    network = build_network(**rgb[1], bands=Bands.of(SENTINEL[:4]))
    check_bands(network, Bands.of(SENTINEL[:4]))
    for bands in (4, ("red", "green", "blue", "nir"), 3, ("red", "nir")):
        with pytest.raises(ArgumentError, match=r"^(bands|in_chans)="):
            check_bands(network, Bands.of(bands))
