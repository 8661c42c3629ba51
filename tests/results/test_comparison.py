"""Tables in every format, two rows side by side, relative improvement, and tests against counted patterns."""

import re
from dataclasses import replace
from itertools import product
from math import isnan, nan

import numpy as np
import pytest

from tests.invented import write_sweep
from tests.results.cells import cells_of, run_of, table_of
from tests.results.test_runs import AFRICA, ALL, ASIA, regional
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.results.comparison import (
    cell_text,
    cell_texts,
    compare,
    holm,
    render,
    sign_flip_p,
    with_improvements,
)
from timm_moe_dg.results.papers import FIGURES
from timm_moe_dg.results.runs import RowKey, find_runs
from timm_moe_dg.results.tables import make_tables

GMOE = "gmoe_small_patch16"
ROW, A, B = RowKey("ERM", "vit"), RowKey("ERM", "a"), RowKey("ERM", "b")


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


# Two rows side by side


def rows_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_differences_are_taken_within_seeds():
    cells = [{0: 0.4, 1: 0.6, 2: 0.8}, {0: 0.6, 1: 0.8, 2: 1.0}, {2: 0.95}, {}]
    rows = {A: [{0: 0.5, 1: 0.7, 2: 0.9}] * 4, B: cells}
    table = table_of(rows, list("wxyz"), expected=3, runs={row: [run_of([0])] for row in rows})
    text = compare([table], "a", "b", "markdown")
    differences = [row[3] for row in rows_of(text)[2:]]
    assert differences == ["+10.0 ± 0.0", "-10.0 ± 0.0", "-5.0 (1 of 3 seeds)", "missing"]
    assert text.endswith("w: n = 3, p = 0.25; x: n = 3, p = 0.25; y: n = 1, p = 1; z: n = 0, p = -")


def test_rows_can_be_named_by_folders_and_other_names_are_refused(tmp_path):
    for model in ("a", "b"):
        write_sweep(tmp_path / model, model=model, hparams_seeds=(0,))
    tables = make_tables(find_runs([tmp_path])[0], ["oracle"])
    by_folder = compare(tables, str(tmp_path / "a"), str(tmp_path / "b"), "text")
    assert by_folder == compare(tables, "a", "b", "text")
    with pytest.raises(ArgumentError, match=r"^compare=.*ERM, a; ERM, b"):
        compare(tables, "a", "resnet50", "text")


def test_rows_with_other_data_are_not_compared():
    made = [("a", "ab12"), ("b", "ab12"), ("b", "cd34"), ("c", None)]
    runs = [run_of((domain,), model=model, data=data) for model, data in made for domain in range(3)]
    (table,) = make_tables(runs, ["oracle"])
    assert "cd34" not in compare([table], "a", "b", "text")
    with pytest.raises(ArgumentError, match=r"^compare=\['a', 'data=cd34'\]"):
        compare([table], "a", "data=cd34", "text")
    improved = cells_of(with_improvements(table, "ERM, a, data=ab12"))
    assert [bool(cells[-1].values) for cells in improved.values()] == [True, True, False, True]
    columns = [run_of((0,), model=model, data=model, metadata_columns=[model]) for model in ("a", "b")]
    assert compare(make_tables(columns, ["oracle"]), "a", "b", "text")  # fingerprints of other columns say nothing


# Relative improvement

DOMAINS = ["painting", "clipart", "infograph", "quickdraw", "real", "sketch"]


@pytest.mark.parametrize(("model", "printed"), [("resnet101.tv_in1k", (1.1, 12.4)), (GMOE, (10.5, 42.3))])
def test_the_papers_improvements_follow_from_its_accuracies(model, printed):
    """GMoE, Table 3, from the accuracies of models trained on Paint in Table 12."""
    rows = {}
    for name in ("resnet50.tv_in1k", model):
        figures = {f.column: f.value / 100 for f in FIGURES if f.trained_on == "painting" and f.model == name}
        rows[RowKey("ERM", name)] = [{0: figures[domain]} for domain in DOMAINS] + [{0: 0.0}]
    columns = ["painting (IID)", *DOMAINS[1:], "average OOD"]
    table = table_of(rows, columns, rule="single_source", expected=1, runs={row: [] for row in rows})
    improved = with_improvements(table, "resnet50.tv_in1k")
    assert improved.columns[-2:] == ["IID improvement", "OOD improvement"]
    reference, cells = cells_of(improved).values()
    assert [100 * cell.mean for cell in cells[-2:]] == pytest.approx(printed, abs=0.06)
    assert [cell.mean for cell in reference[-2:]] == [0.0, 0.0]


def test_improvement_is_taken_within_a_seed_and_over_the_seeds_that_both_have():
    values = {"a": {0: (0.5, 0.25, 0.5), 1: (0.25, 0.5, 0.5)}, "b": {0: (0.75, 0.5, 0.5), 2: (0.5, 0.5, 0.5)}}
    runs = [
        run_of([domain], (value,) * 3, model=model, trial_seed=seed)
        for model, seeds in values.items()
        for seed, row in seeds.items()
        for domain, value in enumerate(row)
    ]
    (table,) = make_tables(runs, ["oracle"])
    improved = with_improvements(table, "a")
    assert improved.columns[-2:] == ["average", "OOD improvement"]
    assert cells_of(improved)[B][-1].values == {0: pytest.approx((0.5 + 1.0 + 0.0) / 3)}
    for name in ("c", "ERM"):  # no row, and two rows
        with pytest.raises(ArgumentError, match=rf"^relative_to='{name}': .*ERM, a; ERM, b"):
            with_improvements(table, name)


def test_improvement_over_groups_if_they_are_shown():
    runs = [regional(ALL, (0.5, 0.75, 0.5)), regional(ALL, (0.5, 0.5, 0.25), model="other")]
    (table,) = make_tables(runs, by_group=True)
    assert cells_of(with_improvements(table, "other"))[ROW][-1].mean == pytest.approx((0.5 + 1.0) / 2)
    (table,) = make_tables(runs)
    whole = with_improvements(table, "other")
    assert whole.columns[-1] == "IID improvement"
    assert cells_of(whole)[ROW][-1].mean == pytest.approx((0.75 * 30 + 5) / (15 + 2.5) - 1)
    per_region = [regional(AFRICA, (0.5, 0.5, 0.0)), regional(ASIA, (0.5, 0.0, 0.25))]
    with pytest.raises(ArgumentError, match=r"^relative_to='other': "):
        with_improvements(make_tables([*runs, *per_region])[1], "other")


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
