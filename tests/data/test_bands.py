"""Names of bands: what they stand for, which are refused, and which bands of a file they pick."""

import numpy as np
import pytest
from rasterio.enums import ColorInterp

from tests.geo_files import write_raster
from timm_moe_dg.data.bands import Bands, band_names, band_settings, wavelength
from timm_moe_dg.data.readers.images import as_picture, read_pixels
from timm_moe_dg.errors import ArgumentError, ImageReadError


@pytest.mark.parametrize(
    ("words", "names", "colors"),
    [
        ("B02 B03 B04 b8a B11", "sentinel2:B02 sentinel2:B03 sentinel2:B04 sentinel2:B8A sentinel2:B11", "210--"),
        ("SR_B2 SR_B3 SR_B4 B8 ST_B10", "landsat:B2 landsat:B3 landsat:B4 landsat:B8 landsat:B10", "210--"),
        ("landsat:B04 sentinel2:B4 B8A", "landsat:B4 sentinel2:B04 sentinel2:B8A", "-0-"),  # one red kernel
        ("R G B NIR", "red green blue nir", "012-"),
        ("naip:R Green 700nm 842.5", "red green 700nm 842.5nm", "01--"),
        # 480 and 500 nm are equally far from blue: the first has its kernel
        ("470 480 500 555 650 660", "470nm 480nm 500nm 555nm 650nm 660nm", "-2-1-0"),
        ("nir 1610", "nir 1610nm", "--"),
    ],
)
def test_names_stand_for_bands_and_the_nearest_ones_are_red_green_and_blue(words, names, colors):
    assert band_names(words.split()) == tuple(names.split())
    assert band_names(names.split()) == tuple(names.split())
    found = ["-" if color is None else str(color) for color in Bands.of(names.split()).colors]
    assert "".join(found) == colors


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("B2 B3 B4", "B2"),  # of two sensors
        ("B02 SR_B4 B11", "B11"),
        ("B13", "B13"),
        ("modis:B4", "modis:B4"),
        ("rde", "rde"),
        ("299", "299"),
        ("red 15001nm", "15001nm"),
        ("B04 sentinel2:B4", "sentinel2:B4"),  # twice
        ("665 665.0nm", "665.0nm"),
    ],
)
def test_other_names_are_refused(words, word):
    with pytest.raises(ArgumentError, match=f"^bands='{word}': "):
        band_names(words.split())


def test_centers_are_those_of_the_sensors():
    """Sums in nanometers over all bands, by ESA and USGS."""
    sentinel = [f"B{number:02}" for number in range(1, 13)] + ["B8A"]
    for names, total in ((sentinel, 12_219.1), ([f"landsat:B{number}" for number in range(1, 12)], 31_678.2)):
        assert sum(map(wavelength, band_names(names))) == pytest.approx(total, abs=3)  # rounded to nanometers


def test_the_number_of_bands_follows_from_their_names():
    assert band_settings(["B02", "B8A"], 3) == {"bands": ["sentinel2:B02", "sentinel2:B8A"], "in_chans": 2}
    assert band_settings(None, 5) == {}
    with pytest.raises(ArgumentError, match=r"^in_chans=5: "):
        band_settings(["B02", "B8A"], 5)
    assert Bands.of(3).is_rgb
    assert not any(bands.is_rgb for bands in (Bands.of(4), Bands.of(("red", "green", "blue"))))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_bands_are_picked_from_a_file_by_their_descriptions(tmp_path, dtype):
    values = np.arange(1, 6, dtype=dtype)[:, None, None].repeat(4, 1).repeat(4, 2)
    names = ["B4, central wavelength 665 nm", "B3", "B2", "B8A", "SCL"]
    path = str(write_raster(tmp_path / "a.tif", values, descriptions=names))
    pixels = read_pixels(path, band_names(["B02", "B04", "B8A"]))
    np.testing.assert_allclose(pixels[:, 0, 0] * np.iinfo(dtype).max, [3, 1, 4], rtol=1e-6)
    with pytest.raises(ImageReadError, match=r"a.tif': .*sentinel2:B05.* B4,"):
        read_pixels(path, band_names(["B02", "B05"]))


def test_files_without_names_have_the_bands_in_order(tmp_path):
    values = np.arange(1, 4, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    path = str(write_raster(tmp_path / "a.tif", values, descriptions=["Band 1", "", "3"]))
    assert (read_pixels(path, ("blue", "green", "red"))[:, 0, 0] * 255).tolist() == [1, 2, 3]
    with pytest.raises(ImageReadError, match=r"a.tif': has 3 bands, expected 2"):
        read_pixels(path, ("blue", "green"))


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        ({"descriptions": ("B4", "B3", "B2")}, None),
        ({"descriptions": ("x", "y", "z")}, None),
        ({"descriptions": ("B02", "B03", "B04")}, "B02, B03, B04"),
        ({"colorinterp": (ColorInterp.blue, ColorInterp.green, ColorInterp.red)}, "blue, green, red"),
    ],
)
def test_three_bands_in_another_order_than_rgb_are_noticed_without_bands(tmp_path, caplog, facts, names):
    read_pixels(str(write_raster(tmp_path / "a.tif", np.zeros((3, 4, 4), np.uint8), **facts)))
    assert (f"a.tif': describes its bands as {names}, read as RGB" in caplog.text) == bool(names)
    assert bool(caplog.text) == bool(names)


def test_a_picture_shows_the_named_colors(tmp_path):
    ramp = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
    path = str(write_raster(tmp_path / "a.tif", np.stack([ramp, ramp.T, ramp[::-1]])))
    bands = ("blue", "green", "red")
    shown = np.asarray(as_picture(read_pixels(path, bands), bands))
    assert shown[7, 0].tolist()[0] < 60  # the file's third band is red
    assert shown[0, 0].tolist() == [int(shown[0, 0, 0]), 0, 0]
    assert shown[0, 0, 0] > 200
