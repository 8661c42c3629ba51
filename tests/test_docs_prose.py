"""The pages' prose keeps ceilings: short sentences, few semicolons, colons and negations, "you", shown output.

`python -m tests.test_docs_prose [ROOT]` prints the figures of each page and of all together.
"""

import re
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$\n?", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(?:\{[\w:-]+\})?(`+)(?!`).+?\1", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bal\.)(?<!\bvs\.)(?<!\bcf\.)[)\"*_]*\s+")
NEGATION = re.compile(r"\b(?:not|no|never|none|nothing|nobody|without|neither|nor|cannot)\b|n't\b", re.IGNORECASE)
ADDRESS = re.compile(r"\byou(?:r|rs|rself)?\b", re.IGNORECASE)


@dataclass
class Figures:
    """Counts of a text, and the shares that have a ceiling."""

    words: int  # outside code blocks, with headings and tables, without the tables' bars
    outputs: int  # blocks of output
    prose: int = 0  # words of sentences
    sentences: int = 0
    long: int = 0  # sentences of more than 30 words
    colons: int = 0  # sentences with a colon inside
    semicolons: int = 0
    negations: int = 0
    you: int = 0

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def shares(self) -> dict[str, float]:
        sentences, thousands = max(self.sentences, 1), max(self.prose, 1) / 1000
        return {
            "words a sentence": self.prose / sentences,
            "long %": 100 * self.long / sentences,
            "x: y %": 100 * self.colons / sentences,
            "semicolons": self.semicolons / thousands,
            "negations": self.negations / thousands,
            "you": self.you / thousands,
        }


# Of all pages together; a page of its own may have half as much again
CEILINGS = {"words a sentence": 16, "long %": 5, "x: y %": 6, "semicolons": 4, "negations": 11}
LEAST_YOU, LEAST_OUTPUTS, MOST_WORDS = 8, 20, 27_400
PAGE_FACTOR, PAGE_PROSE = 1.5, 250


def count_words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def paragraphs(text: str) -> list[str]:
    """Paragraphs and list items without code blocks, tables, headings, pictures and addresses of links."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text), flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", INLINE_CODE.sub("CODE", text))
    text = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"<[^>]+>", "", text)
    text = re.sub(r"^ *(?:\||#+ |:{3,}|\([\w-]+\)=).*$", "", text, flags=re.MULTILINE)
    return [part for part in re.split(r"\n\s*\n|^\s*(?:[-*+]|\d+\.) ", text, flags=re.MULTILINE) if count_words(part)]


def measure(text: str) -> Figures:
    words = count_words(FENCE.sub("\n", text).replace("|", " "))
    figures = Figures(words, len(re.findall("^```text$", text, re.MULTILINE)))
    for sentence in (part for paragraph in paragraphs(text) for part in SENTENCE_END.split(paragraph)):
        length = count_words(sentence)
        if not length:
            continue
        figures.prose += length
        figures.sentences += 1
        figures.long += length > 30
        figures.colons += bool(re.search(r":[*_]*\s+\S", sentence))
        figures.semicolons += sentence.count(";")
        figures.negations += len(NEGATION.findall(sentence))
        figures.you += len(ADDRESS.findall(sentence))
    return figures


def measure_pages(root: Path = ROOT) -> dict[str, Figures]:
    """Figures of the README and of each page under docs/."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {page.relative_to(root).as_posix(): measure(page.read_text()) for page in pages}


def total(pages: dict[str, Figures]) -> Figures:
    return sum(pages.values(), Figures(0, 0))


def over(figures: Figures, factor: float = 1.0) -> dict[str, float]:
    """Shares above their ceilings."""
    return {
        name: round(share, 1) for name, share in figures.shares().items() if share > factor * CEILINGS.get(name, 1e9)
    }


def test_a_text_s_figures_are_those_counted_by_hand():
    text = """# A heading; not counted

Give `--a b: c` to it. It isn't
new: you see; really, e.g. here.

| a; table | you |
```bash
no code; here
```
```text
out: put
```
- An item [with a link; here](x.md#not)
- Your **second.** ![no picture](p.png)

Use these:
"""
    figures = measure(text)
    # Words: 4 + 8 ("isn't" is one, "e.g." ends nothing) + 6 + 2 + 2
    assert (figures.prose, figures.sentences, figures.long) == (22, 5, 0)
    assert (figures.colons, figures.semicolons, figures.negations, figures.you) == (1, 2, 1, 2)
    assert (figures.outputs, figures.words) == (1, 33)
    assert measure("word " * 31).long == 1
    assert over(measure("Not; " * 17)) == {"words a sentence": 17, "semicolons": 1000, "negations": 1000}


def test_pages_together_keep_the_ceilings():
    figures = total(measure_pages())
    assert over(figures) == {}
    assert figures.prose == 0 or figures.shares()["you"] >= LEAST_YOU


def test_each_page_keeps_softer_ceilings():
    pages = {name: page for name, page in measure_pages().items() if page.prose >= PAGE_PROSE}
    assert {name: over(page, PAGE_FACTOR) for name, page in pages.items() if over(page, PAGE_FACTOR)} == {}


def test_pages_show_output_and_stay_short():
    figures = total(measure_pages())
    others = (ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))
    assert figures.outputs >= LEAST_OUTPUTS
    assert figures.words + sum(measure(path.read_text()).words for path in others) <= MOST_WORDS


def main(root: Path) -> None:
    pages = measure_pages(root)
    rows = {**pages, "all": total(pages)}
    names = list(rows["all"].shares())
    sys.stdout.write(f"{'':32}{'words':>7}{'outputs':>9}{'prose':>7}" + "".join(f"{name:>18}" for name in names) + "\n")
    for page, figures in rows.items():
        shares = "".join(f"{share:18.1f}" for share in figures.shares().values())
        sys.stdout.write(f"{page:32}{figures.words:7}{figures.outputs:9}{figures.prose:7}{shares}\n")
    for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        sys.stdout.write(f"{name:32}{measure((root / name).read_text()).words:7}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else ROOT)
