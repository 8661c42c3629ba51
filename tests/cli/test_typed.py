"""Types of values that were read from a file."""

from collections.abc import Mapping, Sequence

import pytest

from timm_moe_dg.cli.typed import fits, type_name


@pytest.mark.parametrize(
    ("annotation", "good", "bad", "words"),
    [
        (int, [5], [5.0, True, "5", None, [5]], "whole number"),
        (float, [5, 0.5], [True, "5"], "number"),
        (bool, [True], [1, "yes"], "true or false"),
        (str, ["a"], [1, ["a"]], "text"),
        (str | None, ["a", None], [1], "text"),
        (Sequence[int], [[], [1], (1, 2)], [1, "12", [1, "2"]], "list (whole number)"),
        (Sequence[float] | None, [[0.5], None], [["a"]], "list (number)"),
        (Mapping[str, float], [{}, {"lr": 1}], [[], {"lr": "a"}], "table"),
        (Mapping[str, object], [{"a": [1]}], ["a"], "table"),
    ],
)
def test_values_of_a_type(annotation, good, bad, words):
    assert [value for value in good if not fits(value, annotation)] == []
    assert [value for value in bad if fits(value, annotation)] == []
    assert type_name(annotation) == words
