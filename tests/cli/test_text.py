"""Names with markup, escape sequences or reversed text are escaped on terminals, in Markdown, CSV and cards."""

import html
from html.parser import HTMLParser

import pytest
from huggingface_hub import ModelCard
from markdown import markdown as rendered

from tests.hub.published import card_of_run, fine_tuned
from tests.hub_server import card_mistakes
from timm_moe_dg.cli.text import code, csv_cell, csv_path, markdown, one_line

HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "![pixel](http://evil.example/x.png)",
    "[click](javascript:alert(1))",
    "a|b | c",
    "*bold* _it_ `code` ~~gone~~ $x^2$ www.evil.example",
    "&lt;b&gt; &amp; --> # title",
    "{{ 7 * 7 }} {% raw %}",
)


class Elements(HTMLParser):
    """Collects tags, and the text of each cell of tables."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)
        self.cells = [cell.strip() for cell in self.cells]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("write", [markdown, code])
def test_a_renderer_shows_the_name_without_markup(name, write):
    page = f"| name | other |\n|---|---|\n| {write(name)} | x |\n"
    elements = Elements(rendered(page, extensions=["tables"]))
    assert elements.cells == [name, "x"]
    assert set(elements.tags) <= {"table", "thead", "tbody", "tr", "th", "td", "code"}


def test_ordinary_names_are_kept_and_every_name_has_one_line():
    assert markdown("rot_15, Real World 100% (x) a-b.c") == "rot_15, Real World 100% (x) a-b.c"
    assert code("dense_a.safetensors") == "`dense_a.safetensors`"
    assert one_line("a\r\nb\u2028c\x00d") == r"a\r\nb\u2028c\x00d"
    assert one_line("\x1b[31mred\x9b0m \u202egnp.exe\u2069") == r"\x1b[31mred\x9b0m \u202egnp.exe\u2069"
    assert one_line("a  b, \u05d0\u200c\U0001f600 \udcff") == "a  b, \u05d0\u200c\U0001f600 \udcff"
    assert html.unescape(markdown("a|b\nc")) == r"a|b\nc"


@pytest.mark.parametrize("name", ["=1+2", "+x", "-x", "@SUM(A1)", "-2+3", "=cmd|' /C calc'!A0"])
def test_formulas_are_escaped(name):
    assert csv_cell(name) == f"'{name}"
    assert csv_path(name) == f"./{name}"


@pytest.mark.parametrize("name", ["+90%", "-90%", "-1", "+0.5", "a=b", "cat", "", "/x/=1.png"])
def test_numbers_and_ordinary_names_are_not_escaped(name):
    assert (csv_cell(name), csv_path(name)) == (name, name)


def test_a_card_whose_names_are_hostile_has_no_markup_of_theirs(tmp_path):
    domains = ["a\n---\nlicense: mit\n---\n# b", "<script>alert(1)</script>", "x|y"]
    scores = {"accuracy": 0.5, "worst_accuracy": 0.25, "worst_group": "![g](x)", "f1_macro": 0.5}
    roles = {"ood": scores, "<img src=r>": scores}
    network = fine_tuned(num_classes=len(HOSTILE))
    args = {"versions": {"timm_moe_dg": "<img src=v>"}, "opt": "x'\n```\n<img src=c>", "averaging": "`<img src=a>"}
    hparams = {"lr": "<img src=h>", "a\n# b": [1]}
    card = card_of_run(tmp_path, network, classes=HOSTILE, domains=domains, roles=roles, hparams=hparams, **args)
    assert card_mistakes(card.content) == []
    again = ModelCard.load(tmp_path / "folder" / "README.md")
    assert again.data.license == "apache-2.0"
    assert [result.dataset_config for result in again.data.eval_results] == [one_line(name) for name in domains]
    elements = Elements(rendered(again.text, extensions=["tables", "fenced_code"]))
    assert {"script"}.isdisjoint(elements.tags)
    assert elements.tags.count("h1") == 1  # the title
    assert elements.tags.count("img") == 1  # the learning curves
    assert elements.cells[elements.cells.index("Classes") + 1] == f"{len(HOSTILE)}: {', '.join(HOSTILE)}"
    assert {one_line(name) for name in domains} <= set(elements.cells)
    assert "25.0 (![g](x))" in elements.cells
