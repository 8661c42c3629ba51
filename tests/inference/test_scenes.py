"""Maps of scenes: each pixel has the mean of its windows, predicted one by one as files; grid and missing data stay."""

import json

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from tests.geo_files import halves, write_scene
from tests.load_tool import run_tool
from tests.models.cases import randomize
from tests.saved_run import SMALL
from tests.storage.test_files import full_disk
from timm_moe_dg.analysis.geography import domains_at
from timm_moe_dg.data.bands import Bands
from timm_moe_dg.data.readers import rasters
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.inference import predictor, scenes
from timm_moe_dg.inference.scenes import SIXTEEN_BIT, WindowRow, averaged, starts
from timm_moe_dg.networks.averages import evaluation_view
from timm_moe_dg.networks.build import build_network, data_config, save_network
from timm_moe_dg.networks.trained import load_trained

rasterio = pytest.importorskip("rasterio")
warp = pytest.importorskip("rasterio.warp")
CLASSES = ("crops", "forest & heath", "water")
BANDS = [f"sentinel2:{name}" for name in ("B02", "B03", "B04", "B8A")]
WINDOW = 24


def save(folder, name, **options):
    torch.manual_seed(0)
    network = randomize(build_network(name, len(CLASSES), img_size=32, model_kwargs=SMALL, **options), std=0.15)
    bands = options["bands"].count if options else 3
    images = torch.randn(32, bands, 1, 1) * 2 + torch.randn(32, bands, 32, 32) * 0.3
    places = [torch.tensor([[1.6, 50.5]])] if name == "moge_tiny" else []
    with torch.no_grad():  # so that all classes occur
        network.get_classifier().bias -= network.eval()(images, *(part.expand(32, 2) for part in places)).mean(0)
    save_network(network, folder, CLASSES, data_config(network, 32, [0.5] * bands, [0.15] * bands))
    return f"local-dir:{folder}"


@pytest.fixture(scope="module")
def moge(tmp_path_factory):
    return save(tmp_path_factory.mktemp("moge"), "moge_tiny", bands=Bands.of(BANDS))


@pytest.fixture(scope="module")
def gmoe(tmp_path_factory):
    return save(tmp_path_factory.mktemp("gmoe"), "gmoe_tiny_patch16")


def patches(height, width, bands=5):
    """Values of patches of 12 pixels, each of its own brightness in each band."""
    random = np.random.default_rng(0)
    bright = np.kron(random.integers(2, 58_000, (bands, -(-height // 12), -(-width // 12))), np.ones((12, 12), int))
    return (bright[:, :height, :width] + random.integers(0, 5_000, (bands, height, width))).astype(np.uint16)


def predict(model, scene, output, *words):
    run_tool("predict", "--model", model, "--window", WINDOW, "--output", output, "--batch-size", 3, *words, scene)


def tile_by_tile(model, scene, folder, stride, bands, missing):
    """Mean probabilities (classes, height, width) by one file, one forward pass and one sum for each window."""
    network = load_trained(model)
    view = evaluation_view(network)
    with rasterio.open(scene) as file:
        values, height, width = file.read(), file.height, file.width
        total, count = np.zeros((len(CLASSES), height, width)), np.zeros((height, width))
        for top in sorted({*range(0, height - WINDOW + 1, stride), height - WINDOW}):
            for left in sorted({*range(0, width - WINDOW + 1, stride), width - WINDOW}):
                part = (slice(top, top + WINDOW), slice(left, left + WINDOW))
                if missing[part].mean() > 0.5:
                    continue
                tile = write_scene(folder / "tile.tif", values[:, *part], nodata=file.nodata)
                (lon,), (lat,) = warp.transform(
                    file.crs or "EPSG:4326",
                    "EPSG:4326",
                    *([number] for number in file.xy(top + WINDOW / 2 - 0.5, left + WINDOW / 2 - 0.5)),
                )
                place = [torch.tensor([[lon, lat]])] if hasattr(network, "metadata_encoder") else []
                with torch.no_grad():
                    found = network(view(read_pixels(str(tile), bands))[None], *place).softmax(1)[0]
                total[:, *part] += found.double().numpy()[:, None, None]
                count[part] += 1
    return total / np.where(count, count, np.nan)


def assert_map(path, scene, expected, missing):
    known = ~(missing | np.isnan(expected[0]))
    with rasterio.open(path) as file, rasterio.open(scene) as source:
        assert (file.shape, file.crs, file.transform) == (source.shape, source.crs, source.transform)
        classes, probability = file.read(1), file.read(2) * file.scales[1]
        np.testing.assert_array_equal(classes != file.nodata, known)
        np.testing.assert_array_equal(file.read(2) != file.nodata, known)
        ranked = np.sort(np.where(known, expected, 0), axis=0)
        clear = known & (ranked[-1] - ranked[-2] > 1e-5)
        assert clear.sum() > 0.9 * known.sum()
        np.testing.assert_array_equal(classes[clear], expected.argmax(0)[clear])
        np.testing.assert_allclose(probability[known], expected.max(0)[known], atol=0.5 / 250 + 1e-5)
        assert len(np.unique(classes[clear])) > 1
        assert [file.colormap(1)[code] for code in range(3)] == [(*rgb, 255) for rgb in COLORS]
        assert json.loads(file.tags(1)["classes"]) == list(CLASSES)
        assert file.descriptions[:2] == ("class", "probability")


COLORS = ((0, 114, 178), (213, 94, 0), (0, 158, 115))  # the first three of Okabe and Ito's dark ones


@pytest.mark.parametrize("stride", [24, 16])
def test_a_pixel_has_the_mean_of_the_windows_that_cover_it(moge, tmp_path, stride, monkeypatch):
    monkeypatch.setattr(scenes, "BLOCK", 32)
    values = patches(75, 70)  # no multiple of block, window or stride
    values[:, 20:60, :16] = 0
    scene = write_scene(tmp_path / "scene.tif", values, nodata=0)
    missing = (values == 0).all(0)
    expected = tile_by_tile(moge, scene, tmp_path, stride, tuple(BANDS), missing)
    assert (np.isnan(expected[0]) & ~missing).any() == (stride == 24)
    predict(moge, scene, tmp_path / "map.tif", "--stride", stride)
    assert_map(tmp_path / "map.tif", scene, expected, missing)
    assert {path.name for path in tmp_path.iterdir()} >= {"map.tif", "map.tif.aux.xml", "map.png"}


@pytest.mark.parametrize("bands", [1, 3])
def test_a_scene_of_rgb_and_eight_bits_is_predicted_as_its_tiles(gmoe, tmp_path, bands):
    values = (patches(60, 70, bands) // 257).astype(np.uint8)
    mask = np.ones((60, 70), bool)
    mask[:5] = False
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        scene = write_scene(tmp_path / "scene.tif", values, crs=None, transform=None)
    expected = tile_by_tile(gmoe, scene, tmp_path, 24, 3, ~mask & False)
    predict(gmoe, scene, tmp_path / "map.tif")
    assert_map(tmp_path / "map.tif", scene, expected, np.zeros((60, 70), bool))
    # Three colors of classes and white
    shown = Image.open(tmp_path / "map.png").convert("RGB").getcolors(1 << 20)
    assert {color for count, color in shown if count > 2000} <= {*COLORS, (255, 255, 255)}


def test_pixels_that_the_scene_s_mask_hides_have_no_class(gmoe, tmp_path):
    valid = np.random.default_rng(0).random((60, 70)) < 0.8
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True):
        scene = write_scene(tmp_path / "scene.tif", halves(60, 70)[:3])
        with rasterio.open(scene, "r+") as file:
            file.write_mask(valid)
    predict(gmoe, scene, tmp_path / "map.tif")
    with rasterio.open(tmp_path / "map.tif") as file:
        np.testing.assert_array_equal(file.read(1) != file.nodata, valid)


def test_a_map_has_the_scene_s_ground_control_points(gmoe, tmp_path):
    points = [
        rasterio.control.GroundControlPoint(*place) for place in ((0, 0, 10, 50), (0, 70, 11, 50), (60, 0, 10, 49))
    ]
    scene = write_scene(tmp_path / "scene.tif", halves(60, 70)[:3], crs="EPSG:4326", transform=None, gcps=points)
    predict(gmoe, scene, tmp_path / "map.tif")
    with rasterio.open(scene) as whole, rasterio.open(tmp_path / "map.tif") as file:
        assert list(map(str, file.gcps[0])) == list(map(str, whole.gcps[0]))
        assert (len(file.gcps[0]), file.gcps[1].to_epsg()) == (3, 4326)


def test_transparent_pixels_have_no_class(gmoe, tmp_path):
    values = (patches(60, 70, 4) // 257).astype(np.uint8)
    values[3] = 255 * (np.random.default_rng(0).random((60, 70)) < 0.8)
    values[3, :WINDOW, : WINDOW - 6] = 0  # three quarters of a window, whose other pixels have no class either
    predict(gmoe, write_scene(tmp_path / "scene.tif", values, photometric="rgb", alpha="yes"), tmp_path / "map.tif")
    with rasterio.open(tmp_path / "map.tif") as file:
        values[3, :WINDOW, :WINDOW] = 0
        np.testing.assert_array_equal(file.read(1) != file.nodata, values[3] > 0)


def test_a_scene_of_bands_in_another_order_than_rgb_is_noticed(gmoe, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(rasters, "_warned", set())
    for number, scene in enumerate((halves(24, 24)[:3], halves(24, 24)[:3] % 7)):
        path = write_scene(tmp_path / f"{number}.tif", scene.astype(np.uint8))
        with rasterio.open(path, "r+") as file:
            if number:
                file.descriptions = ("B02", "B03", "B04")
        predict(gmoe, path, tmp_path / "map.tif", "--force")
        assert ("1.tif': describes its bands as B02, B03, B04, read as RGB" in caplog.text) == bool(number)


def test_the_third_band_is_the_expert_of_the_nearest_window(moge, tmp_path):
    scene = write_scene(tmp_path / "scene.tif", halves(48, 96), transform=rasterio.Affine(2e4, 0, 0, 0, -2e4, 6e6))
    predict(moge, scene, tmp_path / "map.tif", "--experts")
    with rasterio.open(tmp_path / "map.tif") as file:
        experts, colors = file.read(3), file.colormap(1)
        assert file.descriptions[2] == "expert, 254: shared alone"
        assert colors[1] == (*COLORS[1], 255)
        centers = [file.xy(row + 11.5, column + 11.5) for row in (0, 24) for column in (0, 24, 48, 72)]
        places = np.stack(warp.transform(file.crs, "EPSG:4326", *zip(*centers, strict=True)), axis=1)
    found = domains_at(load_trained(moge), torch.from_numpy(places).float()).numpy()
    assert len(set(found)) > 1
    np.testing.assert_array_equal(experts, np.kron(found.reshape(2, 4), np.ones((24, 24), int)))


def test_of_overlapping_windows_each_cell_has_the_mean_and_the_middle_expert():
    lefts = starts(11, 4, 3)
    assert lefts.tolist() == [0, 3, 6, 7]
    first = np.array([[1, 0], [0.5, 0.5], [np.nan, np.nan], [0.1, 0.9]], np.float32)
    rows = [WindowRow(first, np.array([0, 1, 2, -1])), WindowRow(np.full((4, 2), np.nan, np.float32), np.arange(4))]
    cells, widths = averaged(rows, lefts, 4, SIXTEEN_BIT)
    # Pixels 0 to 2, 3, 4 and 5, 6, 7 to 9, 10 are covered by windows 0, 0 and 1, 1, 1 and 2, 2 and 3, 3
    assert widths.tolist() == [3, 1, 2, 1, 3, 1]
    assert cells[0].tolist() == [0, 0, 0, 0, 1, 1]
    assert cells[1].tolist() == [50_000, 37_500, 25_000, 25_000, 45_000, 45_000]
    assert cells[2].tolist() == [0, 0, 1, 1, 2, SIXTEEN_BIT.shared]
    assert (averaged(rows[1:], lefts, 4, SIXTEEN_BIT)[0] == SIXTEEN_BIT.nodata).all()


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """A scene, and others that cannot be predicted."""
    folder = tmp_path_factory.mktemp("mistaken")
    write_scene(folder / "scene.tif", halves())
    write_scene(folder / "bare.tif", halves(), crs=None, transform=None)
    write_scene(folder / "three.tif", halves()[:3])
    with rasterio.open(write_scene(folder / "other.tif", halves()[:4]), "r+") as file:
        file.descriptions = ("red", "green", "blue", "nir")
    (folder / "text.tif").write_text("no TIFF")
    content = (folder / "three.tif").read_bytes()
    (folder / "cut.tif").write_bytes(content[: len(content) // 2])
    tifffile.imwrite(folder / "turned.tif", halves()[0], extratags=[(274, 3, 1, 6, True)])
    return folder


@pytest.mark.parametrize(
    ("scene", "words", "message"),
    [
        ("scene", ["--window", "97"], "window=97"),
        ("scene", ["--stride", "25"], "stride=25"),
        ("scene", ["--output", "{}/map.csv"], "output='.*map.csv'"),
        ("scene", ["--output", "{}/scene.tif", "--force"], "output='.*scene.tif': is the scene itself"),
        ("scene", ["--metadata", "a.csv"], "metadata='a.csv'"),
        ("scene", ["--top-k", "2"], "top_k=2"),
        ("scene", ["--coverage", "0.9"], "coverage=0.9"),
        ("scene", ["{}/scene.tif"], "images=.*: give one scene"),
        ("three", ["--model", "gmoe", "--experts"], "experts=True"),
        ("bare", [], "bare.tif': has no coordinate reference system"),
        ("three", [], "three.tif': has 3 bands, expected 4"),
        ("other", [], "other.tif': lacks the band sentinel2:B02"),
        ("no", [], "no.tif': cannot be decoded .No such file"),
        ("text", [], "text.tif': cannot be decoded .it is no TIFF"),
        ("cut", ["--model", "gmoe"], "cut.tif': is cut short"),
        ("turned", ["--model", "gmoe"], "turned.tif': has the orientation 6"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(moge, gmoe, mistaken, scene, words, message):
    before = {path: path.read_bytes() for path in mistaken.iterdir()}
    words = [gmoe if word == "gmoe" else word.format(mistaken) for word in words]
    with pytest.raises(SystemExit, match=message):
        predict(moge, mistaken / f"{scene}.tif", mistaken / "map.tif", *words)
    assert {path: path.read_bytes() for path in mistaken.iterdir()} == before


def test_a_map_that_does_not_fit_the_disk_is_one_sentence(gmoe, tmp_path):
    scene = write_scene(tmp_path / "scene.tif", halves(480, 480)[:3])
    with pytest.raises(SystemExit, match=r"output=.*map\.tif.*cannot be written") as caught, full_disk(3000):
        predict(gmoe, scene, tmp_path / "map.tif")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["scene.tif"]


def test_windows_beyond_the_memory_are_refused_first(gmoe, tmp_path):
    size = {"height": 60_000, "width": 60_000, "count": 3, "dtype": "uint8", "tiled": True, "sparse_ok": True}
    with rasterio.open(tmp_path / "scene.tif", "w", driver="GTiff", **size):
        pass
    with pytest.raises(SystemExit, match=r"window=50000: needs about .* GB"):
        predict(gmoe, tmp_path / "scene.tif", tmp_path / "map.tif", "--window", 50_000)


def test_a_scene_of_other_values_than_the_training_images_is_noticed(moge, tmp_path, caplog):
    values = halves(48, 48)[:4]
    predict(moge, write_scene(tmp_path / "a.tif", values), tmp_path / "map.tif")
    assert "the means of its bands" not in caplog.text
    predict(moge, write_scene(tmp_path / "b.tif", values.astype(np.float32)), tmp_path / "map.tif", "--force")
    assert "b.tif': the means of its bands are" in caplog.text


def test_windows_unlike_the_training_images_are_counted(gmoe, tmp_path, caplog, monkeypatch):
    class Bright:
        """Excludes images that are brighter than most."""

        temperature, distributions = 1.0, ("pixels",)

        def unlike(self, images, features, is_routed):
            return images.mean((1, 2, 3)) > 0

    monkeypatch.setattr(predictor, "find_calibration", lambda *given: Bright())
    values = np.zeros((3, 48, 48), np.uint8)
    values[:, :24, :24] = 255
    predict(gmoe, write_scene(tmp_path / "scene.tif", values), tmp_path / "map.tif")
    assert "1 of 4 windows (25%) are unlike the training images" in caplog.text


def test_options_of_scenes_need_a_window(gmoe):
    with pytest.raises(SystemExit, match="stride=8: has no effect without --window"):
        run_tool("predict", "--model", gmoe, "scene.tif", "--stride", 8)
