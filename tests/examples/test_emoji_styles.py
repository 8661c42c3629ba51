"""Emoji styles from packages made here, each with one icon of each class."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.load_tool import load_example
from timm_moe_dg.data import read_folder

make_data = load_example("emoji_styles/make_data")
SUBGROUPS = {label: names.split()[-1] for label, names in make_data.CLASSES.items()}
POINTS = {label: f"1f30{number:x}" for number, label in enumerate(SUBGROUPS)}  # those of a person are two
POINTS["person"] = "1f468-200d-2695"


@pytest.fixture
def packages(tmp_path) -> Path:
    """All packages. Another subgroup's emoji and another emoji of openmoji are in no class."""
    folder = tmp_path / "node_modules"
    subgroups = [*SUBGROUPS.values(), "flag"]
    emojis = [
        {"hexcode": f"{points.upper()}-FE0F", "subgroup": number} for number, points in enumerate(POINTS.values())
    ]
    emojis += [{"hexcode": "1F3F3", "subgroup": subgroups.index("flag")}, {"hexcode": "1F1E6"}]
    names = [name for subgroup in make_data.CLASSES.values() for name in subgroup.split() if name not in subgroups]
    write(folder / "emojibase-data/meta/groups.json", {"subgroups": dict(enumerate([*subgroups, *names]))})
    write(folder / "emojibase-data/en/data.json", emojis)
    for specifier in make_data.PACKAGES.values():
        icons = {label: {"body": '<path fill="red" d="M0 0h9v18H0z"/>'} for label in (*POINTS, "flag")}
        icons["face"]["height"] = 9
        characters = {points: label for label, points in POINTS.items()} | {"1f3f3": "flag"}
        if "openmoji" in specifier:
            characters["1f3ff"] = "rainbow-of-another-set"
            del characters[POINTS["weather"]]
            characters[f"{POINTS['weather']}-fe0f"] = "weather"
        package = folder / specifier.rpartition("@")[0]
        write(package / "icons.json", {"width": 18, "height": 18, "icons": icons, "aliases": {}})
        write(package / "chars.json", characters)
    return folder


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def drawn(monkeypatch):
    """Drawings in place of resvg's: white squares. Holds the SVGs."""
    svgs = []
    monkeypatch.setattr(make_data, "draw", lambda svg: svgs.append(svg) or Image.new("RGB", (4, 4), "white"))
    return svgs


def make(packages, folder):
    make_data.main([str(folder), "--packages", str(packages)])


def test_a_thing_has_one_name_and_class_in_all_styles(packages, drawn, tmp_path, capsys):
    make(packages, tmp_path / "data" / "styles")
    domains = read_folder(tmp_path / "data" / "styles")
    assert [domain.name for domain in domains] == list(make_data.PACKAGES)
    for domain in domains:
        assert domain.classes == tuple(make_data.CLASSES)
        names = {path.parent.name: path.name for path in map(Path, domain.paths)}
        assert names == {label: f"{points}.png" for label, points in POINTS.items()}
    assert [*(tmp_path / "data").iterdir()] == [tmp_path / "data" / "styles"]
    assert capsys.readouterr().out.splitlines()[0] == "fluent_flat: 12 images"
    assert {re.search(r'width=.*viewBox=".*?"', svg).group() for svg in drawn} == {
        'width="48" height="48" viewBox="0 0 18 18"',
        'width="48" height="48" viewBox="0 0 18 9"',
    }


def test_a_drawing_is_on_white_and_keeps_its_proportions():
    pytest.importorskip("resvg_py")
    icon = {"body": '<path fill="currentColor" d="M0 0h9v9H0z"/>', "height": 9}
    pixels = np.asarray(make_data.draw(make_data.svg_of({"width": 18, "height": 18}, icon)))
    expected = np.full((48, 48, 3), 255)
    expected[12:36, :24] = 0  # the left half of a box twice as wide as high, in the middle
    assert np.array_equal(pixels, expected)


def test_a_package_that_is_missing_is_named_and_nothing_is_left(packages, drawn, tmp_path):
    (packages / "@iconify-json/noto/icons.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=r"packages='.*cannot be read .*npm install .*@iconify-json/noto@1\.2\.9"):
        make(packages, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
    assert not drawn
