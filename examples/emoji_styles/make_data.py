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
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.cli.values import positive_int
from timm_moe_dg.errors import ArgumentError, DataError, MissingDependencyError, StorageError, check_regular_file

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


class Package:
    """JSON files of an unpacked npm package, such as noto's icons.json."""

    def __init__(self, packages: Path, specifier: str) -> None:
        self.specifier = specifier
        self.folder = packages / specifier.rpartition("@")[0]
        self.source = f"packages={str(packages)!r}"

    def read(self, name: str) -> Any:
        """Reads a file.

        Raises:
            DataError: The file is missing, or is not JSON.
        """
        path = self.folder / name
        try:
            check_regular_file(path)
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # UnicodeDecodeError and JSONDecodeError are among the latter
            remedy = f"run npm install --prefix packages {self.specifier}, and give packages/node_modules"
            raise DataError(f"{self.source}: {path} cannot be read ({error}); {remedy}") from error

    def changed(self, error: object) -> DataError:
        """Makes the exception for files in another layout."""
        return DataError(f"{self.source}: {self.folder} has another layout ({error}); install {self.specifier}")


def plain(code_points: str) -> str:
    """Normalizes code points, of which the sets write some without the variation selector."""
    return code_points.lower().replace("-fe0f", "")


def things(package: Package) -> dict[str, str]:
    """Returns the class of each thing by its code points."""
    groups, emojis = package.read("meta/groups.json"), package.read("en/data.json")
    try:
        numbers = {name: int(number) for number, name in groups["subgroups"].items()}
        classes = {numbers[name]: label for label, names in CLASSES.items() for name in names.split()}
        return {
            plain(emoji["hexcode"]): classes[emoji["subgroup"]] for emoji in emojis if emoji.get("subgroup") in classes
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise package.changed(repr(error)) from error


def pictures(package: Package, labels: dict[str, str], size: int) -> dict[str, str]:
    """Returns the SVG of each of the things that a set draws, by its code points."""
    icons, characters = package.read("icons.json"), package.read("chars.json")
    try:
        names = {plain(points): name for points, name in characters.items() if plain(points) in labels}
        if missing := CLASSES.keys() - {labels[points] for points in names}:
            raise KeyError(f"no icon of {', '.join(sorted(missing))}")
        return {points: _svg(icons, icons["icons"][name], size) for points, name in names.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise package.changed(repr(error)) from error


def _svg(icons: dict[str, Any], icon: dict[str, Any], size: int) -> str:
    left, top = icon.get("left", 0), icon.get("top", 0)
    box = f"{left} {top} {icon.get('width', icons['width'])} {icon.get('height', icons['height'])}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" viewBox="{box}">{icon["body"]}</svg>'
    )


def draw(svg: str) -> Image.Image:
    """Draws an SVG on white.

    Raises:
        ValueError: It is no SVG.
    """
    try:
        from resvg_py import svg_to_bytes  # not needed to read the packages
    except ImportError as error:
        remedy = "drawing needs resvg-py, which is not installed: pip install resvg-py"
        raise MissingDependencyError(remedy) from error
    content = svg_to_bytes(svg_string=svg, background="white", skip_system_fonts=True)
    return Image.open(io.BytesIO(content)).convert("RGB")


def drawings(packages: Path, size: int) -> Iterator[tuple[str, Image.Image]]:
    """Yields the STYLE/CLASS/IMAGE.png of each drawing, and the drawing."""
    labels = things(Package(packages, KINDS))
    # All packages are read before the first drawing
    styles = {style: pictures(Package(packages, name), labels, size) for style, name in PACKAGES.items()}
    for style, svgs in styles.items():
        for points, svg in svgs.items():
            try:
                yield f"{style}/{labels[points]}/{points}.png", draw(svg)
            except ValueError as error:
                reason = f"the icon {points} of {style} cannot be drawn ({error}); install {PACKAGES[style]}"
                raise DataError(f"packages={str(packages)!r}: {reason}") from error


def write(folder: Path, packages: Path, size: int) -> None:
    """Writes all drawings into a folder that does not exist yet. After an error it does not exist either.

    Raises:
        ArgumentError: The folder exists.
        DataError: A package is missing or has another layout, or an icon cannot be drawn.
        StorageError: A file cannot be written.
    """
    if folder.exists():
        raise ArgumentError.of("folder", str(folder), "exists; give another, or remove it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            for name, drawing in drawings(packages, size):
                path = Path(temporary, folder.name, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                drawing.save(path)
            Path(temporary, folder.name).rename(folder)
    except OSError as error:
        remedy = "free some space, or correct the permissions"
        raise StorageError(f"folder={str(folder)!r}: cannot be written ({error}); {remedy}") from error


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="make_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", type=Path, help="new folder to write")
    unpacked, default = "folder of the unpacked npm packages (default: %(default)s)", Path("packages/node_modules")
    add("--packages", metavar="DIR", type=Path, default=default, help=unpacked)
    add("--size", metavar="N", type=positive_int, default=48, help="side of an image in pixels (default: %(default)s)")
    args = parser.parse_args(argv)
    write(args.folder, args.packages, args.size)
    for style in PACKAGES:
        print(f"{style}: {len([*args.folder.glob(f'{style}/*/*.png')])} images")


if __name__ == "__main__":
    main()
