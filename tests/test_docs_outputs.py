"""The ```text blocks of pages are what their commands print, up to numbers. Notebooks run with fewer steps."""

import itertools
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.files import read_few
from tests.load_tool import load_tool
from tests.write_outputs import BLOCK, alike_words, outputs_of, page_environment, refreshed, script_of
from timm_moe_dg.data import get_benchmark

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
WITH_OUTPUT = [page for page in PAGES if script_of(page.read_text())[1]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_output_is_typed(page):
    text = page.read_text()
    assert len(re.findall(r"^```text$", text, re.MULTILINE)) == len(script_of(text)[1]), "a block without a command"
    assert len(re.findall("^```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), "a fence that is not seen"


@pytest.fixture(scope="module")
def environment():
    with page_environment() as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_OUTPUT, ids=lambda page: page.name)
def test_the_commands_of_a_page_print_its_blocks(page, environment):
    text = page.read_text()
    script, shown = script_of(text)
    outputs = outputs_of(script, environment)
    different = [
        f"page:\n{block[3]}\nprinted:\n{output}"
        for block, output in zip(shown, outputs[1::2], strict=True)
        if refreshed(block[3], output, alike_words(text)) is None
    ]
    assert not different, "\n".join([*different, "unseen:", *outputs[::2]])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_pictures_and_is_small(path):
    assert len(NOTEBOOKS) == 3
    assert path.stat().st_size < 1e6
    assert path.read_text().count('"image/png": "') >= 2


def draw_things(folder):
    """Stands in for the drawn icons: eight things of each class, those that the notebook names among them."""
    named = {"mammal": "1f404", "vehicle": "1f68c", "plant_and_fruit": "1f34e"}
    named |= {"tool": "1f528", "face": "1f600", "building": "1f3e0"}
    benchmark, random = get_benchmark("emoji_styles"), np.random.default_rng(0)
    for style, label in itertools.product(benchmark.domains, benchmark.classes):
        (folder / style / label).mkdir(parents=True)
        for thing in [f"{label}{number}" for number in range(7)] + [named.get(label, label)]:
            pixels = random.integers(256, size=(48, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / style / label / f"{thing}.png")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    cells = json.loads(path.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    # More steps than a warm-up, a quarter of the patches and half the width
    changes = {"STEPS = ": lambda _: "8", '"patch_size": ': lambda size: str(2 * int(size[0]))}
    changes['"embed_dim": '] = lambda size: str(int(size[0]) // 2)
    for name, shorter in changes.items():
        code, changed = re.subn(rf"(?<={name})\d+", shorter, code)
        assert changed == 1
    code = code.replace("\\\n", "").replace("visualize invariance", "visualize invariance --permutations 99")
    code = re.sub("^!(.*)$", r'shell(rf"""\1""")', code, flags=re.MULTILINE)  # as IPython, values for {NAME} too

    def shell(command):
        program, tool, *words = shlex.split(command)
        assert program == "timm-moe-dg"
        load_tool(tool).main(words)

    if path.stem == "emoji_styles":
        draw_things(tmp_path / "data" / "emoji_styles")
    if path.stem == "earth":
        read_few(monkeypatch, 8)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: None)
    exec(compile(code, path.name, "exec"), {"shell": shell})
