"""The pages' prose keeps ceilings: short sentences, few semicolons and negations, shown output."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$\n?", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(?:\{[\w:-]+\})?(`+)(?!`).+?\1", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bal\.)(?<!\bvs\.)(?<!\bcf\.)[)\"*_]*\s+")
NEGATION = re.compile(r"\b(?:not|no|never|none|nothing|nobody|without|neither|nor|cannot)\b|n't\b", re.IGNORECASE)
# Of all pages together; a page of its own may have half as much again
CEILINGS = {"words a sentence": 16, "long %": 5, "semicolons": 4, "negations": 11}
LEAST_OUTPUTS, MOST_WORDS, PAGE_FACTOR, PAGE_PROSE = 20, 27_400, 1.5, 250


def count_words(text: str) -> int:
    """Words outside code blocks, with headings and tables, without the tables' bars."""
    return sum(any(map(str.isalnum, word)) for word in FENCE.sub("\n", text).replace("|", " ").split())


def sentences(text: str) -> list[str]:
    """Sentences without code blocks, tables, headings, pictures and addresses of links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", INLINE_CODE.sub("CODE", text))
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<[^>]+>", "", text)
    text = re.sub(r"^ *(?:\||#+ |:{3,}|\([\w-]+\)=).*$", "", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|^\s*(?:[-*+]|\d+\.) ", text, flags=re.MULTILINE)
    parts = [part for paragraph in paragraphs for part in SENTENCE_END.split(paragraph)]
    return [part for part in parts if count_words(part)]


def over(prose: list[str], factor: float = 1.0) -> dict[str, float]:
    """Shares above their ceilings."""
    words = sum(map(count_words, prose))
    shares = {
        "words a sentence": words / len(prose),
        "long %": 100 * sum(count_words(sentence) > 30 for sentence in prose) / len(prose),
        "semicolons": 1000 * sum(sentence.count(";") for sentence in prose) / words,
        "negations": 1000 * sum(len(NEGATION.findall(sentence)) for sentence in prose) / words,
    }
    return {name: round(share, 1) for name, share in shares.items() if share > factor * CEILINGS[name]}


def test_pages_keep_the_ceilings_and_show_output():
    texts = {page: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    prose = {page: sentences(text) for page, text in texts.items()}
    assert over([sentence for part in prose.values() for sentence in part]) == {}
    long = {page: part for page, part in prose.items() if sum(map(count_words, part)) >= PAGE_PROSE}
    assert not {page.name: over(part, PAGE_FACTOR) for page, part in long.items() if over(part, PAGE_FACTOR)}
    assert sum(len(re.findall("^```text$", text, re.MULTILINE)) for text in texts.values()) >= LEAST_OUTPUTS
    others = (ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))
    assert sum(map(count_words, [*texts.values(), *(path.read_text() for path in others)])) <= MOST_WORDS
