"""examples/fonts: three fonts that the test makes, and the fonts of the list."""

import csv
from collections import Counter
from pathlib import Path
from string import ascii_lowercase

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from tests.load_tool import load_example

FONTS = {"serif": "first", "monospace": "second", "display": "third"}


def write_font(file: Path) -> None:
    """Writes a font whose letters are rectangles, "a" the narrowest."""
    pytest.importorskip("brotli")
    names = [".notdef", *ascii_lowercase]
    builder = FontBuilder(1000)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): letter for letter in ascii_lowercase})
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


def test_letters_are_as_large_as_the_picture_allows(tmp_path, monkeypatch):
    script = load_example("fonts/make_data")
    rows = [f"{family},@fontsource/{name}@1.0.0" for family, name in FONTS.items()]
    (tmp_path / "fonts.csv").write_text("\n".join(["family,package", *rows]))
    monkeypatch.setattr(script, "LIST", tmp_path / "fonts.csv")

    for name in FONTS.values():
        write_font(tmp_path / "node_modules" / "@fontsource" / name / "files" / f"{name}-latin-400-normal.woff2")
    script.main([str(tmp_path / "fonts"), "--packages", str(tmp_path)])
    assert len(list((tmp_path / "fonts").glob("*/*/*.png"))) == 3 * 26
    for letter, family in zip("amz", FONTS, strict=True):
        ink = np.argwhere(np.asarray(Image.open(tmp_path / "fonts" / family / letter / f"{FONTS[family]}.png")) < 128)
        height, width = np.ptp(ink, axis=0) + 1
        assert height == pytest.approx(40, abs=1)
        assert width == pytest.approx(40 * (100 + 20 * ascii_lowercase.index(letter)) / 600, abs=1.5)


def test_the_list_has_forty_fonts_of_each_family():
    with load_example("fonts/make_data").LIST.open(newline="") as file:
        rows = list(csv.DictReader(file))
    families = ("display", "handwriting", "monospace", "sans_serif", "serif")
    assert Counter(row["family"] for row in rows) == dict.fromkeys(families, 40)
    assert len({row["package"] for row in rows}) == 200
