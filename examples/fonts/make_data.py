r"""Draws 26 letters in 200 fonts of five families, for the data set `folder`.

    npm install --prefix packages $(cut -d, -f2 examples/fonts/fonts.csv | tail -n +2)
    pip install fonttools brotli
    python examples/fonts/make_data.py data/fonts

writes data/fonts/FAMILY/LETTER/FONT.png, black on white, 48 pixels wide. fonts.csv names the families and packages.
`--group-column '([^/]+)\.png'` keeps a font on one side of a split.
"""

import argparse
import csv
import io
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase

from PIL import Image, ImageDraw, ImageFont, ImageOps

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.errors import ArgumentError, DataError, MissingDependencyError

LIST = Path(__file__).with_name("fonts.csv")
SIDE, MARGIN, DRAWN = 48, 4, 96  # pixels of an image, around a letter, and of a letter before it is scaled


def read_font(file: Path) -> ImageFont.FreeTypeFont:
    """Opens a compressed font that has all letters."""
    for package in ("fontTools", "brotli"):
        if find_spec(package) is None:
            raise MissingDependencyError(f"{package} is not installed: pip install fonttools brotli")
    from fontTools.ttLib import TTFont, TTLibError

    try:
        font = TTFont(file)
        font.flavor = None  # Pillow reads uncompressed fonts
        font.save(data := io.BytesIO())
    except (OSError, TTLibError) as error:
        raise DataError(f"packages: {file} cannot be read ({error}); install the packages again") from error
    if lacking := [letter for letter in ascii_lowercase if ord(letter) not in font.getBestCmap()]:
        raise DataError(f"packages: {file} has no letters {''.join(lacking)}; leave the font out of {LIST.name}")
    return ImageFont.truetype(io.BytesIO(data.getvalue()), DRAWN)


def draw_letters(font: ImageFont.FreeTypeFont) -> Iterator[tuple[str, Image.Image]]:
    """Yields each letter and its picture. All letters are as large as the picture allows."""
    for letter in ascii_lowercase:
        picture = Image.new("L", (4 * DRAWN, 4 * DRAWN), 255)
        ImageDraw.Draw(picture).text((2 * DRAWN, 2 * DRAWN), letter, 0, font, anchor="mm")
        cropped = picture.crop(ImageOps.invert(picture).getbbox())
        inside = ImageOps.pad(cropped, (SIDE - 2 * MARGIN, SIDE - 2 * MARGIN), color=255)
        yield letter, ImageOps.expand(inside, MARGIN, 255)


@tool
def main(argv: Sequence[str]) -> None:
    """Draws all fonts of the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--packages", type=Path, default=Path("packages"), help="where npm installed them")
    options = parser.parse_args(argv)
    if options.folder.exists():
        raise ArgumentError.of("folder", str(options.folder), "exists; give a new folder")
    with LIST.open(newline="") as file:
        fonts = list(csv.DictReader(file))
    unfinished = options.folder.with_name(f"{options.folder.name}.unfinished")
    for font in fonts:
        name = font["package"].rpartition("@")[0].removeprefix("@fontsource/")
        source = options.packages / "node_modules" / "@fontsource" / name / "files" / f"{name}-latin-400-normal.woff2"
        for letter, picture in draw_letters(read_font(source)):
            target = unfinished / font["family"] / letter / f"{name}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            picture.save(target)
    unfinished.rename(options.folder)
    print(f"{options.folder}: {len(fonts)} fonts, {len(fonts) * len(ascii_lowercase)} images")


if __name__ == "__main__":
    main()
