"""Images in the modes that real folders have, read as torchvision reads them or not at all; and what is no image."""

import io
import logging
import os
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from PIL import Image, ImageOps
from sklearn.datasets import load_digits, load_sample_images
from torchvision.datasets.folder import default_loader

from timm_moe_dg.data import (
    EvaluationImages,
    evaluation_loader,
    evaluation_transform,
    read_folder,
    split_domains,
)
from timm_moe_dg.data.readers import images
from timm_moe_dg.data.readers.images import has_deep_values, image_extensions, is_eight_bit, read_pixels
from timm_moe_dg.errors import ImageReadError

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
            image = replace(domain, upright=False).image(index)
            assert image.mode == "RGB"
            np.testing.assert_array_equal(np.asarray(image), np.asarray(default_loader(path)))
            with Image.open(path) as stored:
                seen.add(stored.mode)
    assert seen == {"RGB", "L", "CMYK", "RGBA", "P", "LA", "1"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("name", "dtype"), [("a.jpg", "u1"), ("a.png", "u1"), ("a.png", "u2"), ("a.webp", "u1")])
def test_exif_orientations_are_applied_but_to_benchmarks(tmp_path, name, dtype, orientation):
    pixels = np.arange(24, dtype=dtype).reshape(4, 6) * 10
    exif = Image.Exif()
    exif[TURN] = orientation
    Image.fromarray(pixels).save(tmp_path / name, exif=exif, quality=100, lossless=True)
    turned = {1: pixels, 2: np.fliplr(pixels), 3: np.rot90(pixels, 2), 4: np.flipud(pixels), 5: pixels.T}
    turned |= {6: np.rot90(pixels, 3), 7: np.rot90(pixels, 2).T, 8: np.rot90(pixels)}
    for upright, expected in ((True, turned[orientation]), (False, pixels)):
        image = read_pixels(str(tmp_path / name), upright=upright)
        actual = image[0].numpy() * 65535 if dtype == "u2" else np.asarray(image)[..., 0]
        np.testing.assert_allclose(actual, expected, atol=2)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_orientations_of_tiff_files_are_applied_whatever_they_hold(tmp_path, dtype, bands, orientation):
    values = np.arange(24 * bands, dtype=dtype).reshape(4, 6, bands)
    photometric, tag = "rgb" if bands == 3 else "minisblack", [(TURN, 3, 1, orientation, True)]
    tifffile.imwrite(tmp_path / "a.tif", values.squeeze(), photometric=photometric, extratags=tag)
    picture = Image.fromarray(values[..., 0].astype(np.uint8))
    picture.getexif()[TURN] = orientation
    expected = np.asarray(ImageOps.exif_transpose(picture))
    image = read_pixels(str(tmp_path / "a.tif"))
    actual = np.asarray(image)[..., 0] if dtype == "u1" else image[0] * {"u2": 65535, "f4": 1}[dtype]
    np.testing.assert_allclose(actual, expected, atol=0.01)
    alone = read_pixels(str(tmp_path / "a.tif"), 1) if bands == 1 else None
    assert alone is None or alone.shape[1:] == expected.shape


def png_of_sixteen_bits(values, color_type):
    """Writes (height, width, bands), which Pillow cannot."""
    height, width = values.shape[:2]
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0),
        b"IDAT": zlib.compress(b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)),
        b"IEND": b"",
    }
    parts = (struct.pack(">I", len(data)) + name + data for name, data in chunks.items())
    sums = (struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(part + end for part, end in zip(parts, sums, strict=True))


@pytest.mark.parametrize(("color_type", "bands"), [(0, 1), (4, 2), (2, 3), (6, 4)])
def test_png_files_of_sixteen_bits_keep_all_of_them(tmp_path, color_type, bands):
    values = np.random.default_rng(0).integers(300, 500, (4, 6, bands), dtype=np.uint16)
    (tmp_path / "a.png").write_bytes(png_of_sixteen_bits(values, color_type))
    colors = np.broadcast_to(values[..., :1], (4, 6, 3)) if bands < 3 else values[..., :3]
    for file in (None, (tmp_path / "a.png").open("rb")):
        image = read_pixels(str(tmp_path / "a.png"), file=file)
        np.testing.assert_allclose(image.numpy(), colors.transpose(2, 0, 1) / 65535, rtol=1e-6)
    if bands != 3:
        whole = read_pixels(str(tmp_path / "a.png"), bands)
        np.testing.assert_allclose(whole.numpy(), values.transpose(2, 0, 1) / 65535, rtol=1e-6)
    assert has_deep_values(str(tmp_path / "a.png"))


@pytest.mark.parametrize("suffix", [".jp2", ".pgm", ".tif", ".png"])
def test_gray_files_of_sixteen_bits_keep_all_of_them(tmp_path, suffix):
    values = np.arange(300, 324, dtype=np.uint16).reshape(4, 6)
    Image.fromarray(values).save(tmp_path / f"a{suffix}")
    np.testing.assert_allclose(read_pixels(str(tmp_path / f"a{suffix}"))[2].numpy(), values / 65535, rtol=1e-6)


def test_sixteen_bits_that_pillow_would_halve_are_refused(tmp_path):
    for content in (b"P6 2 1 4095\n" + bytes(12), b"P3 1 1 1023\n300 400 500\n"):
        (tmp_path / "a.ppm").write_bytes(content)
        with pytest.raises(ImageReadError, match="PPM file of more than 8 bits per value; save it as PNG or TIFF"):
            read_pixels(str(tmp_path / "a.ppm"))
    for shape, colors in (((4, 6, 3), "cielab"), ((4, 6), "palette")):
        table = np.zeros((3, 1 << 16), np.uint16) if colors == "palette" else None
        tifffile.imwrite(tmp_path / "a.tif", np.zeros(shape, np.uint16), photometric=colors, colormap=table)
        with pytest.raises(ImageReadError, match="of more than 8 bits; save it as RGB"):
            read_pixels(str(tmp_path / "a.tif"))


@pytest.mark.parametrize(
    ("name", "head", "is_deep"),
    [
        ("AVIF", b"av1C\x81\x00\x0c", False),  # as written by libavif
        ("AVIF", b"av1C\x81\x20\x4c", True),
        ("JPEG2000", b"\xff\x4f\xff\x51" + bytes(38) + b"\x07", False),
        ("JPEG2000", b"\xff\x4f\xff\x51" + bytes(38) + b"\x0b", True),
        ("JPEG2000", b"", False),
    ],
)
def test_depths_behind_pillows_eight_bits(name, head, is_deep):
    image = Image.new("RGB", (1, 1))
    image.format = name
    assert is_eight_bit(image, io.BytesIO(bytes(99) + head + bytes(9))) is not is_deep


def test_photographs_of_eight_bits_are_no_deep_ones(tmp_path):
    for name, mode in (("a.jpg", "RGB"), ("b.png", "P"), ("c.png", "1"), ("d.tif", "CMYK"), ("e.bmp", "RGB")):
        Image.new(mode, (6, 4)).save(tmp_path / name)
        assert not has_deep_values(str(tmp_path / name))
        assert isinstance(read_pixels(str(tmp_path / name)), Image.Image)
    bands = np.zeros((4, 6, 3), np.uint8)  # which Pillow cannot read
    tifffile.imwrite(tmp_path / "f.tif", bands, photometric="minisblack", planarconfig="contig")
    assert not has_deep_values(str(tmp_path / "f.tif"))


def test_too_large_an_image_is_to_be_tiled(tmp_path, monkeypatch):
    Image.new("1", (64, 64)).save(tmp_path / "a.png")
    tifffile.imwrite(tmp_path / "b.tif", np.zeros((64, 64, 3), np.float32), photometric="rgb")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for name in ("a.png", "b.tif"):
        with pytest.raises(ImageReadError, match=rf"{name}': is larger than 2,000 pixels; cut it into tiles"):
            read_pixels(str(tmp_path / name))


def test_the_first_of_several_images_is_read_and_that_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warned", set())
    frames = [Image.new("RGB", (6, 4), (80 * number, 0, 0)) for number in range(3)]
    for suffix in (".gif", ".png", ".webp", ".tif"):
        frames[1].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames)
        assert abs(read_pixels(str(tmp_path / f"a{suffix}")).getpixel((0, 0))[0] - 80) < 3
    assert caplog.text.count("holds several images, of which the first is read") == 4


def test_what_pillow_decodes_is_an_image_in_every_listing():
    assert {".jfif", ".jpe", ".gif", ".avif", ".jp2", ".webp", ".tif", ".mpo", ".bmp"} <= set(image_extensions())
    assert {".eps", ".ps", ".pdf", ".h5", ".txt", ".heic"}.isdisjoint(image_extensions())


def test_a_truncated_file_is_named(root, truncated):
    domains = read_folder(root)
    images = EvaluationImages(domains, split_domains(domains, [0], trial_seed=0), evaluation_transform(**VIEW))
    with pytest.raises(ImageReadError, match=r"1_plain\.jpg.*cannot be decoded"):
        list(evaluation_loader(images, batch_size=16, workers=0))


def test_any_error_of_a_decoder_names_the_image(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise KeyError("chunk")

    Image.new("RGB", (2, 2)).save(tmp_path / "0.png")
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(ImageReadError, match=r"0\.png': cannot be decoded \('chunk'\)"):
        read_pixels(str(tmp_path / "0.png"))


def test_a_named_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "0.png")
    with pytest.raises(ImageReadError, match=r"0\.png.*not a regular file"):
        read_pixels(str(tmp_path / "0.png"))


def test_a_file_of_four_bands_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warned", set())
    for name in ("a.tif", "b.tif"):
        Image.new("RGBA", (4, 4)).save(tmp_path / name)
    Image.new("RGB", (4, 4)).save(tmp_path / "c.tif")
    with caplog.at_level(logging.WARNING):
        modes = [images.read_pixels(str(tmp_path / name)).mode for name in ("c.tif", "a.tif", "b.tif")]
    assert modes == ["RGB"] * 3
    (message,) = caplog.messages
    assert "a.tif': has 4 bands (R, G, B, A), read as three" in message
    near_infrared = np.zeros((4, 6, 4), np.uint8)
    tifffile.imwrite(tmp_path / "d.tif", near_infrared, photometric="rgb", extrasamples=["unspecified"])
    images.read_pixels(str(tmp_path / "d.tif"))
    assert "d.tif': has 4 bands" in caplog.messages[1]
