"""Tables in every format, and tests against counted patterns."""

import re
from dataclasses import replace
from itertools import product
from math import isnan, nan

import numpy as np
import pytest

from tests.results.cells import run_of, table_of
from timm_moe_dg.results.comparison import (
    cell_text,
    cell_texts,
    holm,
    render,
    sign_flip_p,
)
from timm_moe_dg.results.runs import RowKey
from timm_moe_dg.results.tables import make_tables

ROW = RowKey("ERM", "vit")


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        (
            "text",
            [
                "algorithm model domain 0",
                "\n- - - - -\n",
                "domain 0 domain 2 average of 2 of 3 domains",
                "ERM vit 50.0 50.0 50.0",
            ],
        ),
        ("markdown", ["| ERM | vit | 50.0 | 50.0 | 50.0 |", "|-|-|-|-|-|"]),
        ("latex", [r"ERM & vit & 50.0 & 50.0 & 50.0 \\", r"\begin{tabular}{llccc}", r"50\% \& more\_so"]),
    ],
)
def test_formats(format_, expected):
    (table,) = make_tables([run_of((0,)), run_of((2,))], ["oracle"])
    text = render(replace(table, title="50% & more_so", missing=["seed 1"]), format_)
    for line in [*expected, "Missing runs:"]:
        assert line in re.sub("-+", "-", re.sub(" +", " ", text))


def test_cells():
    cells = [{0: 0.5, 1: 0.6, 2: 0.85}, {2: 0.5}, {}, {0: nan, 1: 0.5, 2: 0.5}]
    table = table_of({ROW: cells}, list("abcd"), expected=3)
    assert cell_texts(table).loc[ROW].tolist() == ["65.0 ± 8.5", "50.0 (1 of 3 seeds)", "missing", "-"]
    assert cell_text(0.5, nan, 1, 1) == "50.0"


def test_names_are_text_in_every_format():
    name = "a|b <img src=x> \\input{x} \x1b[31m\nc"
    runs = [run_of((domain,), model=name, domains=["a^b", "{0}", "~c"]) for domain in range(3)]
    (table,) = make_tables(runs, ["oracle"])
    text, markdown, latex = (render(table, format_) for format_ in ("text", "markdown", "latex"))
    assert "a|b <img src=x> \\input{x} \\x1b[31m\\nc" in text
    assert "a&#124;b &#60;img src=x&#62;" in markdown
    assert "<" not in markdown
    assert r"\textbackslash{}input\{x\}" in latex
    assert r"\input" not in "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert r"algorithm & model & a\^{}b & \{0\} & \textasciitilde{}c & average \\" in latex
    assert "\x1b" not in text + markdown + latex


# Paired tests


def counted_p(values):
    reached = [abs(np.dot(signs, values)) >= abs(sum(values)) - 1e-12 for signs in product([1, -1], repeat=len(values))]
    return np.mean(reached)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 12])
def test_p_counts_all_sign_patterns(number):
    values = np.random.default_rng(number).normal(0.5, 1, number)
    assert sign_flip_p(values) == counted_p(values)
    # Accuracies over few images make patterns of equal means, which floating-point errors would tell apart
    first, second = np.random.default_rng(number).integers(200, 230, (2, number)) / 357
    assert sign_flip_p(first - second) == counted_p(first - second)


def test_many_pairs_are_sampled_and_come_near_the_exact_value():
    values = np.random.default_rng(1).normal(0.2, 1, 17)
    sums = np.zeros(1)
    for value in values:
        sums = np.concatenate([sums + value, sums - value])
    exact = (abs(sums) >= abs(values.sum())).mean()
    assert 0.01 < exact < 0.9
    assert sign_flip_p(values) == pytest.approx(exact, abs=0.006)  # four standard deviations of 99,999 samples
    assert sign_flip_p(values) == sign_flip_p(values)


def test_extremes():
    assert [sign_flip_p(values) for values in ([0.0, 0.0], [0.1, 0.2, -0.3], [0.3])] == [1.0] * 3
    assert sign_flip_p([-1, -2, 3.5, 1]) == sign_flip_p([1, 2, -3.5, -1])
    assert isnan(sign_flip_p([]))
    assert isnan(sign_flip_p([0.1, nan]))
    # The observed pattern counts, so that p is never 0
    assert [sign_flip_p([0.1] * number) for number in (2, 10, 16)] == [0.5, 2 / 2**10, 2 / 2**16]
    assert [sign_flip_p([0.1] * number) >= 1 / 100_000 for number in (17, 40)] == [True] * 2


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []
