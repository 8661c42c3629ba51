"""Names of bands: what they stand for, which are refused, and which bands of a file they pick."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from timm_moe_dg.data.bands import Bands, band_names, band_settings
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
        ("470 480 500 555 650 660", "470nm 480nm 500nm 555nm 650nm 660nm", "-2-1-0"),
        ("nir 1610", "nir 1610nm", "--"),
    ],
)
def test_names_stand_for_bands_and_the_nearest_ones_are_red_green_and_blue(words, names, colors):
    assert band_names(words.split()) == tuple(names.split())
    assert band_names(names.split()) == tuple(names.split())
    found = ["-" if color is None else str(color) for color in Bands.of(names.split()).colors]
    # 480 and 500 nm are equally far from blue: the first has its kernel
    assert "".join(found) == colors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("B2 B3 B4", "bands='B2': is a band of two sensors; write sentinel2:B02 or landsat:B2"),
        ("B02 SR_B4 B11", "bands='B11': is a band of two sensors; write sentinel2:B11 or landsat:B11"),
        ("B13", "bands='B13': no such band; did you mean"),
        ("modis:B4", "bands='modis:B4': no such band"),
        ("rde", "bands='rde': no such band; did you mean red"),
        ("299", "bands='299': no wavelength from 300 to 15000 nm"),
        ("red 15001nm", "bands='15001nm': no wavelength"),
        ("B04 sentinel2:B4", "sentinel2:B04 is named twice"),
        ("665 665.0nm", "665nm is named twice"),
    ],
)
def test_other_names_are_refused(words, message):
    with pytest.raises(ArgumentError, match=message):
        band_names(words.split())


def test_the_number_of_bands_follows_from_their_names():
    assert band_settings(["B02", "B8A"], 3) == {"bands": ["sentinel2:B02", "sentinel2:B8A"], "in_chans": 2}
    assert band_settings(None, 5) == {}
    with pytest.raises(ArgumentError, match="in_chans=5: --bands names 2; leave it out"):
        band_settings(["B02", "B8A"], 5)


def write_described(path, values, names):
    """Writes (bands, height, width) values with the descriptions that GDAL would write."""
    items = "".join(
        f'<Item name="DESCRIPTION" sample="{band}" role="description">{name}</Item>'
        for band, name in enumerate(names)
        if name
    )
    tag = (42112, 2, 0, f"<GDALMetadata>{items}</GDALMetadata>", True)
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate", extratags=[tag])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_bands_are_picked_from_a_file_by_their_descriptions(tmp_path, dtype):
    values = np.arange(1, 6, dtype=dtype)[:, None, None].repeat(4, 1).repeat(4, 2)
    write_described(tmp_path / "a.tif", values, ["B4, central wavelength 665 nm", "B3", "B2", "B8A", "SCL"])
    pixels = read_pixels(str(tmp_path / "a.tif"), band_names(["B02", "B04", "B8A"]))
    np.testing.assert_allclose(pixels[:, 0, 0] * np.iinfo(dtype).max, [3, 1, 4], rtol=1e-6)
    with pytest.raises(ImageReadError, match=r"a.tif': lacks the band sentinel2:B05, its bands are B4,.* --bands"):
        read_pixels(str(tmp_path / "a.tif"), band_names(["B02", "B05"]))


def test_files_without_names_have_the_bands_in_order(tmp_path):
    values = np.arange(1, 4, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    write_described(tmp_path / "a.tif", values, ["Band 1", "", "3"])
    assert (read_pixels(str(tmp_path / "a.tif"), ("blue", "green", "red"))[:, 0, 0] * 255).tolist() == [1, 2, 3]
    with pytest.raises(ImageReadError, match=r"a.tif': has 3 bands, expected 2; .*descriptions"):
        read_pixels(str(tmp_path / "a.tif"), ("blue", "green"))


def test_three_bands_in_another_order_than_rgb_are_noticed_without_bands(tmp_path, caplog):
    values = np.zeros((3, 4, 4), np.uint8)
    for names, order in (("B4 B3 B2", "red"), ("a b c", "other"), ("B02 B03 B04", "blue")):
        write_described(tmp_path / f"{order}.tif", values, names.split())
        read_pixels(str(tmp_path / f"{order}.tif"))
        assert ("describes its bands as B02, B03, B04, read as RGB; name them" in caplog.text) == (order == "blue")


def test_colors_of_a_file_in_another_order_than_rgb_are_noticed(tmp_path, caplog):
    items = "".join(
        f'<Item name="COLORINTERP" sample="{band}" role="colorinterp">{name}</Item>'
        for band, name in enumerate(("Blue", "Green", "Red"))
    )
    tag = (42112, 2, 0, f"<GDALMetadata>{items}</GDALMetadata>", True)
    tifffile.imwrite(tmp_path / "a.tif", np.zeros((4, 4, 3), np.uint8), photometric="rgb", extratags=[tag])
    read_pixels(str(tmp_path / "a.tif"))
    assert "a.tif': describes its bands as Blue, Green, Red, read as RGB; name them with --bands" in caplog.text


def test_a_picture_shows_the_named_colors(tmp_path):
    ramp = np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8)
    Image.fromarray(np.stack([ramp, ramp.T, ramp[::-1]], axis=2)).save(tmp_path / "a.png")
    bands = ("blue", "green", "red")
    shown = np.asarray(as_picture(read_pixels(str(tmp_path / "a.png"), bands), bands))
    assert shown[7, 0].tolist()[0] < 60  # the file's third band is red
    assert shown[0, 0].tolist() == [int(shown[0, 0, 0]), 0, 0]
    assert shown[0, 0, 0] > 200
