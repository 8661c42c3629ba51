"""CUB-DG from a miniature of CUB-200-2011, and its style-transfer network against a plain reference."""

import multiprocessing
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.load_tool import load_example
from tests.references.style_transfer import restyled
from timm_moe_dg.data import read_folder

STYLES = ("Candy", "Mosaic", "Natural", "Udnie")
make_cub_dg, style_transfer = map(load_example, ("cub_dg/make_cub_dg", "cub_dg/style_transfer"))
StyleTransferNetwork = style_transfer.StyleTransferNetwork


@pytest.fixture
def network():
    """All parameters random, those of the normalizations too, so that none can be forgotten."""
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
        actual, expected = network(x), restyled(x.double(), weights)
    assert actual.shape == x.shape
    assert expected.std() > 0.01
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_image_of_any_size_keeps_it_and_is_extended_by_reflection_below_and_to_the_right(network):
    image = (255 * torch.rand(3, 18, 21)).to(torch.uint8)
    rows = [*range(18), 16, 15]
    columns = [*range(21), 19, 18, 17]
    extended = image[:, rows][:, :, columns].float()
    with torch.no_grad():
        expected = (network(extended[None])[0, :, :18, :21]).clamp(0, 255).round().to(torch.uint8)
    assert torch.equal(network.restyle(image), expected)


class Runs:
    """Pickles to a call of a function, as malicious weights would."""

    def __reduce__(self):
        return Path.touch, (Path("was_run"),)


@pytest.mark.parametrize(
    ("content", "error"),
    [({**StyleTransferNetwork().state_dict(), "in1.weight": torch.ones(31)}, RuntimeError),
     (Runs(), pickle.UnpicklingError)],
)  # fmt: skip
def test_other_weights_are_refused(tmp_path, monkeypatch, content, error):
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / "candy.pth")
    with pytest.raises(error):
        style_transfer.load_style(tmp_path / "candy.pth")
    assert not Path("was_run").exists()


@pytest.fixture
def weights(tmp_path) -> Path:
    (tmp_path / "styles").mkdir()
    for seed, style in enumerate(("candy", "mosaic", "udnie")):
        torch.manual_seed(seed)
        network = StyleTransferNetwork()
        nn.init.constant_(network.deconv3.conv2d.bias, 128.0)
        torch.save(network.state_dict(), tmp_path / "styles" / f"{style}.pth")
    return tmp_path / "styles"


@pytest.fixture
def cub(tmp_path) -> tuple[Path, list[str]]:
    """A folder in CUB's layout with six tiny photographs, of which the first is gray, as some of CUB's are."""
    names = [f"{label:03d}.Bird/Bird_{label}_{number}.jpg" for label in (1, 2, 3) for number in (1, 2)]
    for number, name in enumerate(names):
        path = tmp_path / "cub" / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = Image.effect_noise((17 + 3 * number, 29 - 2 * number), 80)  # rarely multiples of 4
        (image.convert("RGB") if number else image).save(path)
    lines = [f"{number} {name}\n" for number, name in enumerate(names, 1)]
    (tmp_path / "cub" / "images.txt").write_text("".join(lines))
    return tmp_path / "cub", names


def make(cub, output, weights, *options):
    make_cub_dg.main([str(cub), str(output), "--weights-dir", str(weights), *options])
    return output / "CUB_DG"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def times(folder):
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*.jpg")}


def test_every_photograph_is_in_four_domains_under_its_name_and_size(cub, weights, tmp_path):
    source, names = cub
    folder = make(source, tmp_path, weights)
    domains = read_folder(folder)
    assert tuple(domain.name for domain in domains) == STYLES
    for domain in domains:
        assert sorted(os.path.relpath(path, folder / domain.name) for path in domain.paths) == sorted(names)
    for name in names:
        size = Image.open(source / "images" / name).size
        assert {Image.open(folder / style / name).size for style in STYLES} == {size}
        assert len({(folder / style / name).read_bytes() for style in STYLES}) == 4
        assert (folder / "Natural" / name).is_symlink()
        assert (folder / "Natural" / name).read_bytes() == (source / "images" / name).read_bytes()
    mosaic = style_transfer.load_style(weights / "mosaic.pth")
    pixels = np.asarray(Image.open(source / "images" / names[1]).convert("RGB"))
    expected = mosaic.restyle(torch.tensor(pixels).permute(2, 0, 1)).permute(1, 2, 0).numpy()
    Image.fromarray(expected).save(tmp_path / "expected.jpg", quality=95)
    made, same = Image.open(folder / "Mosaic" / names[1]), Image.open(tmp_path / "expected.jpg")
    assert made.tobytes() == same.tobytes()


@pytest.mark.slow
def test_killed_at_any_moment_and_started_again_gives_the_same_files(cub, weights, tmp_path):
    source, names = cub
    complete = contents(make(source, tmp_path / "whole", weights))
    process = multiprocessing.get_context("spawn").Process(target=make, args=(source, tmp_path / "cut", weights))
    process.start()
    while len(list((tmp_path / "cut").rglob("*.jpg"))) < 5 and process.is_alive():
        time.sleep(0.005)
    process.kill()
    process.join()
    before = times(tmp_path / "cut")
    assert len(before) < 4 * len(names)
    folder = make(source, tmp_path / "cut", weights)
    assert {path: times(folder)[path] for path in before} == before
    assert {name: content for name, content in contents(folder).items() if name.suffix == ".jpg"} == complete


def test_folders_and_weights_that_cannot_be_used_are_refused(cub, weights, tmp_path):
    source, names = cub
    with pytest.raises(SystemExit, match=r"weights_dir=.*holds no candy\.pth"):
        make(source, tmp_path / "out", tmp_path)
    (source / "images" / names[4]).unlink()
    with pytest.raises(SystemExit, match=r"1 of 6 photographs are missing"):
        make(source, tmp_path / "out", weights)


def test_only_what_is_missing_or_was_made_from_something_else_is_made_again(cub, weights, tmp_path):
    source, names = cub
    folder = make(source, tmp_path, weights, "--natural", "copy")
    before = times(folder)
    (folder / "Mosaic" / names[4]).unlink()
    (source / "images" / names[2]).write_bytes((source / "images" / names[3]).read_bytes())
    make(source, tmp_path, weights, "--natural", "copy")
    changed = {path.relative_to(folder) for path, written in times(folder).items() if before[path] != written}
    assert changed == {Path("Mosaic", names[4]), *(Path(style, names[2]) for style in STYLES)}
    torch.save(StyleTransferNetwork().state_dict(), weights / "candy.pth")
    before = times(folder)
    make(source, tmp_path, weights)  # with links in place of copies
    changed = {path.relative_to(folder).parts[0] for path, written in times(folder).items() if before[path] != written}
    assert changed == {"Candy", "Natural"}
