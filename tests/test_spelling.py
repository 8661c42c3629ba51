"""Spelling is American in pages, code and names; the commonest British forms are refused."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "hub_cards", "timm_moe_dg", "tests", "tools")
FILES = [
    path
    for path in (ROOT / "README.md", *(file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))))
    if path.suffix in (".md", ".py", ".yaml") and path != Path(__file__)
]
# Without word boundaries, because names join words by underscores
BRITISH = re.compile(
    r"(colour|behaviour|neighbour|favour|honour|licence|centre(?!d\b)|centred|labelled|modelled|grey|spelt|\bper cent\b"
    r"|analys(?:e[dr]?|ing)(?![a-z])|artefact|catalogue|judgement|towards|whilst)"
    r"|(initial|normal|minim|maxim|optim|recogn|organ|summar|general|synchron|visual|util|priorit|random"
    r"|standard|special)is(?:e[drs]?|ing|ation)(?![a-z])",
    re.IGNORECASE,
)


def test_pages_and_code_are_spelled_as_americans_do():
    british = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in ((path, path.read_text()) for path in FILES)
        for match in BRITISH.finditer(text)
    ]
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == {"README.md", *FOLDERS}
    assert not british
