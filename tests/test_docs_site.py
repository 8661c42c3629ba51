"""The site of docs/: a broken link fails its build, and links hold on the repository's page and in the site."""

import runpy
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
DOCS = Path(__file__).parent.parent / "docs"


def test_links_out_of_docs_lead_to_pages_of_the_site():
    point = runpy.run_path(str(DOCS / "conf.py"))["point_to_pages"]
    guides, root = DOCS / "guides", DOCS.parent
    assert (
        point("[a](../../README.md#install) [b](train.md)", guides, guides) == "[a](../index.md#install) [b](train.md)"
    )
    shown = point("[a](docs/guides/train.md#x) ![b](docs/pictures/report.png) [c](pyproject.toml) [d](#e)", root, DOCS)
    assert shown == "[a](guides/train.md#x) ![b](pictures/report.png) [c](../pyproject.toml) [d](#e)"
    assert point('<img src="docs/pictures/report.png"> [a](SECURITY.md)', root, DOCS) == (
        '<img src="pictures/report.png"> [a](security.md)'
    )
    assert point("[tests](tests/) and [`a`](docs)", root, DOCS) == "tests and `a`"
    untouched = "[a](https://example.org/docs/x.md) [b](docs/no_such_page.md)"
    assert point(untouched, root, DOCS) == untouched


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(), ("missing.md", "no-heading", "missing.png")], ids=["whole", "broken"])
def test_a_broken_link_fails_the_build(tmp_path, fresh_python, wrong):
    source = tmp_path / "source"
    source.mkdir()
    links = "[a](missing.md)\n[b](other.md#no-heading)\n![c](missing.png)" if wrong else "[a](other.md#a-heading)"
    (source / "index.md").write_text(f"# Front page\n\n{links}\n\n```{{toctree}}\nother\n```\n")
    (source / "other.md").write_text("# Other page\n\n## A heading\n")
    build = [fresh_python, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", str(DOCS)]
    done = subprocess.run([*build, source, tmp_path / "site"], capture_output=True, text=True, cwd=DOCS.parent)
    assert bool(done.returncode) == bool(wrong), done.stderr
    assert all(target in done.stderr for target in wrong), done.stderr
