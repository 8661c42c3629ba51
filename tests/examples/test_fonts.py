"""examples/fonts: three fonts that the test makes, and the fonts of the list."""

import csv
import importlib.util
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

FOLDER = Path(__file__).parents[2] / "examples" / "fonts"
FONTS = {"serif": "first", "monospace": "second", "display": "third"}


def write_font(file: Path, letters: str) -> None:
    """Writes a font whose letters are rectangles, "a" the narrowest."""
    pytest.importorskip("brotli")
    names = [".notdef", *letters]
    builder = FontBuilder(1000)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): letter for letter in letters})
    glyphs = {}
    for name in names:
        pen = TTGlyphPen(None)
        width = 100 + 20 * ascii_lowercase.find(name)
        pen.moveTo((0, 0))
        for corner in ((0, 600), (width, 600), (width, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(names, (700, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({})
    builder.setupOS2()
    builder.setupPost()
    builder.font.flavor = "woff2"
    file.parent.mkdir(parents=True)
    builder.save(file)


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Runs the script on three fonts, of which the third has the given letters."""
    spec = importlib.util.spec_from_file_location("make_fonts", FOLDER / "make_data.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = [f"{family},@fontsource/{name}@1.0.0" for family, name in FONTS.items()]
    (tmp_path / "fonts.csv").write_text("\n".join(["family,package", *rows]))
    monkeypatch.setattr(script, "LIST", tmp_path / "fonts.csv")

    def run(letters=ascii_lowercase):
        for name in FONTS.values():
            file = tmp_path / "node_modules" / "@fontsource" / name / "files" / f"{name}-latin-400-normal.woff2"
            write_font(file, letters if name == "third" else ascii_lowercase)
        script.main([str(tmp_path / "fonts"), "--packages", str(tmp_path)])

    return run


def test_letters_are_as_large_as_the_picture_allows(draw, tmp_path):
    draw()
    assert len(list((tmp_path / "fonts").glob("*/*/*.png"))) == 3 * 26
    for letter, family in zip("amz", FONTS, strict=True):
        ink = np.argwhere(np.asarray(Image.open(tmp_path / "fonts" / family / letter / f"{FONTS[family]}.png")) < 128)
        height, width = np.ptp(ink, axis=0) + 1
        assert height == pytest.approx(40, abs=1)
        assert width == pytest.approx(40 * (100 + 20 * ascii_lowercase.index(letter)) / 600, abs=1.5)


def test_a_font_without_a_letter_is_named_and_nothing_is_left(draw, tmp_path):
    with pytest.raises(SystemExit, match=r"third-latin-400-normal\.woff2 has no letters xz"):
        draw(ascii_lowercase.replace("x", "").replace("z", ""))
    assert not (tmp_path / "fonts").exists()


def test_the_list_has_forty_fonts_of_each_family():
    with (FOLDER / "fonts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    families = ("display", "handwriting", "monospace", "sans_serif", "serif")
    assert Counter(row["family"] for row in rows) == dict.fromkeys(families, 40)
    assert len({row["package"] for row in rows}) == 200
