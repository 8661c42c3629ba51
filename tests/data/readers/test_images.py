"""Images in the modes that real folders have, read as torchvision reads them or not at all; and what is no image."""

import io
import itertools
import logging
import os
import struct

import numpy as np
import pytest
import torch
from PIL import Image, features
from sklearn.datasets import load_digits, load_sample_images
from torchvision.datasets.folder import default_loader

from timm_moe_dg.data import (
    EvaluationImages,
    StepSampler,
    TrainingDraws,
    drop_unreadable,
    evaluation_loader,
    evaluation_transform,
    read_folder,
    split_domain,
    split_domains,
    training_loader,
    training_transform,
)
from timm_moe_dg.data.bands import DECODERS
from timm_moe_dg.data.readers import images
from timm_moe_dg.data.readers.images import read_image
from timm_moe_dg.errors import DataError, ImageReadError

VIEW = {"size": (32, 32), "mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}
TURN = 0x0112  # EXIF's tag of the orientation; 6 is a quarter turn


def save_odd(photograph, folder, number):
    """One file of each kind."""
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[TURN] = 6
    transparent = photograph.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(photograph.size))
    palette = photograph.quantize(32)
    photograph.save(folder / f"{number}_plain.jpg")
    photograph.convert("L").save(folder / f"{number}_gray.jpg")
    photograph.convert("CMYK").save(folder / f"{number}_cmyk.jpg")
    photograph.save(folder / f"{number}_turned.jpg", exif=exif)
    transparent.save(folder / f"{number}_rgba.png")
    palette.save(folder / f"{number}_palette.png")
    palette.save(folder / f"{number}_transparent_palette.png", transparency=0)
    photograph.convert("LA").save(folder / f"{number}_la.png")
    photograph.convert("1").save(folder / f"{number}_bits.png")


@pytest.fixture
def root(tmp_path):
    """Two domains of photographs and digits; one photograph of the second is cut short."""
    photographs = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    digits = [Image.fromarray((pixels * 15).astype(np.uint8)) for pixels in load_digits().images[:8]]
    for domain, side in (("large", 60), ("small", 40)):
        for number, photograph in enumerate(photographs):
            save_odd(photograph.resize((side, side // 2)), tmp_path / domain / f"photo_{number}", number)
        (tmp_path / domain / "digit").mkdir()
        for number, digit in enumerate(digits):
            digit.save(tmp_path / domain / "digit" / f"{number}.png")
    return tmp_path


@pytest.fixture
def truncated(root):
    path = root / "small" / "photo_1" / "1_plain.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    return path


def test_every_mode_reads_as_torchvision_reads_it(root):
    seen = set()
    for domain in read_folder(root):
        for index, path in enumerate(domain.paths):
            image = domain.image(index)
            assert image.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(image), np.asarray(default_loader(path)))
            with Image.open(path) as stored:
                seen.add(stored.mode)
    assert seen == {"RGB", "L", "CMYK", "RGBA", "P", "LA", "1"}


def test_exif_rotation_is_ignored(root):
    large = read_folder(root)[0]
    names = [path.rsplit("_", 1)[1] for path in large.paths]
    turned, plain = (large.image(names.index(name)) for name in ("turned.jpg", "plain.jpg"))
    assert turned.size == plain.size == (60, 30)
    np.testing.assert_array_equal(np.asarray(turned), np.asarray(plain))


def test_sixteen_bits_become_the_upper_eight(tmp_path):
    (tmp_path / "a" / "x").mkdir(parents=True)
    levels = np.array([[0, 255, 256, 512], [32768, 40000, 65280, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "a" / "x" / "0.png")
    image = np.asarray(read_folder(tmp_path)[0].image(0))
    np.testing.assert_array_equal(image[..., 0], [[0, 0, 1, 2], [128, 156, 255, 255]])
    np.testing.assert_array_equal(image[..., 0], image[..., 2])


def test_levels_without_a_range_are_an_error(tmp_path):
    (tmp_path / "a" / "x").mkdir(parents=True)
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "a" / "x" / "0.tif")
    with pytest.raises(ImageReadError, match=r"0\.tif.*mode 'F' has no fixed range; save it with 8 or 16 bits"):
        read_folder(tmp_path)[0].image(0)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_whole_folder_trains_and_evaluates(root, workers):
    domains = read_folder(root)
    splits = split_domains(domains, training=[0], trial_seed=0)
    draws = TrainingDraws(domains, splits, training_transform("photograph", **VIEW), seed=0, class_balanced=True)
    steps = itertools.islice(training_loader(draws, StepSampler([0], 20), workers=workers), 3)
    targets = torch.cat([targets for ((images, targets),) in steps if images.isfinite().all()])
    assert set(targets.tolist()) == {0, 1, 2}
    images = EvaluationImages(domains, splits, evaluation_transform(**VIEW))
    assert sum(len(batch) for batch, *_ in evaluation_loader(images, batch_size=16, workers=workers)) == len(images)


def test_a_truncated_file_is_named(root, truncated):
    domains = read_folder(root)
    images = EvaluationImages(domains, split_domains(domains, [0], trial_seed=0), evaluation_transform(**VIEW))
    with pytest.raises(ImageReadError, match=r"1_plain\.jpg.*cannot be decoded"):
        list(evaluation_loader(images, batch_size=16, workers=0))


def test_a_truncated_file_is_left_out_and_counted(root, truncated, caplog):
    before = read_folder(root)
    with caplog.at_level(logging.INFO, "timm_moe_dg"):
        domains, complaints = drop_unreadable(before, workers=2)
    assert domains[0] is before[0]
    position = before[1].paths.index(str(truncated))
    pairs = list(zip(before[1].paths, before[1].targets, strict=True))
    assert list(zip(domains[1].paths, domains[1].targets, strict=True)) == pairs[:position] + pairs[position + 1 :]
    assert len(complaints) == 1
    assert str(truncated) in complaints[0]
    assert "1 unreadable images left out" in caplog.text
    assert str(truncated) in caplog.text
    splits = split_domains(domains, [0], trial_seed=0)
    np.testing.assert_array_equal(splits[1].inside, split_domain(len(before[1]) - 1, 1, trial_seed=0).inside)
    images = EvaluationImages(domains, splits, evaluation_transform(**VIEW))
    assert sum(len(batch) for batch, *_ in evaluation_loader(images, batch_size=16, workers=0)) == 2 * len(pairs) - 1


def test_a_domain_of_which_nothing_can_be_read(root):
    for path in (root / "small").rglob("*.*"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="domain='small': none of its 26 images can be read; image='"):
        drop_unreadable(read_folder(root))


def test_postscript_under_another_name_starts_no_program(tmp_path, monkeypatch):
    path = tmp_path / "photo.jpg"
    Image.new("RGB", (8, 8)).save(path, format="EPS")
    started = tmp_path / "started"
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {started}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looks for it anew
    with pytest.raises(ImageReadError, match=r"photo\.jpg.*cannot be decoded"):
        read_image(str(path))
    assert not started.exists()
    assert "EPS" not in DECODERS


@pytest.mark.filterwarnings("ignore")  # decoders say of broken files what they think
@pytest.mark.parametrize("format_", [*DECODERS, "BLP", "DDS"])
def test_flipped_bits_give_an_image_or_the_error_that_names_it(tmp_path, format_):
    if format_ == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    stored = io.BytesIO()
    (image.quantize(16) if format_ == "BLP" else image).save(stored, format=format_)
    whole = np.frombuffer(stored.getvalue(), dtype=np.uint8)
    for _ in range(150):
        flipped = whole.copy()
        flipped[random.integers(min(len(flipped), 200), size=3)] ^= 1 << random.integers(8, size=3).astype(np.uint8)
        try:
            assert read_image("photo", io.BytesIO(flipped.tobytes())).mode == "RGB"
        except ImageReadError as error:
            assert "image='photo': cannot be decoded" in str(error)  # noqa: PT017 (either outcome is right)


def test_any_error_of_a_decoder_names_the_image(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise KeyError("chunk")

    Image.new("RGB", (2, 2)).save(tmp_path / "0.png")
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(ImageReadError, match=r"0\.png': cannot be decoded \('chunk'\)"):
        read_image(str(tmp_path / "0.png"))


def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "0.png")
    with pytest.raises(ImageReadError, match=r"0\.png.*not a regular file"):
        read_image(str(tmp_path / "0.png"))


def test_a_file_of_four_bands_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warned_bands", set())
    for name in ("a.tif", "b.tif"):
        Image.new("RGBA", (4, 4)).save(tmp_path / name)
    Image.new("RGB", (4, 4)).save(tmp_path / "c.tif")
    with caplog.at_level(logging.WARNING):
        modes = [images.read_image(str(tmp_path / name)).mode for name in ("c.tif", "a.tif", "b.tif")]
    assert modes == ["RGB"] * 3
    (message,) = caplog.messages
    assert "a.tif': has 4 bands (R, G, B, A), read as three" in message


def five_bands(path, photometric):
    """Writes an uncompressed TIFF file of five bands, which Pillow cannot."""
    pixels, bits = bytes(range(80)), struct.pack("<5H", *[8] * 5)  # 4 x 4 pixels
    tags = {256: 4, 257: 4, 259: 1, 262: photometric, 277: 5, 278: 4, 279: len(pixels), 284: 1}
    start = 8 + 2 + 12 * (len(tags) + 3) + 4
    entries = {tag: struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()}
    entries[258] = struct.pack("<HHII", 258, 3, 5, start)
    entries[273] = struct.pack("<HHII", 273, 4, 1, start + len(bits))
    entries[338] = struct.pack("<HHIHH", 338, 3, 2, 0, 0)
    directory = struct.pack("<H", len(entries)) + b"".join(entries[tag] for tag in sorted(entries)) + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + directory + bits + pixels)


@pytest.mark.parametrize("photometric", [1, 2])  # as gray with four more, and as RGB with two more
def test_a_file_of_five_bands_is_refused_with_what_helps(tmp_path, photometric):
    five_bands(tmp_path / "a.tif", photometric)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*save three of them as RGB"):
        images.read_image(str(tmp_path / "a.tif"))
