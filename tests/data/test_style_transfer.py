"""The style-transfer network against a plain reference, and what it makes of weights that are not its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.references.style_transfer import restyled
from timm_moe_dg.data.style_transfer import StyleTransferNetwork, find_weights, load_style
from timm_moe_dg.errors import CheckpointError


@pytest.fixture
def network() -> StyleTransferNetwork:
    """Every parameter drawn, scales and shifts of the normalizations too, so that none can be forgotten."""
    torch.manual_seed(0)
    network = StyleTransferNetwork().eval()
    for name, parameter in network.named_parameters():
        if ".conv2d." not in name:
            nn.init.normal_(parameter, 1.0, 0.3)
    return network


@pytest.mark.parametrize("size", [(24, 36), (16, 16)])
def test_forward_equals_the_plain_reference(network, size):
    x = 255 * torch.rand(2, 3, *size)
    weights = {name: parameter.double() for name, parameter in network.state_dict().items()}
    with torch.no_grad():
        found, expected = network(x), restyled(x.double(), weights)
    assert found.shape == x.shape
    assert expected.std() > 0.01
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_image_of_any_size_keeps_it_and_is_extended_by_reflection_below_and_to_the_right(network):
    image = (255 * torch.rand(3, 18, 21)).to(torch.uint8)
    rows = [*range(18), 16, 15]
    columns = [*range(21), 19, 18, 17]
    extended = image[:, rows][:, :, columns].float()
    with torch.no_grad():
        expected = (network(extended[None])[0, :, :18, :21]).clamp(0, 255).round().to(torch.uint8)
    assert torch.equal(network.restyle(image), expected)


def test_values_outside_the_range_are_limited(network):
    nn.init.constant_(network.deconv3.conv2d.bias, 1e4)
    assert network.restyle(torch.zeros(3, 16, 16, dtype=torch.uint8)).eq(255).all()
    nn.init.constant_(network.deconv3.conv2d.bias, -1e4)
    assert network.restyle(torch.zeros(3, 16, 16, dtype=torch.uint8)).eq(0).all()


@pytest.mark.parametrize("extension", [".pth", ".safetensors"])
def test_weights_load_without_the_running_statistics_of_old_files(network, tmp_path, extension):
    state = dict(network.state_dict())
    state["in1.running_mean"] = torch.zeros(32)
    state["res1.in2.running_var"] = torch.ones(128)
    (save_file if extension == ".safetensors" else torch.save)(state, tmp_path / f"candy{extension}")
    loaded = load_style(find_weights(tmp_path, "candy"))
    assert not loaded.training
    for name, parameter in loaded.state_dict().items():
        assert torch.equal(parameter, network.state_dict()[name])


class Runs:
    """Pickles to a call of a function, as weights that do harm would."""

    def __reduce__(self):
        return Path.touch, (Path("was_run"),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (nn.Linear(2, 2).state_dict(), "another network"),
        ([1, 2], "another network"),
        ({**StyleTransferNetwork().state_dict(), "in1.weight": torch.ones(31)}, r"in1\.weight"),
        (Runs(), "cannot be read"),
        (b"nothing", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_other_weights_are_refused_in_one_line(tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "candy.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_style(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("was_run").exists()


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"mosaic\.pth or mosaic\.safetensors"):
        find_weights(tmp_path, "mosaic")
