"""Spelling is American: the commonest British forms in pages, tools and tests; names in code are left alone."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "tools").glob("*.py")]
BRITISH = re.compile(
    r"\b(colour|behaviour|neighbour|favour|licence|centre|labelled|grey)(s|ed)?\b"
    r"|\b\w*(initial|normal|minim|optim|recogn|organ|summar|general)is(e[ds]?|ing|ation)\b",
    re.IGNORECASE,
)


def test_pages_and_tools_are_spelled_as_americans_do():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in PAGES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for match in BRITISH.finditer(line)
    ]
    assert len(PAGES) > 10
    assert not found


def test_british_forms_are_noticed_and_american_ones_are_not():
    assert [match[0] for match in BRITISH.finditer("Normalised colours, organisation")] == [
        "Normalised",
        "colours",
        "organisation",
    ]
    assert not BRITISH.search("normalized colors, organization, precise, generalist, optimism, promise")
