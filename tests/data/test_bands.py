"""Files of other than three bands: values as they were written, whatever the layout; what cannot be used is named."""

import sys

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tests.band_files import band_folder, write_tiff
from timm_moe_dg.data import Split, evaluation_transform, get_benchmark, training_transform
from timm_moe_dg.data.inspection import band_statistics
from timm_moe_dg.data.readers import images
from timm_moe_dg.data.readers.images import as_picture, read_pixels
from timm_moe_dg.errors import ArgumentError, ImageReadError, MissingDependencyError

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("layout", ["planes", "interleaved", "pages"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32, np.float64])
def test_every_value_is_there_scaled_by_the_type_s_maximum(tmp_path, layout, dtype):
    whole = np.issubdtype(dtype, np.integer)
    values = RANDOM.integers(0, np.iinfo(dtype).max, (5, 7, 6)) if whole else RANDOM.normal(size=(5, 7, 6)) * 100
    values = values.astype(dtype)
    write_tiff(tmp_path / "a.tif", values, layout)
    pixels = read_pixels(str(tmp_path / "a.tif"), 5)
    expected = values.astype(np.float64) / (np.iinfo(dtype).max if whole else 1)
    assert pixels.shape == (5, 7, 6)
    np.testing.assert_allclose(pixels.numpy(), expected, rtol=1e-6)


def test_png_files_of_four_bands_and_of_one_are_read_as_they_are(tmp_path):
    values = RANDOM.integers(0, 256, (6, 5, 4), dtype=np.uint8)
    Image.fromarray(values, "RGBA").save(tmp_path / "a.png")
    np.testing.assert_allclose(read_pixels(str(tmp_path / "a.png"), 4).numpy(), values.transpose(2, 0, 1) / 255)
    Image.fromarray(values[..., 0]).save(tmp_path / "b.png")
    assert read_pixels(str(tmp_path / "b.png"), 1).shape == (1, 6, 5)


@pytest.mark.parametrize(("bands", "wanted"), [(3, 5), (5, 4), (4, 5)])
def test_another_number_of_bands_is_named_with_the_file_and_what_is_wanted(tmp_path, bands, wanted):
    write_tiff(tmp_path / "a.tif", np.zeros((bands, 4, 4), np.uint8))
    with pytest.raises(ImageReadError, match=rf"a.tif': has {bands} bands, expected {wanted}; .*--in-chans {bands}"):
        read_pixels(str(tmp_path / "a.tif"), wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pixels_without_data_become_the_mean_of_their_band(tmp_path, value):
    values = np.ones((5, 4, 4), np.float32)
    values[2, 1, 1:3] = value
    write_tiff(tmp_path / "a.tif", values)
    pixels = read_pixels(str(tmp_path / "a.tif"), 5)
    np.testing.assert_array_equal(pixels.isnan().numpy(), ~np.isfinite(values))
    view = evaluation_transform((4, 4), [0.25] * 5, [0.5] * 5)(pixels)
    torch.testing.assert_close(view, torch.where(pixels.isnan(), 0.0, 1.5))


@pytest.mark.parametrize("augmentation", [None, "photograph", "digit", "none"])
def test_a_resized_image_loses_no_more_than_the_values_without_data(augmentation):
    pixels = torch.full((4, 80, 80), 0.75)
    pixels[:, ::4, ::4] = torch.nan  # each pixel of the view covers some
    normalization = ([0.25] * 4, [0.5] * 4)
    view = evaluation_transform((8, 8), *normalization)
    if augmentation:
        view = training_transform(augmentation, (8, 8), *normalization)
    torch.testing.assert_close(view(pixels), torch.full((4, 8, 8), 15 / 16), atol=0.03, rtol=0)


@pytest.mark.parametrize(("missing", "refused"), [(8, False), (9, True)])
def test_a_tile_with_more_than_half_missing_is_refused(tmp_path, missing, refused):
    values = np.arange(1, 81, dtype=np.float32).reshape(5, 4, 4)
    values[3].ravel()[:missing] = np.nan
    write_tiff(tmp_path / "a.tif", values)
    if not refused:
        assert read_pixels(str(tmp_path / "a.tif"), 5).isnan().sum() == missing
        return
    with pytest.raises(ImageReadError, match=r"a.tif': 56% of band 4 are without data \(nodata\); .*--skip-unreadable"):
        read_pixels(str(tmp_path / "a.tif"), 5)


@pytest.mark.parametrize("content", [b"", b"no image", b"II*\0\x08\0\0\0"])
def test_broken_files_are_errors_of_one_kind(tmp_path, content):
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*--skip-unreadable"):
        read_pixels(str(tmp_path / "a.tif"), 5)


def test_without_tifffile_the_pip_line_is_named(tmp_path, monkeypatch):
    write_tiff(tmp_path / "a.tif", np.zeros((5, 4, 4), np.uint8))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(MissingDependencyError, match=r"needs tifffile.*pip install 'timm_moe_dg\[tiff\]'"):
        read_pixels(str(tmp_path / "a.tif"), 5)


@pytest.mark.parametrize("layout", ["planes", "interleaved", "pages"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_reader_of_rgb_says_how_many_bands_it_found(tmp_path, layout, dtype):
    write_tiff(tmp_path / "a.tif", np.zeros((5, 8, 9), dtype), layout)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*it has 5 bands.*--in-chans"):
        read_pixels(str(tmp_path / "a.tif"))


def test_three_bands_agree_with_what_is_read_as_rgb(tmp_path):
    """A fourth band makes the same tile one of bands, in which the first three have the same values."""
    values = RANDOM.integers(300, 500, (4, 6, 5), dtype=np.uint16)
    tifffile.imwrite(tmp_path / "rgb.tif", values[:3].transpose(1, 2, 0), photometric="rgb")
    write_tiff(tmp_path / "bands.tif", values)
    rgb = read_pixels(str(tmp_path / "rgb.tif"))
    torch.testing.assert_close(rgb, read_pixels(str(tmp_path / "bands.tif"), 4)[:3], rtol=0, atol=0)
    np.testing.assert_allclose(rgb.numpy(), values[:3] / 65535, rtol=1e-6)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("bands", [1, 3])
@pytest.mark.parametrize("dtype", ["i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"])
def test_every_type_is_read_in_full_depth_without_in_chans(tmp_path, dtype, bands, order):
    values = RANDOM.integers(1, 100, (6, 5, bands)).astype(dtype)
    layout = {"photometric": "rgb" if bands == 3 else "minisblack", "compression": "zlib", "byteorder": order}
    tifffile.imwrite(tmp_path / "a.tif", values.squeeze(), **layout)
    largest = np.iinfo(dtype).max if dtype[0] in "ui" else 1
    expected = np.broadcast_to(values, (6, 5, 3)).transpose(2, 0, 1) / largest
    np.testing.assert_allclose(read_pixels(str(tmp_path / "a.tif")).numpy(), expected, rtol=1e-5)


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
    tifffile.imwrite(tmp_path / "a.tif", values.transpose(1, 2, 0).squeeze(), photometric=photometric, extratags=tag)
    for read in (1, 3) if bands == 1 else (3,):
        pixels = read_pixels(str(tmp_path / "a.tif"), read)
        expected = np.zeros((read, 6, 5), bool)
        expected[slice(None) if bands == 1 else -1, 2, 3] = True
        np.testing.assert_array_equal(pixels.isnan().numpy(), expected)
        largest = np.iinfo(dtype).max if dtype[0] in "ui" else 1
        np.testing.assert_allclose(pixels.numpy()[~expected], 7 / largest, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["u1", "u2"])
@pytest.mark.parametrize("bands", [1, 3])
def test_missing_data_are_marked_where_zero_is_white(tmp_path, dtype, bands):
    values = RANDOM.integers(0, 9, (7, 6)).astype(dtype)
    note = (42113, "s", 0, "4", True)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="miniswhite", extratags=[note])
    pixels, largest = read_pixels(str(tmp_path / "a.tif"), bands), np.iinfo(dtype).max
    expected = np.where(values == 4, np.nan, (largest - values.astype(float)) / largest)
    np.testing.assert_allclose(pixels.numpy(), np.broadcast_to(expected, pixels.shape), rtol=1e-6)


@pytest.mark.parametrize("mode", ["YCbCr", "LAB", "CMYK"])
def test_coded_colors_are_no_bands(tmp_path, mode):
    Image.new(mode, (4, 4)).save(tmp_path / "a.tif")
    bands = ("red", "green", "blue", "nir")[: len(mode) if mode == "CMYK" else 3]
    with pytest.raises(ImageReadError, match=r"a.tif'.*palette, CMYK, YCbCr or L\*a\*b\*, as bands or of .*; save it"):
        read_pixels(str(tmp_path / "a.tif"), bands)


@pytest.mark.parametrize("bands", [3, ("red", "green", "blue")])
@pytest.mark.parametrize("name", ["a8.tif", "a16.tif", "a.png"])
def test_further_images_of_a_file_are_noticed(tmp_path, caplog, monkeypatch, name, bands):
    monkeypatch.setattr(images, "_warned", set())
    values = RANDOM.integers(0, 255, (2, 5, 4, 3), dtype=np.uint8 if "16" not in name else np.uint16)
    if name.endswith("png"):
        first, second = map(Image.fromarray, values)
        first.save(tmp_path / name, save_all=True, append_images=[second])
    else:
        tifffile.imwrite(tmp_path / name, values, photometric="rgb")
    read_pixels(str(tmp_path / name), bands)
    assert f"{name}': holds several images, of which the first is read" in caplog.text


@pytest.mark.parametrize(("dtype", "bands"), [("u1", 3), ("u1", 1), ("u2", 3), ("u2", 5)])
def test_an_internal_mask_marks_pixels_without_data(tmp_path, dtype, bands):
    values = RANDOM.integers(1, 99, (64, 48, bands)).astype(dtype)
    valid = RANDOM.random((64, 48)) < 0.9
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        layout = {"photometric": "rgb" if bands == 3 else "minisblack", "planarconfig": "contig"}
        file.write(values.squeeze(), **(layout if bands > 1 else {}))
        file.write(valid, subfiletype=4, photometric="mask")
    pixels = read_pixels(str(tmp_path / "a.tif"), 5 if bands == 5 else 3)
    np.testing.assert_array_equal(pixels.isnan().numpy(), np.broadcast_to(~valid, pixels.shape))


@pytest.mark.parametrize("dtype", ["u1", "u2", "f4"])
def test_overviews_and_masks_are_no_bands(tmp_path, dtype):
    values = np.full((64, 48), 1, dtype)
    with tifffile.TiffWriter(tmp_path / "cog.tif") as file:
        file.write(values)
        for step in (2, 4):
            file.write(values[::step, ::step], subfiletype=1)
        file.write(np.ones((64, 48), bool), subfiletype=4, photometric="mask")
    picture = read_pixels(str(tmp_path / "cog.tif"))
    assert picture.size == (48, 64) if dtype == "u1" else picture.shape == (3, 64, 48)
    assert read_pixels(str(tmp_path / "cog.tif"), 1).shape == (1, 64, 48)


@pytest.mark.parametrize("bands", [1, 2, 4, 7])
def test_a_picture_shows_the_first_three_bands_from_dark_to_bright(bands):
    ramp = torch.linspace(-3, 9, 100).view(1, 10, 10).repeat(bands, 1, 1)
    picture = np.asarray(as_picture(ramp))
    assert picture.shape == (10, 10, 3)
    assert (picture.min(), picture.max()) == (0, 255)
    flat = picture.reshape(-1, 3)[:, 0].astype(int)
    assert (np.diff(flat) >= 0).all()
    assert np.asarray(as_picture(torch.zeros(bands, 4, 4))).max() == 0  # nothing to stretch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return band_folder(tmp_path_factory.mktemp("bands") / "data", bands=5)


def test_pixels_have_all_bands_and_pictures_are_rgb(folder):
    domains = get_benchmark("place_folder").read(folder, bands=5)
    assert {domain.pixels(0).shape for domain in domains} == {(5, 16, 16)}
    assert domains[0].image(0).mode == "RGB"
    assert domains[0].without([0]).pixels(0).shape == (5, 16, 16)


def test_statistics_are_those_of_all_training_pixels(folder):
    domains = get_benchmark("place_folder").read(folder, bands=5)
    splits = [Split(np.array([0, 2]), np.array([1, 3])) for _ in domains]
    mean, std, low, high = band_statistics(domains, splits, [0, 1], workers=2)
    pixels = torch.stack([domains[index].pixels(position) for index in (0, 1) for position in (0, 2)]).double()
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std((0, 2, 3), correction=0))
    assert (low, high) == (pixels.amin((0, 2, 3)).tolist(), pixels.amax((0, 2, 3)).tolist())


def test_statistics_leave_out_missing_data(folder):
    domain = get_benchmark("place_folder").read(folder, bands=5)[0]
    whole, part = domain.pixels(0), domain.pixels(0).clone()
    part[1, :4] = np.nan
    object.__setattr__(domain, "pixels", lambda index: part)
    mean, std, low, _ = band_statistics([domain], [Split(np.array([0]), np.arange(0))], [0])
    assert mean[0] == pytest.approx(whole[0].mean().item())
    assert mean[1] == pytest.approx(whole[1, 4:].mean().item())
    assert std[1] == pytest.approx(whole[1, 4:].std(correction=0).item(), rel=1e-5)
    assert low[1] == pytest.approx(whole[1, 4:].min().item())


def test_a_band_that_is_the_same_everywhere_is_not_divided_by_nothing(tmp_path):
    folder = band_folder(tmp_path / "data", bands=2, dtype=np.float32)
    domains = get_benchmark("place_folder").read(folder, bands=2)
    for domain in domains:
        object.__setattr__(domain, "pixels", lambda index: torch.full((2, 4, 4), 0.1))
    splits = [Split(np.arange(4), np.arange(0)) for _ in domains]
    assert band_statistics(domains, splits, [0], workers=1)[1] == [1.0, 1.0]


def test_training_changes_the_place_of_pixels_and_not_their_spectrum():
    """Every pixel has the same five values: whatever is cropped and mirrored, they stay; color jitter would not."""
    values = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    augment = training_transform("photograph", (8, 8), [0.0] * 5, [1.0] * 5)
    for _ in range(20):
        torch.testing.assert_close(
            augment(values.view(5, 1, 1).repeat(1, 12, 10)), values.view(5, 1, 1).repeat(1, 8, 8)
        )


def test_data_sets_that_are_no_files_have_three_bands():
    with pytest.raises(ArgumentError, match=r"in_chans=4: images of rotated_digits have 3 bands; .*place_folder"):
        get_benchmark("rotated_digits").read(None, bands=4)
