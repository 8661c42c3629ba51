"""docs/results/papers.md: each row of the papers' tables has a recipe or a reason, and each recipe is on the page."""

import re
from collections import Counter
from pathlib import Path

from timm_moe_dg.data import BENCHMARKS
from timm_moe_dg.results.paper_figures import FIGURES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results" / "papers.md").read_text()
RECIPES = {path.stem for path in (ROOT / "tools" / "recipes").glob("*.yaml")}
ROWS = re.findall(r"^\| (GMoE|SF-MoE|MoGE) \| ([^|]+) \| ([^|]+) \| (.+) \|$", PAGE, re.MULTILINE)
# Counted in the papers; Table 12 has its four networks once for each of six sources
IN_THE_PAPERS = {
    ("GMoE", "Table 1"): 14,
    ("GMoE", "Table 2"): 5,
    ("GMoE", "Table 3"): 4,
    ("GMoE", "Table 9"): 14,
    ("GMoE", "Table 10"): 8,
    ("GMoE", "Table 11"): 8,
    ("GMoE", "Table 12"): 4,
    ("GMoE", "Table 13"): 5,
    ("GMoE", "Table 15"): 4,
    ("GMoE", "Table 17"): 5,
    ("SF-MoE", "Table 1"): 13,
    ("SF-MoE", "Table 2"): 4,
    ("SF-MoE", "Table 3"): 5,
    ("MoGE", "Table 1a (FMoW)"): 13,
    ("MoGE", "Table 1b (FMoW-LAO)"): 4,
    ("MoGE", "Table 1c (iWildCam)"): 6,
}


def recipe_of(cell: str) -> str | None:
    named = re.fullmatch(r"`(\w+)`", cell)
    return named[1] if named else None


def test_every_row_of_the_papers_is_listed():
    listed = Counter((paper, table) for paper, table, _, _ in ROWS)
    assert {key: listed[key] for key in IN_THE_PAPERS} == IN_THE_PAPERS
    assert len({row[:3] for row in ROWS}) == len(ROWS)


def test_every_table_with_stored_figures_is_listed():
    listed = {(paper, re.match(r"Table \d+", table)[0]) for paper, table in IN_THE_PAPERS}
    assert {tuple(figure.source.split(", ")) for figure in FIGURES} <= listed


def test_every_named_recipe_exists_and_other_rows_say_why_there_is_none():
    assert len(ROWS) > 120
    for *_, cell in ROWS:
        recipe = recipe_of(cell)
        assert recipe in RECIPES or (recipe is None and re.match(r"none: .{20,}", cell))


def test_every_recipe_is_named():
    assert len(RECIPES) > 40
    assert set(re.findall(r"`(\w+)`", PAGE)) >= RECIPES


def test_data_sets_with_several_forms_exist():
    forms = PAGE.split("## Data sets with several forms")[1].split("\n## ")[0]
    names = {
        name for line in re.findall(r"^\| (`.+?`) \|", forms, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert len(names) == 14
    assert names <= set(BENCHMARKS)
