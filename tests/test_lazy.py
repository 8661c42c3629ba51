"""Names of a room that are imported when they are first used."""

import importlib
import sys

import pytest

ROOM = """
from typing import TYPE_CHECKING
from timm_moe_dg.lazy import exports
from .light import near
if TYPE_CHECKING:
    from . import whole
    from .heavy import (
        far,
        farther,
    )
    from elsewhere import stranger
__all__ = ["far", "farther", "near", "whole"]
__getattr__, __dir__ = exports(__name__, __file__)
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    folder = tmp_path / "toy_room"
    folder.mkdir()
    (folder / "__init__.py").write_text(ROOM)
    (folder / "light.py").write_text("near = 1")
    (folder / "heavy.py").write_text("far, farther = object(), object()")
    (folder / "whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy_room")
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_room"]:
        del sys.modules[name]


def test_a_module_is_imported_with_the_first_of_its_names(room):
    assert room.near == 1
    assert "toy_room.heavy" not in sys.modules
    assert room.far is sys.modules["toy_room.heavy"].far
    assert vars(room)["far"] is room.far  # and is looked up no second time
    assert room.whole is sys.modules["toy_room.whole"]


def test_from_import_and_star_find_them(room):
    found = {}
    exec("from toy_room import farther\nfrom toy_room import *", found)
    assert found["farther"] is sys.modules["toy_room.heavy"].farther
    assert {"far", "near", "whole"} <= found.keys()


def test_all_are_listed_and_others_are_refused(room):
    assert {"far", "farther", "near", "whole"} <= set(dir(room))
    for name in ("stranger", "nothing"):
        with pytest.raises(AttributeError, match=f"'toy_room' has no attribute '{name}'"):
            getattr(room, name)
