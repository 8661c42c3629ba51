"""Pictures in the page, and the lines that stand in their place."""

import base64
import io
import sys

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.errors import DataError
from timm_moe_dg.report.pictures import THUMBNAIL, Missing, attempt, inlined, thumbnail


def decoded(picture):
    kind, data = picture.uri.split(";base64,")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == f"data:image/{image.format.lower()}"
    return image


def test_what_cannot_be_made_leaves_its_reason():
    def fail():
        raise DataError("data_dir='x': no such folder")

    assert attempt(fail) == Missing("data_dir='x': no such folder")
    assert attempt(lambda: 7) == 7


def test_a_mistake_in_the_code_is_not_hidden():
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 / 0)


def test_a_drawn_picture_keeps_its_size_and_nearly_its_colors():
    pytest.importorskip("matplotlib")
    pixels = np.zeros((30, 60, 3), dtype=np.uint8)
    pixels[:, 30:] = (200, 30, 90)
    picture = inlined(lambda path: Image.fromarray(pixels).save(path), "halves")
    assert (picture.alt, picture.width) == ("halves", 40)
    assert abs(np.asarray(decoded(picture).convert("RGB")).astype(int) - pixels).max() < 5


def test_nothing_is_drawn_without_matplotlib_or_without_anything_to_draw(monkeypatch):
    pytest.importorskip("matplotlib")
    assert inlined(lambda path: None, "nothing") == Missing("There is nothing to draw.")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    called = []
    assert "timm_moe_dg[plots]" in inlined(called.append, "nothing").reason
    assert called == []


@pytest.mark.parametrize(("size", "kind"), [((8, 8), "PNG"), ((64, 20), "PNG"), ((1200, 900), "JPEG")])
def test_thumbnails_are_small(size, kind):
    picture = thumbnail(Image.new("RGB", size, "red"), "red")
    assert decoded(picture).format == kind
    assert max(decoded(picture).size) <= 2 * THUMBNAIL
    assert picture.width == THUMBNAIL
