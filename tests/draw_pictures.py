"""Draws the pictures of docs/pictures/ that come from trained runs, from tables of pages, or from a browser.

    python -m tests.draw_pictures runs                  # all, of the runs that the pages' commands leave in runs/
    python -m tests.draw_pictures runs map report       # some

The runs: moge-0 (docs/results/geo_digits.md), sprites-gmoe and sprites-deit (docs/results/experts.md), and digits-gmoe,
a run of docs/results/digits.md's small GMoE on rotated digits. The report is photographed with Chromium. The icons are
those of data/emoji_styles (examples/emoji_styles/make_data.py).
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.analysis.geography import domain_map
from timm_moe_dg.analysis.geography_plots import draw_forced, plot_domain_map
from timm_moe_dg.analysis.maps import draw_attention, draw_experts
from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.analysis.style import LEGEND_BELOW, category_color, picture
from timm_moe_dg.data.readers.digits import CONTINENTS, HELD_OUT
from timm_moe_dg.inference.report import ReportSettings, report

DOCS = Path(__file__).parent.parent / "docs"
PICTURES = DOCS / "pictures"
RULES = {
    "plain": "unchanged",
    "swap": "6 and 9 swapped",
    "parity": "even and odd swapped",
    "both": "both swaps",
}
# A thing of each class that all styles draw
ICONS = {
    "building": "1f3f0",
    "clothing": "1f451",
    "face": "1f60e",
    "hand": "1f44d",
    "mammal": "1f992",
    "meal": "1f354",
    "person": "1f9d1-200d-1f680",
    "plant_and_fruit": "1f353",
    "small_animal": "1f422",
    "tool": "1f528",
    "vehicle": "1f682",
    "weather": "26c4",
}
RADIUS = 239.0  # km, of `--coverage-radius auto` on these data


def draw_map(runs: Path, radius: float | None = None, name: str = "geo_digits_map.png") -> None:
    """Discovered domains of a MoGE run, with the training continents' outlines and rules."""
    view = open_run(runs / "moge-0", "cpu", 64)
    if radius is not None:
        view.model.set_coverage_radius(radius)
    domains = view.domains
    places = {domain.group: torch.as_tensor(domain.metadata) for domain in domains if domain.role != "train"}
    trained = [torch.as_tensor(domain.metadata) for domain in domains if domain.role == "train"]
    held_out = {HELD_OUT: places.pop(HELD_OUT)}
    named = {f"{group}\n{RULES[CONTINENTS[group][3]]}": points for group, points in places.items()}
    plot_domain_map(domain_map(view.model, 2.0), PICTURES / name, named, held_out, trained)


def draw_coverage(runs: Path) -> None:
    """The same with a coverage radius."""
    draw_map(runs, RADIUS, "geo_digits_coverage.png")


def draw_forced_experts(runs: Path) -> None:
    """Accuracy of each expert on each discovered domain."""
    with tempfile.TemporaryDirectory() as folder:
        draw_forced(open_run(runs / "moge-0", "cpu", 64), Path(folder), "id")
        shutil.move(Path(folder, "forced_experts.png"), PICTURES / "geo_digits_forced_experts.png")


def draw_sprites(runs: Path) -> None:
    """Experts and attention of the sprites' runs; parts and invariance as the page's commands left them."""
    mixture, dense = (open_run(runs / name, "cpu", 64) for name in ("sprites-gmoe", "sprites-deit"))
    with tempfile.TemporaryDirectory() as folder:
        chosen: dict[str, Any] = {"images": None, "target": None}
        draw_experts(mixture, Path(folder), **chosen, columns=3, block=None)
        draw_attention(mixture, Path(folder), twin=dense, **chosen, columns=2)
        for name in ("experts", "attention"):
            shutil.move(Path(folder, f"{name}.png"), PICTURES / f"experts_{name}.png")
    for name in ("parts", "invariance"):
        shutil.copy(runs / "sprites-gmoe" / "figures" / f"{name}.png", PICTURES / f"experts_{name}.png")


def draw_speed(_: Path) -> None:
    """The first table of docs/results/speed.md as bars."""
    cell = r"([\d.]+) \| "
    lines = re.findall(rf"^\| `(\w+)`.*? \| {cell}(?:([\d.]+)|-) \|$", (DOCS / "results/speed.md").read_text(), re.M)
    with picture(PICTURES / "speed_cost.png", 6.4, 3.4) as figure:
        axes = figure.subplots()
        for row, (_, *ratios) in enumerate(lines):
            for index, ratio in enumerate(ratios):
                if ratio:
                    height, more = row + 0.38 * (index - 0.5), 100 * (float(ratio) - 1)
                    label = ("prediction", "training step")[index] if not row else None
                    axes.barh(height, more, 0.36, color=category_color(index), label=label)
                    axes.text(more + 0.8, height, f"+{more:.0f}%", va="center")
        axes.set_yticks(range(len(lines)), [name for name, *_ in lines])
        axes.invert_yaxis()
        axes.set(xlim=(0, 46), xlabel="extra time compared with the plain timm model (%)")
        axes.legend(loc=(0.7, 0.3))


def draw_fashion_shift(_: Path) -> None:
    """The first table of docs/results/fashion_shift.md: a panel for each domain, and one for their mean."""
    table = re.search(r"^\| method .*?\n\n", (DOCS / "results/fashion_shift.md").read_text(), re.M | re.DOTALL)
    assert table is not None
    head, _rule, *rows = (line.strip("| ").split(" | ") for line in table[0].split("\n")[:-2])
    methods, networks = (list(dict.fromkeys(row[column] for row in rows)) for column in (0, 1))
    with picture(PICTURES / "fashion_shift.png", 6.4, 5.6) as figure:
        for column, axes in zip(range(2, 6), figure.subplots(2, 2, sharex=True).flat, strict=True):
            for index, network in enumerate(networks):
                own = [row for row in rows if row[1] == network]
                places = [methods.index(row[0]) + 0.15 * (index - 1.5) for row in own]
                values, errors = zip(*([*map(float, row[column].split(" ± ")), 0.0][:2] for row in own), strict=True)
                label = network if column == 2 else None
                axes.errorbar(places, values, errors, fmt="osD^"[index], color=category_color(index), label=label)
            axes.set_xticks(range(len(methods)), methods, rotation=45, ha="right")
            axes.set_title(f"{head[column]} (%)")
            axes.grid(axis="y", alpha=0.3)
        figure.legend(**LEGEND_BELOW)


def draw_icons(_: Path) -> None:
    """A thing of each class of `emoji_styles`, a row for each style."""
    styles = sorted(path for path in Path("data/emoji_styles").iterdir())
    sheet = Image.new("RGB", (52 * len(ICONS), 52 * len(styles)), "white")
    for row, style in enumerate(styles):
        for column, (label, points) in enumerate(ICONS.items()):
            sheet.paste(Image.open(style / label / f"{points}.png"), (52 * column + 2, 52 * row + 2))
    sheet.quantize(256).save(PICTURES / "emoji_styles.png", optimize=True)


def draw_report(runs: Path) -> None:
    """The first screen of a run's report, in one column, as a browser shows it."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report(runs / "digits-gmoe", page, ReportSettings())
        photograph(page, PICTURES / "report.png", 800, 1500)


def photograph(page: Path, target: Path, width: int, height: int) -> None:
    """Writes a page as a browser of this size shows it."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    size = [f"--window-size={width},{height}", f"--screenshot={target}"]
    command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu", *size, page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


DRAWINGS: dict[str, Callable[[Path], None]] = {
    "map": draw_map,
    "coverage": draw_coverage,
    "forced": draw_forced_experts,
    "sprites": draw_sprites,
    "speed": draw_speed,
    "fashion_shift": draw_fashion_shift,
    "icons": draw_icons,
    "report": draw_report,
}


if __name__ == "__main__":
    for name in sys.argv[2:] or DRAWINGS:
        DRAWINGS[name](Path(sys.argv[1]))
