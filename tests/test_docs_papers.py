"""docs/results/papers.md: each row of the papers' tables has a recipe or a reason, and each recipe is on the page."""

import re
from collections import Counter
from pathlib import Path

from timm_moe_dg.data import BENCHMARKS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "results" / "papers.md").read_text()
RECIPES = {path.stem for path in (ROOT / "tools" / "recipes").glob("*.yaml")}
# A line names recipes, or the reason why there are none, and the papers' rows that they give
LINES = re.findall(r"^\| (`\w+`.*?|none: .+?) \| ((?:GMoE|SF-MoE|MoGE) .+) \|$", PAGE, re.MULTILINE)
ENTRY = re.compile(r"(GMoE|SF-MoE|MoGE) ((?:Figure )?\w+): (.+)")
# Counted in the papers; Table 12 has its four networks once for each of six sources
IN_THE_PAPERS = {
    ("GMoE", "1"): 14,
    ("GMoE", "2"): 5,
    ("GMoE", "3"): 4,
    ("GMoE", "9"): 14,
    ("GMoE", "10"): 8,
    ("GMoE", "11"): 8,
    ("GMoE", "12"): 4,
    ("GMoE", "13"): 5,
    ("GMoE", "15"): 4,
    ("GMoE", "17"): 5,
    ("SF-MoE", "1"): 13,
    ("SF-MoE", "2"): 4,
    ("SF-MoE", "3"): 5,
    ("MoGE", "1a"): 13,
    ("MoGE", "1b"): 4,
    ("MoGE", "1c"): 6,
}


def listed() -> list[tuple[str, str, str]]:
    """Paper, table and row."""
    entries = [ENTRY.fullmatch(entry).groups() for _, cell in LINES for entry in cell.split("<br>")]
    return [(paper, table, row) for paper, table, rows in entries for row in rows.split(", ")]


def test_every_row_of_the_papers_is_listed():
    counts = Counter((paper, table) for paper, table, _ in listed())
    assert {key: counts[key] for key in IN_THE_PAPERS} == IN_THE_PAPERS
    assert len(set(listed())) == len(listed())


def test_every_recipe_is_named_and_exists_and_other_rows_say_why_there_is_none():
    assert len(RECIPES) > 40
    assert set(re.findall(r"`(\w+)`", PAGE)) >= RECIPES
    for cell, _ in LINES:
        assert set(re.findall(r"`(\w+)`", cell)) <= RECIPES
        assert cell.startswith("`") or re.match(r"none: .{20,}", cell)


def test_data_sets_with_several_forms_exist():
    forms = PAGE.split("## Data sets with several forms")[1].split("\n## ")[0]
    names = {
        name for line in re.findall(r"^\| (`.+?`) \|", forms, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert len(names) == 14
    assert names <= set(BENCHMARKS)
