"""Tables as text, Markdown and LaTeX."""

import re
from dataclasses import replace

import pytest

from tests.results.test_tables import run_of
from timm_moe_dg.results.rendering import render
from timm_moe_dg.results.tables import make_tables


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        ("text", ["algorithm model domain 0", "\n- - - - - -\n", "ERM vit 50.0 missing 50.0 missing"]),
        ("markdown", ["| ERM | vit | 50.0 | missing | 50.0 | missing |", "|-|-|-|-|-|-|"]),
        ("latex", [r"ERM & vit & 50.0 & missing & 50.0 & missing \\", r"\begin{tabular}{llcccc}", r"50\% \& more\_so"]),
    ],
)
def test_formats(format_, expected):
    (table,) = make_tables([run_of((0,)), run_of((2,))], ["oracle"])
    text = render(replace(table, title="50% & more_so"), format_)
    for line in expected:
        assert line in re.sub("-+", "-", re.sub(" +", " ", text))


def test_text_columns_are_aligned_and_numbers_are_printed_as_they_are():
    runs = [run_of((0,), (accuracy, 0.5, 0.5), model=model) for model, accuracy in (("a", 1.0), ("model 1e5", 0.095))]
    (table,) = make_tables(runs, ["oracle"])
    header, rule, first, second = render(table, "text").splitlines()[2:6]
    start = header.index("domain 0")
    assert rule[start - 2 : start + 2] == "  --"
    assert (first[start:].split()[0], second[start:].split()[0]) == ("100.0", "9.5")


def test_names_are_text_in_every_format():
    name = "a|b <img src=x> \\input{x} \x1b[31m\nc"
    (table,) = make_tables([run_of((0,), model=name)], ["oracle"])
    text, markdown, latex = (render(table, format_) for format_ in ("text", "markdown", "latex"))
    assert "a|b <img src=x> \\input{x} [31m c" in text
    assert "a&#124;b &#60;img src=x&#62;" in markdown
    assert "<" not in markdown
    assert r"\textbackslash{}input\{x\}" in latex
    assert r"\input" not in "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert "\x1b" not in text + markdown + latex
