"""A parser of report pages, and runs on a few painted squares, made without training."""

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.invented import invented_records, write_run
from tests.saved_run import SMALL, saved_run
from timm_moe_dg.networks.build import build_network, data_config, save_network

EVIL_CLASSES = ("<script>alert(1)", "a & b", 'quo"te')
EVIL_DOMAINS = ("<b>bold", "plain", "x" * 70)
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


def paint(data: Path, domains: Sequence[str], classes: Sequence[str], images: int = 5) -> Path:
    """Writes DATA/DOMAIN/CLASS/IMAGE."""
    random = np.random.default_rng(0)
    for domain in domains:
        for name in classes:
            folder = data / domain / name
            folder.mkdir(parents=True)
            for number in range(images):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return data


def made_run(
    folder: Path,
    data: Path,
    domains: Sequence[str] = EVIL_DOMAINS,
    classes: Sequence[str] = EVIL_CLASSES,
    *,
    model: str = "gmoe_tiny_patch16",
    finished: bool = True,
    **args: Any,
) -> Path:
    """Writes a run that holds out the first domain."""
    domains, classes = sorted(domains), sorted(classes)
    words: dict[str, Any] = {
        "dataset": "folder",
        "data_dir": str(data),
        "domains": domains,
        "num_classes": len(classes),
    }
    words |= {"test_domains": [0], "steps": 601, "model": model, "lr": 0.25, **args}
    records = invented_records([0], num_domains=len(domains), **words)
    records = [replace(record, out_acc=(1.0,) * len(domains)) for record in records]
    write_run(folder, records, finished)
    if model == "gmoe_tiny_patch16":
        saved_run(folder, model, tuple(classes))
    else:
        small = {key: SMALL[key] for key in ("embed_dim", "depth", "num_heads")}
        network = build_network(model, len(classes), img_size=32, model_kwargs=small)
        save_network(network, folder / "best", tuple(classes), data_config(network, 32))
    return folder
