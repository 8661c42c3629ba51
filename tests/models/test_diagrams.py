"""The diagrams of the models in the documentation are those of the registered models."""

import re

import pytest

from tests.draw_models import FOLDER, MODELS, SPARSE, draw


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_diagram_on_the_page_is_drawn_from_the_model(name: str) -> None:
    svg = (FOLDER / f"model_{name}.svg").read_text(encoding="utf-8")
    assert svg == draw(name), "run python -m tests.draw_models"
    colored = [int(block) for block in re.findall(rf'width="32"[^>]*fill="{SPARSE}".*\n<text[^>]*>(\d+)<', svg)]
    assert colored == ([8, 10] if name in ("gmoe", "moge") else [0, 2, 4, 6, 8, 10])
    assert f"top {3 if name == 'moge' else 2} of 6" in svg
