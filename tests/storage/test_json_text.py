"""JSON without NaN, which strict readers refuse."""

import json

from timm_moe_dg.storage.json_text import json_text


def test_nan_is_null_at_any_depth():
    value = {"a": float("nan"), "b": [1.5, (float("nan"), 2)], "c": {"d": [[float("nan")]]}, "e": "nan", "f": True}
    read = json.loads(json_text(value), parse_constant=lambda name: 1 / 0)
    assert read == {"a": None, "b": [1.5, [None, 2]], "c": {"d": [[None]]}, "e": "nan", "f": True}


def test_the_text_ends_its_line_and_is_indented_on_demand():
    assert json_text({"a": [1]}) == '{"a": [1]}\n'
    assert json_text({"a": 1}, indent=2) == '{\n  "a": 1\n}\n'
