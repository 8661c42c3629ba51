r"""Draws twelve kinds of things in five styles of emoji: the data set `emoji_styles`.

    npm install --prefix packages @iconify-json/twemoji@1.2.5 @iconify-json/noto@1.2.9 \
      @iconify-json/openmoji@1.2.29 @iconify-json/fluent-emoji-flat@1.2.6 \
      @iconify-json/fluent-emoji-high-contrast@1.2.6 emojibase-data@17.0.0
    pip install resvg-py
    python examples/emoji_styles/make_data.py data/emoji_styles

writes data/emoji_styles/STYLE/CLASS/IMAGE.png, on white. An image is named by its code points, so that a thing has the
same name in all styles. Authors and licenses of the drawings: docs/reference/datasets.md.
"""

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.errors import ArgumentError, DataError
from timm_moe_dg.storage.files import replaced

SIZE = 48  # side of an image in pixels
KINDS = "emojibase-data@17.0.0"
PACKAGES = {
    "fluent_flat": "@iconify-json/fluent-emoji-flat@1.2.6",
    "fluent_high_contrast": "@iconify-json/fluent-emoji-high-contrast@1.2.6",
    "noto": "@iconify-json/noto@1.2.9",
    "openmoji": "@iconify-json/openmoji@1.2.29",
    "twemoji": "@iconify-json/twemoji@1.2.5",
}
# Unicode's subgroups of each class
CLASSES = {
    "building": "place-building place-religious place-other",
    "clothing": "clothing",
    "face": "face-smiling face-affection face-tongue face-hand face-neutral-skeptical face-sleepy face-unwell face-hat "
    "face-glasses face-concerned face-negative face-costume cat-face monkey-face",
    "hand": "hand-fingers-open hand-fingers-partial hand-single-finger hand-fingers-closed hands hand-prop body-parts",
    "mammal": "animal-mammal",
    "meal": "food-prepared food-asian food-sweet drink",
    "person": "person person-gesture person-role person-fantasy person-activity person-sport person-resting family "
    "person-symbol",
    "plant_and_fruit": "plant-flower plant-other food-fruit food-vegetable",
    "small_animal": "animal-bird animal-amphibian animal-reptile animal-marine animal-bug",
    "tool": "musical-instrument computer light-video writing office tool science medical household",
    "vehicle": "transport-ground transport-water transport-air",
    "weather": "sky-weather",
}


def read(packages: Path, specifier: str, name: str) -> Any:
    """Reads a JSON file of an unpacked npm package, such as noto's icons.json."""
    path = packages / specifier.rpartition("@")[0] / name
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        remedy = f"run npm install --prefix packages {specifier}, and give packages/node_modules"
        raise DataError(f"packages={str(packages)!r}: {path} cannot be read ({error}); {remedy}") from error


def plain(code_points: str) -> str:
    """Normalizes code points, of which the sets write some without the variation selector."""
    return code_points.lower().replace("-fe0f", "")


def things(packages: Path) -> dict[str, str]:
    """Returns the class of each thing by its code points."""
    subgroups = read(packages, KINDS, "meta/groups.json")["subgroups"]
    numbers = {name: int(number) for number, name in subgroups.items()}
    classes = {numbers[name]: label for label, names in CLASSES.items() for name in names.split()}
    emojis = read(packages, KINDS, "en/data.json")
    return {plain(emoji["hexcode"]): classes[emoji["subgroup"]] for emoji in emojis if emoji.get("subgroup") in classes}


def pictures(packages: Path, specifier: str, labels: dict[str, str]) -> dict[str, str]:
    """Returns the SVG of each of the things that a set draws, by its code points."""
    icons, characters = (read(packages, specifier, name) for name in ("icons.json", "chars.json"))
    names = {plain(points): name for points, name in characters.items() if plain(points) in labels}
    return {points: svg_of(icons, icons["icons"][name]) for points, name in names.items()}


def svg_of(icons: dict[str, Any], icon: dict[str, Any]) -> str:
    """Returns the SVG of an icon, whose sides are those of all icons unless it has its own."""
    left, top = icon.get("left", 0), icon.get("top", 0)
    box = f"{left} {top} {icon.get('width', icons['width'])} {icon.get('height', icons['height'])}"
    size = f'width="{SIZE}" height="{SIZE}" viewBox="{box}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{icon["body"]}</svg>'


def draw(svg: str) -> Image.Image:
    """Draws an SVG on white."""
    from resvg_py import svg_to_bytes  # not needed to read the packages

    content = svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True)
    return Image.open(io.BytesIO(content)).convert("RGB")


@tool
def main(argv: Sequence[str]) -> None:
    """Draws all styles into a new folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="new folder to write")
    parser.add_argument("--packages", type=Path, default=Path("packages/node_modules"), help="unpacked npm packages")
    args = parser.parse_args(argv)
    if args.folder.exists():
        raise ArgumentError.of("folder", str(args.folder), "exists; give another, or remove it")
    labels = things(args.packages)
    # All packages are read before the first drawing
    styles = {style: pictures(args.packages, name, labels) for style, name in PACKAGES.items()}
    with replaced(args.folder) as fresh:
        for style, svgs in styles.items():
            for points, svg in svgs.items():
                path = fresh / style / labels[points] / f"{points}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(svg).save(path)
            print(f"{style}: {len(svgs)} images")


if __name__ == "__main__":
    main()
