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
from pathlib import Path
from string import ascii_lowercase

from fontTools.ttLib import TTFont
from PIL import Image, ImageDraw, ImageFont, ImageOps

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.storage.files import replaced

LIST = Path(__file__).with_name("fonts.csv")
SIDE, MARGIN, DRAWN = 48, 4, 96  # pixels of an image, around a letter, and of a letter before it is scaled


def draw_letters(file: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yields each letter of a compressed font and its picture. All letters are as large as the picture allows."""
    compressed = TTFont(file)
    compressed.flavor = None  # Pillow reads uncompressed fonts
    compressed.save(data := io.BytesIO())
    font = ImageFont.truetype(io.BytesIO(data.getvalue()), DRAWN)
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
    pictures = {}
    for font in fonts:  # all are read before the first file is written
        name = font["package"].rpartition("@")[0].removeprefix("@fontsource/")
        files = options.packages / "node_modules" / "@fontsource" / name / "files"
        for letter, picture in draw_letters(files / f"{name}-latin-400-normal.woff2"):
            pictures[Path(font["family"], letter, f"{name}.png")] = picture
    with replaced(options.folder) as fresh:
        for path, picture in pictures.items():
            (fresh / path).parent.mkdir(parents=True, exist_ok=True)
            picture.save(fresh / path)
    print(f"{options.folder}: {len(fonts)} fonts, {len(pictures)} images")


if __name__ == "__main__":
    main()
