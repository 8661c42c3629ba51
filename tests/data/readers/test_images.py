"""Image files as they were written, or as torchvision reads them, or not at all."""

import io
import os
import resource
import sys
from dataclasses import replace

import numpy as np
import pytest
import rasterio
import tifffile
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.datasets.folder import default_loader

from tests.band_files import band_folder, write_tiff
from timm_moe_dg.data import EvaluationImages, Split, evaluation_transform, get_benchmark, read_folder
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.data.readers import rasters
from timm_moe_dg.data.readers.images import as_picture, file_facts, image_extensions, is_eight_bit, read_pixels
from timm_moe_dg.errors import ImageReadError, MissingDependencyError

RANDOM = np.random.default_rng(0)
TURN = 0x0112  # EXIF's tag of the orientation; 6 is a quarter turn


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(rasters, "_warned", set())


def read(folder, name="a.tif", *args, **options):
    return read_pixels(str(folder / name), *args, **options)


def write(folder, values, **layout):
    tifffile.imwrite(folder / "a.tif", values, **layout)


def save_odd(photograph, folder):
    """One file of each kind."""
    folder.mkdir(parents=True)
    exif = Image.Exif()
    exif[TURN] = 6
    transparent = photograph.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(photograph.size))
    palette = photograph.quantize(32)
    photograph.save(folder / "plain.jpg")
    photograph.convert("L").save(folder / "gray.jpg")
    photograph.convert("CMYK").save(folder / "cmyk.jpg")
    photograph.save(folder / "turned.jpg", exif=exif)
    transparent.save(folder / "rgba.png")
    palette.save(folder / "palette.png")
    palette.save(folder / "transparent_palette.png", transparency=0)
    photograph.convert("LA").save(folder / "la.png")
    photograph.convert("1").save(folder / "bits.png")


@pytest.fixture
def root(tmp_path):
    """A domain of two photographs in all kinds of files."""
    for number, pixels in enumerate(load_sample_images().images):
        save_odd(Image.fromarray(pixels).resize((60, 30)), tmp_path / "domain" / f"photo_{number}")
    return tmp_path


def test_every_mode_reads_as_torchvision_reads_it(root):
    (domain,) = read_folder(root)
    seen = set()
    for index, path in enumerate(domain.paths):
        image = replace(domain, upright=False).image(index)
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), np.asarray(default_loader(path)))
        with Image.open(path) as stored:
            seen.add(stored.mode)
    assert seen == {"RGB", "L", "CMYK", "RGBA", "P", "LA", "1"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    ("name", "dtype", "bands"),
    [
        *(("a.jpg", "u1", 1), ("a.png", "u1", 1), ("a.png", "u2", 1), ("a.webp", "u1", 1)),
        *(("a.tif", dtype, bands) for dtype in ("u1", "u2", "f4") for bands in (1, 3)),
    ],
)
def test_orientations_are_applied_but_to_benchmarks(tmp_path, name, dtype, bands, orientation):
    values = np.broadcast_to(np.arange(24, dtype=dtype).reshape(4, 6, 1) * 10, (4, 6, bands)).squeeze()
    if name.endswith("tif"):
        photometric = "rgb" if bands == 3 else "minisblack"
        write(tmp_path, values, photometric=photometric, extratags=[(TURN, 3, 1, orientation, True)])
    else:
        exif = Image.Exif()
        exif[TURN] = orientation
        Image.fromarray(values).save(tmp_path / name, exif=exif, quality=100, lossless=True)
    pixels = values.reshape(4, 6, bands)[..., 0].astype(float)
    turned = {1: pixels, 2: np.fliplr(pixels), 3: np.rot90(pixels, 2), 4: np.flipud(pixels), 5: pixels.T}
    turned |= {6: np.rot90(pixels, 3), 7: np.rot90(pixels, 2).T, 8: np.rot90(pixels)}
    image = read(tmp_path, name)
    actual = np.asarray(image)[..., 0] if dtype == "u1" else image[0].numpy() * {"u2": 65535, "f4": 1}[dtype]
    np.testing.assert_allclose(actual, turned[orientation], atol=2)
    if name.endswith("tif"):
        assert bands == 3 or read(tmp_path, name, 1).shape[1:] == actual.shape
    else:
        stored = read(tmp_path, name, upright=False)
        actual = stored[0].numpy() * 65535 if dtype == "u2" else np.asarray(stored)[..., 0]
        np.testing.assert_allclose(actual, pixels, atol=2)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"])
def test_every_type_is_read_in_full_depth_without_in_chans(tmp_path, dtype, bands, order):
    values = RANDOM.integers(1, 100, (6, 5, bands)).astype(dtype)
    photometric = "rgb" if bands == 3 else "minisblack"
    write(tmp_path, values.squeeze(), photometric=photometric, compression="zlib", byteorder=order)
    largest = np.iinfo(dtype).max if dtype[0] in "ui" else 1
    expected = np.broadcast_to(values, (6, 5, 3)).transpose(2, 0, 1) / largest
    np.testing.assert_allclose(read(tmp_path), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("bands", [1, 2, 3, 4])
def test_png_files_keep_all_bands_and_bits(tmp_path, bands, dtype):
    largest = np.iinfo(dtype).max
    values = RANDOM.integers(1, largest, (4, 6, bands), dtype=dtype)
    layout = {"count": bands, "height": 4, "width": 6, "dtype": dtype}
    with rasterio.open(tmp_path / "a.png", "w", driver="PNG", **layout) as file:  # Pillow cannot
        file.write(values.transpose(2, 0, 1))
    colors = np.broadcast_to(values[..., :1], (4, 6, 3)) if bands < 3 else values[..., :3]
    for file in (None, (tmp_path / "a.png").open("rb")) if dtype == np.uint16 else ():
        np.testing.assert_allclose(read(tmp_path, "a.png", file=file), colors.transpose(2, 0, 1) / 65535, rtol=1e-6)
    if bands != 3:
        np.testing.assert_allclose(read(tmp_path, "a.png", bands), values.transpose(2, 0, 1) / largest, rtol=1e-6)
    assert file_facts(str(tmp_path / "a.png")).values == ("8 bits" if dtype == np.uint8 else "whole")


def test_depths_behind_pillows_eight_bits():
    image = Image.new("RGB", (1, 1))
    image.format = "AVIF"
    for flags, is_deep in ((b"\x81\x00\x0c", False), (b"\x81\x20\x4c", True)):  # as written by libavif
        assert is_eight_bit(image, io.BytesIO(bytes(99) + b"av1C" + flags + bytes(9))) is not is_deep


def test_photographs_of_eight_bits_are_no_deep_ones(tmp_path):
    for name, mode in (("a.jpg", "RGB"), ("b.png", "P"), ("c.png", "1"), ("d.tif", "CMYK"), ("e.bmp", "RGB")):
        Image.new(mode, (6, 4)).save(tmp_path / name)
        assert file_facts(str(tmp_path / name)).values == "8 bits"
        assert isinstance(read(tmp_path, name), Image.Image)
    write(tmp_path, np.zeros((4, 6, 3), np.uint8), photometric="minisblack", planarconfig="contig")
    assert file_facts(str(tmp_path / "a.tif")).values == "8 bits"


@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "nodata"), [("u1", "0"), ("i2", "-9999"), ("f4", "-3.4028234663852886e+38"), ("f4", "")]
)
def test_missing_data_are_marked(tmp_path, dtype, nodata, bands):
    """As GDAL marks them; the last has the value without the tag."""
    values = np.full((bands, 6, 5), 7, dtype)
    values[-1, 2, 3] = float(nodata or -3.4e38)
    tag = [(42113, 2, 0, nodata, True)] if nodata else []
    photometric = "rgb" if bands == 3 else "minisblack"
    write(tmp_path, values.transpose(1, 2, 0).squeeze(), photometric=photometric, extratags=tag)
    for count in (1, 3) if bands == 1 else (3,):
        pixels = read(tmp_path, "a.tif", count)
        expected = np.zeros((count, 6, 5), bool)
        expected[slice(None) if bands == 1 else -1, 2, 3] = True
        np.testing.assert_array_equal(pixels.isnan(), expected)
        largest = np.iinfo(dtype).max if dtype[0] in "ui" else 1
        np.testing.assert_allclose(pixels.numpy()[~expected], 7 / largest, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize("bands", [1, 3])
def test_missing_data_are_marked_where_zero_is_white(tmp_path, dtype, bands):
    values = RANDOM.integers(0, 9, (7, 6)).astype(dtype)
    write(tmp_path, values, photometric="miniswhite", extratags=[(42113, "s", 0, "4", True)])
    pixels, largest = read(tmp_path, "a.tif", bands), np.iinfo(dtype).max
    expected = np.where(values == 4, np.nan, (largest - values.astype(float)) / largest)
    np.testing.assert_allclose(pixels, np.broadcast_to(expected, pixels.shape), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("missing", "refused"), [(8, False), (9, True)])
def test_numbers_that_are_not_finite_are_missing_up_to_half_of_a_band(tmp_path, value, missing, refused):
    values = np.ones((5, 4, 4), np.float32)
    values[3].ravel()[:missing] = value
    write_tiff(tmp_path / "a.tif", values)
    if refused:
        with pytest.raises(ImageReadError, match=r"a.tif': 56% of band 4"):
            read(tmp_path, "a.tif", 5)
        return
    pixels = read(tmp_path, "a.tif", 5)
    np.testing.assert_array_equal(pixels.isnan(), ~np.isfinite(values))
    view = evaluation_transform((4, 4), [0.25] * 5, [0.5] * 5)(pixels)
    torch.testing.assert_close(view, torch.where(pixels.isnan(), 0.0, 1.5))


@pytest.mark.parametrize("bands", [3, ("red", "green", "blue")])
@pytest.mark.parametrize(
    ("name", "dtype"), [("a.tif", "u1"), ("a.tif", "u2"), ("a.png", "u1"), ("a.gif", "u1"), ("a.webp", "u1")]
)
def test_the_first_of_several_images_is_read_and_that_is_said(tmp_path, caplog, name, dtype, bands):
    values = np.broadcast_to(np.arange(2, 0, -1)[:, None, None, None] * 40, (2, 5, 4, 3)).astype(dtype)
    if name.endswith("tif"):
        write(tmp_path, values, photometric="rgb")
    else:
        first, second = map(Image.fromarray, values)
        first.save(tmp_path / name, save_all=True, append_images=[second], lossless=True)
    if not (name == "a.gif" and bands != 3):  # a palette is no bands
        pixels = read(tmp_path, name, bands)
        level = pixels.getpixel((0, 0))[0] if isinstance(pixels, Image.Image) else pixels[0, 0, 0] * np.iinfo(dtype).max
        assert level == pytest.approx(80, abs=3)
        assert f"{name}': holds several images, of which the first is read" in caplog.text


def test_a_file_of_four_bands_says_so_once(tmp_path, caplog):
    for name in ("a.tif", "b.tif"):
        Image.new("RGBA", (4, 4), (0, 0, 0, 255)).save(tmp_path / name)
    Image.new("RGB", (4, 4)).save(tmp_path / "c.tif")
    assert [read(tmp_path, name).mode for name in ("c.tif", "a.tif", "b.tif")] == ["RGB"] * 3
    (message,) = caplog.messages
    assert "a.tif': has 4 bands, read as three" in message
    write(tmp_path, np.zeros((4, 6, 4), np.uint8), photometric="rgb", extrasamples=["unspecified"])
    assert read(tmp_path).mode == "RGB"
    write(tmp_path, np.zeros((4, 4, 6), np.uint8), photometric="minisblack", planarconfig="separate")
    with pytest.raises(ImageReadError, match="--in-chans 4"):
        read(tmp_path)


def test_images_many_times_the_input_are_warned_of_once(tmp_path, caplog):
    sizes = {"a.png": (403, 302), "b.png": (1000, 100), "c.png": (500, 600), "d.png": (600, 600)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / name)
    view = evaluation_transform((22, 22), [0.5] * 3, [0.5] * 3)  # as 224 for a photograph of 4032 x 3024 pixels
    scenes = FileDomain("a", ("x",), [0] * 4, [str(tmp_path / name) for name in sizes])
    list(EvaluationImages([scenes], [Split(np.arange(4), np.arange(0))], view))
    (message,) = caplog.messages
    assert "c.png': has 500 x 600 pixels, 23 times the input of 22 x 22" in message


@pytest.mark.parametrize("bands", [1, 2, 4, 7])
def test_a_picture_shows_the_first_three_bands_from_dark_to_bright(bands):
    ramp = torch.linspace(-3, 9, 100).view(1, 10, 10).repeat(bands, 1, 1)
    picture = np.asarray(as_picture(ramp))
    assert picture.shape == (10, 10, 3)
    assert (picture.min(), picture.max()) == (0, 255)
    assert (np.diff(picture.reshape(-1, 3)[:, 0].astype(int)) >= 0).all()
    assert np.asarray(as_picture(torch.zeros(bands, 4, 4))).max() == 0  # nothing to stretch


def test_pixels_of_a_domain_have_all_bands_and_pictures_are_rgb(tmp_path):
    domains = get_benchmark("place_folder").read(band_folder(tmp_path / "data", bands=5), bands=5)
    assert {domain.pixels(0).shape for domain in domains} == {(5, 16, 16)}
    assert domains[0].image(0).mode == "RGB"
    assert domains[0].without([0]).pixels(0).shape == (5, 16, 16)


def test_what_pillow_decodes_is_an_image_in_every_listing():
    assert {".jfif", ".jpe", ".gif", ".avif", ".jp2", ".webp", ".tif", ".mpo", ".bmp"} <= set(image_extensions())
    assert {".eps", ".ps", ".pdf", ".h5", ".txt", ".heic"}.isdisjoint(image_extensions())


def of_bands(count):
    return lambda path: write_tiff(path, np.zeros((count, 4, 4), np.uint8))


def of_values(shape, **layout):
    return lambda path: tifffile.imwrite(path, np.zeros(shape, np.uint16), **layout)


PALETTE = {"photometric": "palette", "colormap": np.zeros((3, 1 << 16), np.uint16)}


@pytest.mark.parametrize(
    ("write_file", "bands", "message"),
    [
        (of_bands(3), 5, "has 3 bands, expected 5; .*--in-chans 3"),
        (of_bands(5), 4, "has 5 bands, expected 4; .*--in-chans 5"),
        (lambda path: path.write_bytes(b""), 5, "cannot be decoded"),
        (lambda path: path.write_bytes(b"no image"), 5, "cannot be decoded"),
        (lambda path: path.write_bytes(b"II*\0\x08\0\0\0"), 5, "cannot be decoded"),
        (lambda path: Image.new("LAB", (4, 4)).save(path), 3, r"L\*a\*b\*"),
        (lambda path: Image.new("CMYK", (4, 4)).save(path), ("red", "green", "blue", "nir"), "CMYK"),
        (of_values((4, 6, 3), photometric="cielab"), ("red", "green", "blue"), r"L\*a\*b\*"),
        (of_values((3, 4, 6), photometric="cielab", planarconfig="separate"), 3, r"L\*a\*b\*"),
        (of_values((4, 6), **PALETTE), 3, "of more than 8 bits"),
        (of_values((4, 6, 3), photometric="rgb", subfiletype=1), 3, "reduced ones"),
        # Which Pillow would halve
        (lambda path: path.write_bytes(b"P6 2 1 4095\n" + bytes(12)), 3, "of more than 8 bits"),
        (lambda path: path.write_bytes(b"P3 1 1 1023\n300 400 500\n"), 3, "of more than 8 bits"),
        (os.mkfifo, 3, "not a regular file"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, write_file, bands, message):
    write_file(tmp_path / "a.tif")
    with pytest.raises(ImageReadError, match=rf"a.tif'.*{message}"):
        read(tmp_path, "a.tif", bands)


def test_too_large_an_image_is_to_be_tiled(tmp_path, monkeypatch):
    Image.new("1", (64, 64)).save(tmp_path / "a.png")
    write(tmp_path, np.zeros((64, 64, 3), np.float32), photometric="rgb")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for name in ("a.png", "a.tif"):
        with pytest.raises(ImageReadError, match=rf"{name}': .*2,000 pixels.*tiles"):
            read(tmp_path, name)


def test_any_error_of_a_decoder_names_the_image(root, tmp_path, monkeypatch):
    path = root / "domain" / "photo_1" / "plain.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ImageReadError, match=r"plain\.jpg.*cannot be decoded"):
        read_pixels(str(path))

    def fail(*args, **options):
        raise KeyError("chunk")

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(ImageReadError, match=r"plain\.jpg': cannot be decoded \('chunk'\)"):
        read_pixels(str(path))


def test_without_rasterio_the_extra_is_named(tmp_path, monkeypatch):
    of_bands(5)(tmp_path / "a.tif")
    rasters.import_rasterio.cache_clear()
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(MissingDependencyError, match=r"rasterio.*timm_moe_dg\[geo\]"):
        read(tmp_path, "a.tif", 5)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_an_image_is_not_damaged_because_the_process_has_too_many_open_files(tmp_path, name):
    Image.new("RGB", (4, 4)).save(tmp_path / name)
    read_pixels(str(tmp_path / name))  # imports what it needs
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        with pytest.raises(OSError, match="Too many open files"):
            read_pixels(str(tmp_path / name))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
