"""Files of other than three bands: values as they were written, whatever the layout; what cannot be used is named."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.band_files import write_tiff
from timm_moe_dg.data.bands import as_picture, read_bands
from timm_moe_dg.data.readers import read_image
from timm_moe_dg.errors import ImageReadError, MissingDependencyError

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("layout", ["planes", "interleaved", "pages"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32, np.float64])
def test_every_value_is_there_scaled_by_the_type_s_maximum(tmp_path, layout, dtype):
    whole = np.issubdtype(dtype, np.integer)
    values = RANDOM.integers(0, np.iinfo(dtype).max, (5, 7, 6)) if whole else RANDOM.normal(size=(5, 7, 6)) * 100
    values = values.astype(dtype)
    write_tiff(tmp_path / "a.tif", values, layout)
    pixels = read_bands(str(tmp_path / "a.tif"), 5)
    expected = values.astype(np.float64) / (np.iinfo(dtype).max if whole else 1)
    assert pixels.shape == (5, 7, 6)
    np.testing.assert_allclose(pixels.numpy(), expected, rtol=1e-6)


def test_png_files_of_four_bands_and_of_one_are_read_as_they_are(tmp_path):
    values = RANDOM.integers(0, 256, (6, 5, 4), dtype=np.uint8)
    Image.fromarray(values, "RGBA").save(tmp_path / "a.png")
    np.testing.assert_allclose(read_bands(str(tmp_path / "a.png"), 4).numpy(), values.transpose(2, 0, 1) / 255)
    Image.fromarray(values[..., 0]).save(tmp_path / "b.png")
    assert read_bands(str(tmp_path / "b.png"), 1).shape == (1, 6, 5)


@pytest.mark.parametrize(("bands", "wanted"), [(3, 5), (5, 4), (4, 5)])
def test_another_number_of_bands_is_named_with_the_file_and_what_is_wanted(tmp_path, bands, wanted):
    write_tiff(tmp_path / "a.tif", np.zeros((bands, 4, 4), np.uint8))
    with pytest.raises(ImageReadError, match=rf"a.tif': has {bands} bands, expected {wanted}; .*--in-chans {bands}"):
        read_bands(str(tmp_path / "a.tif"), wanted)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_pixels_without_data_are_named_with_their_band(tmp_path, value):
    values = np.ones((5, 4, 4), np.float32)
    values[2, 1, 1:3] = value
    write_tiff(tmp_path / "a.tif", values)
    with pytest.raises(ImageReadError, match=r"a.tif': 2 pixels of band 3 are no finite numbers \(nodata\); fill them"):
        read_bands(str(tmp_path / "a.tif"), 5)


@pytest.mark.parametrize("content", [b"", b"no image", b"II*\0\x08\0\0\0"])
def test_broken_files_are_errors_of_one_kind(tmp_path, content):
    (tmp_path / "a.tif").write_bytes(content)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*--skip-unreadable"):
        read_bands(str(tmp_path / "a.tif"), 5)


def test_without_tifffile_the_pip_line_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(MissingDependencyError, match=r"needs tifffile.*pip install 'timm_moe_dg\[tiff\]'"):
        read_bands(str(tmp_path / "a.tif"), 5)


@pytest.mark.parametrize("layout", ["planes", "interleaved", "pages"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_reader_of_rgb_says_how_many_bands_it_found(tmp_path, layout, dtype):
    write_tiff(tmp_path / "a.tif", np.zeros((5, 8, 9), dtype), layout)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*it has 5 bands.*--in-chans"):
        read_image(str(tmp_path / "a.tif"))


@pytest.mark.parametrize("bands", [1, 2, 4, 7])
def test_a_picture_shows_the_first_three_bands_from_dark_to_bright(bands):
    ramp = torch.linspace(-3, 9, 100).view(1, 10, 10).repeat(bands, 1, 1)
    shown = np.asarray(as_picture(ramp))
    assert shown.shape == (10, 10, 3)
    assert (shown.min(), shown.max()) == (0, 255)
    flat = shown.reshape(-1, 3)[:, 0].astype(int)
    assert (np.diff(flat) >= 0).all()
    assert np.asarray(as_picture(torch.zeros(bands, 4, 4))).max() == 0  # nothing to stretch
