"""An image, a tile and a window of a scene have the values and the missing pixels that GDAL says the file has."""

import io
import os

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.geo_files import halves, write_raster, write_scene
from timm_moe_dg.data.bands import Bands
from timm_moe_dg.data.readers import rasters
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.data.readers.rasters import open_raster
from timm_moe_dg.errors import ImageReadError

rasterio = pytest.importorskip("rasterio")
HEIGHT, WIDTH = 48, 64
HIDDEN = (slice(0, 16), slice(0, 20))  # 320 pixels


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(rasters, "_warned", set())


def values_of(dtype="u1", bands=3, low=1, high=None):
    random = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        return random.normal(size=(bands, HEIGHT, WIDTH)).astype(dtype)
    # Smooth, as lossy codecs need it
    ramp = np.linspace(low, high or np.iinfo(dtype).max // 2, WIDTH).astype(dtype)
    return np.broadcast_to(ramp, (bands, HEIGHT, WIDTH)) + np.arange(bands, dtype=dtype)[:, None, None]


def hidden(values, nodata):
    values = values.copy()
    values[:, *HIDDEN] = nodata
    return values


def masked(path, values, internal=True, **options):
    write_raster(path, values, **options)
    mask = np.full((HEIGHT, WIDTH), 255, np.uint8)
    mask[HIDDEN] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=internal), rasterio.open(path, "r+") as file:
        file.write_mask(mask)
    return path


def with_overviews(path, dtype="u2", bands=3):
    masked(path, values_of(dtype, bands))
    with rasterio.open(path, "r+") as file:
        file.build_overviews([2, 4])


def by_pam(path):
    """A nodata value in the file beside the image."""
    write_raster(path, hidden(values_of("u2"), 0))
    text = "".join(f'<PAMRasterBand band="{n}"><NoDataValue>0</NoDataValue></PAMRasterBand>' for n in (1, 2, 3))
    path.with_name(f"{path.name}.aux.xml").write_text(f"<PAMDataset>{text}</PAMDataset>")


def transparent(path, dtype="u1"):
    values = values_of(dtype, 4)
    values = values.copy()
    values[3] = np.iinfo(dtype).max
    values[3, *HIDDEN] = 0
    write_raster(path, values, photometric="rgb", alpha="yes")


KINDS = {
    "uint8": lambda path: write_raster(path, values_of(), photometric="rgb"),
    "gray uint8": lambda path: write_raster(path, values_of(bands=1)),
    "uint16": lambda path: write_raster(path, values_of("u2")),
    "int16 of nodata": lambda path: write_raster(path, hidden(values_of("i2"), -9999), nodata=-9999),
    "uint32": lambda path: write_raster(path, values_of("u4")),
    "float32": lambda path: write_raster(path, values_of("f4")),
    "float64": lambda path: write_raster(path, values_of("f8")),
    "five bands of int16": lambda path: write_raster(path, values_of("i2", 5), interleave="pixel"),
    "five planes of float64": lambda path: write_raster(path, values_of("f8", 5), interleave="band"),
    "floats with nan": lambda path: write_raster(path, hidden(values_of("f4"), np.nan)),
    "floats of nodata": lambda path: write_raster(
        path, hidden(values_of("f4"), -3.4028234663852886e38), nodata=-3.4e38
    ),
    "planar": lambda path: write_raster(path, values_of("u2"), interleave="band"),
    "tiled": lambda path: write_raster(path, values_of("u2"), tiled=True, blockxsize=16, blockysize=16),
    "strips": lambda path: write_raster(path, values_of("u2"), blockysize=5),
    "big-endian": lambda path: write_raster(path, values_of("u2"), endianness="big"),
    "BigTIFF": lambda path: write_raster(path, values_of("u2"), bigtiff="yes"),
    "LZW": lambda path: write_raster(path, values_of("u2"), compress="lzw", predictor=2),
    "LERC": lambda path: write_raster(path, values_of("f4"), compress="lerc"),
    "ZSTD": lambda path: write_raster(path, values_of("u2"), compress="zstd"),
    "12 bits": lambda path: write_raster(path, values_of("u2", high=4000), nbits=12),
    "YCbCr of JPEG": lambda path: write_raster(path, values_of(), compress="jpeg", photometric="ycbcr"),
    "internal mask": lambda path: masked(path, values_of("u2")),
    "internal mask of 8 bits": lambda path: masked(path, values_of(), photometric="rgb"),
    "internal mask of five bands": lambda path: masked(path, values_of("u2", 5)),
    "mask beside the file": lambda path: masked(path, values_of("u2"), internal=False),
    "nodata beside the file": by_pam,
    "transparency": transparent,
    "transparency of 16 bits": lambda path: transparent(path, "u2"),
    "overviews of bands and mask": with_overviews,
    "overviews of gray and mask": lambda path: with_overviews(path, "u1", bands=1),
}


def forms(path, bands):
    """The pixels as image, as the only tile of a scene, and as its only window."""
    with open_raster(str(path)) as raster:
        window = rasterio.windows.Window(0, 0, WIDTH, HEIGHT)
        positions = raster.positions(bands)
        scene = raster.converted(*raster.read(positions, window), bands, positions)
        tile = io.BytesIO(raster.copy(window))
    return [read_pixels(str(path), bands), read_pixels("tile", bands, file=tile), scene]


@pytest.mark.parametrize("kind", KINDS)
def test_image_tile_and_window_have_the_values_and_the_mask_of_gdal(tmp_path, kind):
    KINDS[kind](tmp_path / "a.tif")
    with rasterio.open(tmp_path / "a.tif") as file:
        count = file.count - (file.colorinterp[-1].name == "alpha")
        values = file.read(range(1, count + 1)).astype(np.float64)
        missing = file.dataset_mask() == 0
        dtype = np.dtype(file.dtypes[0])
    if dtype.kind == "f":
        missing |= np.isnan(values).all(axis=0)
    assert missing.sum() == (320 if {"mask", "nodata", "transparency", "nan"} & set(kind.split()) else 0)
    expected = np.where(missing, np.nan, values / (np.iinfo(dtype).max if dtype.kind in "iu" else 1))
    for bands in [Bands(3)] * (count < 5) + [Bands(count, ("red", "green", "blue", "nir", "1610nm")[:count])]:
        for pixels in forms(tmp_path / "a.tif", bands):
            if isinstance(pixels, Image.Image):
                pixels = np.asarray(pixels).transpose(2, 0, 1) / 255
            np.testing.assert_allclose(pixels, np.broadcast_to(expected, pixels.shape), rtol=1e-6)


def test_transparency_of_a_deep_photograph_is_dropped_as_that_of_a_shallow_one(tmp_path):
    transparent(tmp_path / "a.tif", "u2")
    pytest.importorskip("rasterio.shutil").copy(tmp_path / "a.tif", tmp_path / "a.png", driver="PNG")
    pixels = read_pixels(str(tmp_path / "a.png"), Bands(3))
    np.testing.assert_allclose(pixels, values_of("u2", 4)[:3] / 65535, rtol=1e-6)


def save(mode, **options):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8))
    return lambda path: (image.quantize(16) if mode == "P" else image.convert(mode)).save(path, **options)


def white(path, dtype="u1"):
    tifffile.imwrite(path, values_of(dtype, 1)[0], photometric="miniswhite")


@pytest.mark.parametrize(
    "write",
    [save("P"), save("1"), save("CMYK"), save("YCbCr"), save("L"), save("RGB", compression="jpeg"), white],
    ids=["palette", "bits", "CMYK", "YCbCr", "gray", "JPEG", "zero is white"],
)
def test_colors_become_rgb_as_pillow_has_them(tmp_path, write):
    write(tmp_path / "a.tif")
    with Image.open(tmp_path / "a.tif") as image:
        expected = np.asarray(image.convert("RGB")).astype(int)
    for pixels in forms(tmp_path / "a.tif", Bands(3)):
        np.testing.assert_allclose(np.asarray(pixels).astype(int), expected, atol=1)  # rounding of YCbCr


# Reflectance by the scale and offset of Sentinel-2, of its baseline 04.00 and of Landsat's Collection 2
ENCODINGS = {"sentinel2": (1e-4, 0.0), "baseline 04.00": (1e-4, -0.1), "landsat": (2.75e-5, -0.2)}


def encoded(path, reflectance, scale, offset, states=True):
    values = np.rint((reflectance - offset) / scale).astype(np.uint16)
    stated = {"scales": [scale] * len(values), "offsets": [offset] * len(values)} if states else {}
    return write_raster(path, values, **stated)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_scale_and_offset_give_the_reflectance_of_real_numbers(tmp_path, encoding):
    reflectance = np.random.default_rng(0).uniform(0.01, 0.6, (5, HEIGHT, WIDTH))
    encoded(tmp_path / "a.tif", reflectance, *ENCODINGS[encoding])
    write_raster(tmp_path / "b.tif", reflectance.astype(np.float32))
    bands = Bands(5)
    real = read_pixels(str(tmp_path / "b.tif"), bands)
    for pixels in forms(tmp_path / "a.tif", bands):
        np.testing.assert_allclose(pixels, real, atol=6e-5)  # half a step of the coarsest encoding


def test_files_follow_what_the_training_images_stated(tmp_path, caplog):
    reflectance = np.full((5, HEIGHT, WIDTH), 0.2086)
    stated = str(encoded(tmp_path / "a.tif", reflectance, 1e-4, 0.0))
    plain = str(encoded(tmp_path / "b.tif", reflectance, 1e-4, 0.0, states=False))
    with pytest.raises(ImageReadError, match=r"b.tif': holds whole numbers without a scale"):
        read_pixels(plain, Bands(5, physical=True))
    np.testing.assert_allclose(read_pixels(stated, Bands(5, physical=True)), 0.2086, rtol=1e-6)
    np.testing.assert_allclose(read_pixels(stated, Bands(5, physical=False)), 2086 / 65535, rtol=1e-6)
    assert "a.tif': states a scale, which the training images did not" in caplog.text
    real = str(write_raster(tmp_path / "c.tif", reflectance.astype(np.float32)))
    read_pixels(real, Bands(5, physical=True))
    assert "c.tif'" not in caplog.text
    read_pixels(real, Bands(5, physical=False))
    assert "c.tif': holds real numbers, and the training images were whole numbers" in caplog.text


def test_nodata_may_differ_between_bands(tmp_path):
    path = write_raster(tmp_path / "a.tif", values_of("u2", low=20))
    text = "".join(f'<PAMRasterBand band="{n}"><NoDataValue>{n + 19}</NoDataValue></PAMRasterBand>' for n in (1, 2, 3))
    path.with_name("a.tif.aux.xml").write_text(f"<PAMDataset>{text}</PAMDataset>")
    with open_raster(str(path)) as raster, pytest.raises(ValueError, match="nodata values"):
        rasters.check_scene(raster, needs_place=False)
    missing = read_pixels(str(path)).isnan()
    assert missing[:, :, 0].all()
    assert missing.sum() == 3 * HEIGHT


@pytest.mark.parametrize("tag", [(254, 1), (255, 2)], ids=["NewSubfileType", "SubfileType"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_first_page_that_is_a_thumbnail_is_skipped(tmp_path, tag, in_memory):
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        small = np.zeros((16, 16, 3), np.uint8)
        more = {"subfiletype": 1} if tag[0] == 254 else {"extratags": [(255, 3, 1, 2, True)]}
        file.write(small, photometric="rgb", **more)
        file.write(values_of().transpose(1, 2, 0), photometric="rgb")
    content = io.BytesIO(path.read_bytes()) if in_memory else None
    np.testing.assert_array_equal(np.asarray(read_pixels(str(path), file=content)).transpose(2, 0, 1), values_of())


@pytest.mark.parametrize("pages", [2, 3, 4])
def test_pages_of_a_document_are_no_bands(tmp_path, pages, caplog):
    values = values_of(bands=pages)
    tifffile.imwrite(tmp_path / "a.tif", values, photometric="minisblack")
    pixels = np.asarray(read_pixels(str(tmp_path / "a.tif")))
    np.testing.assert_array_equal(pixels, np.repeat(values[0][..., None], 3, axis=2))
    assert "a.tif': holds several images, of which the first is read" in caplog.text


@pytest.mark.parametrize("bands", [1, 3, 4])
def test_jpeg_2000_of_sixteen_bits_is_read_with_all_bands(tmp_path, bands):
    values = np.clip(values_of("u2", bands), 0, 10_000)
    profile = {"count": bands, "height": HEIGHT, "width": WIDTH, "dtype": "uint16", "quality": 100, "reversible": True}
    with rasterio.open(tmp_path / "a.jp2", "w", driver="JP2OpenJPEG", **profile) as file:
        file.write(values)
    content = (tmp_path / "a.jp2").read_bytes()
    for source in (None, io.BytesIO(content)):
        pixels = read_pixels(str(tmp_path / "a.jp2"), bands, file=source)
        np.testing.assert_allclose(pixels, np.broadcast_to(values / 65535, (max(bands, len(pixels)), HEIGHT, WIDTH)))


@pytest.mark.parametrize("name", ["a.png", "a.webp", "a.jpg"])
@pytest.mark.parametrize("tags", [b"Exif\0\0II*\0", b"Exif\0\0MM\0*\0\0\0\x08\0\xff", b"Exif\0\0"])
def test_photographs_with_damaged_tags_are_read(tmp_path, name, tags):
    Image.new("RGB", (6, 4), (9, 99, 199)).save(tmp_path / name, exif=tags, quality=100, lossless=True)
    pixels = read_pixels(str(tmp_path / name))
    assert pixels.size == (6, 4)
    np.testing.assert_allclose(pixels.getpixel((0, 0)), (9, 99, 199), atol=2)


@pytest.mark.parametrize("compress", [None, "deflate", "jpeg"])
def test_a_file_that_is_cut_is_named(tmp_path, compress):
    values = np.random.default_rng(0).integers(0, 255, (3, HEIGHT, WIDTH), dtype=np.uint8)
    content = write_raster(tmp_path / "a.tif", values, compress=compress).read_bytes()
    (tmp_path / "a.tif").write_bytes(content[: len(content) // 2])
    with pytest.raises(ImageReadError, match=r"a.tif': (is cut short|cannot be decoded)"):
        read_pixels(str(tmp_path / "a.tif"))


def test_a_name_that_is_no_utf_8_is_read(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.tif")
    write_raster(tmp_path / "a.tif", values_of("u2")).rename(path)
    assert read_pixels(path).shape == (3, HEIGHT, WIDTH)


def test_files_that_name_others_are_not_opened(tmp_path):
    write_raster(tmp_path / "a.tif", values_of("u2"))
    (tmp_path / "b.vrt").write_text(f"<VRTDataset><SourceFilename>{tmp_path / 'a.tif'}</SourceFilename></VRTDataset>")
    with pytest.raises(ImageReadError, match=r"b.vrt': cannot be decoded"), open_raster(str(tmp_path / "b.vrt")):
        pass


def test_a_turned_scene_and_one_of_control_points_are_refused(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", values_of("u2")[0], extratags=[(274, 3, 1, 6, True)])
    points = [
        rasterio.control.GroundControlPoint(*place) for place in ((0, 0, 10, 50), (0, 70, 11, 50), (60, 0, 10, 49))
    ]
    write_scene(tmp_path / "b.tif", halves(), crs="EPSG:4326", transform=None, gcps=points)
    for name, message in (("a", "orientation 6"), ("b", "gdalwarp")):
        with (
            open_raster(str(tmp_path / f"{name}.tif"), "scene") as raster,
            pytest.raises(ValueError, match=rf"scene=.*{name}.tif': .*{message}"),
        ):
            rasters.check_scene(raster)
