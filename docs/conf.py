"""Sphinx settings of the site: python -m sphinx -W --keep-going -b html docs site."""

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

import timm_moe_dg

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # tools/ is no installed package
# Files of the repository's root that are pages of the site
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
FOLDER_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^\s()<>:#]+)\)")
TARGET = re.compile(r'(?<=\]\()[^\s()<>:#]+|(?<=src=")[^\s":]+')

project = "timm_moe_dg"
author = "the authors of timm_moe_dg"
version = release = timm_moe_dg.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4
suppress_warnings = ["myst.domains"]  # sphinx-argparse's domain resolves no links of Markdown
default_role = "code"
smartquotes = False  # quotes of the commands' help are typed by readers
pygments_dark_style = "github-dark"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"timm_moe_dg {release}"
html_show_copyright = html_show_sphinx = html_copy_source = False


def point_to_pages(text: str, written_in: Path, shown_in: Path) -> str:
    """Rewrites relative links of a file that is shown in a page of another folder, or that lead to a root page.

    Links to folders, which only the repository's page can show, become text.
    """

    def moved(match: re.Match[str]) -> str:
        target = (written_in / match[0]).resolve()
        if not target.exists():
            return match[0]
        page = ROOT_PAGES.get(os.path.relpath(target, DOCS.parent))
        return os.path.relpath(DOCS / page if page else target, shown_in)

    text = FOLDER_LINK.sub(lambda link: link[1] if (written_in / link[2]).is_dir() else link[0], text)
    return TARGET.sub(moved, text)


def setup(app: Sphinx) -> None:
    """Connects the links of pages and of the files that they include."""

    def read(_: Sphinx, name: str, source: list[str]) -> None:
        folder = (DOCS / name).parent
        source[0] = point_to_pages(source[0], folder, folder)

    def include(_: Sphinx, path: Path, name: str, source: list[str]) -> None:
        # MyST names the including page without its folder: pages that include others stand in docs/ itself
        source[0] = point_to_pages(source[0], (DOCS / path).parent, DOCS)

    app.connect("source-read", read)
    app.connect("include-read", include)
