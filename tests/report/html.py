"""A page as a browser sees it."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "hr", "link", "input"}
LOADING = {"src", "href", "srcset", "action", "data", "poster", "background"}


class Page(HTMLParser):
    """Reads a page, and refuses one whose elements do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes a tag and what it loads."""
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in LOADING]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Closes the element that was opened last."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Notes text, style sheets left out."""
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        """All that is to be read."""
        return " ".join(" ".join(self.words).split())
