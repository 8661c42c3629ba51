"""The messages that docs/troubleshooting.md quotes are those of the code."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def test_every_quoted_message_is_part_of_a_text_in_the_code():
    quoted = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())
    texts = {
        node.value
        for path in (ROOT / "timm_moe_dg").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert len(quoted) >= 20
    assert [message for message in quoted if not any(message in text for text in texts)] == []
