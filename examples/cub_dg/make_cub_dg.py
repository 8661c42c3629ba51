"""Makes CUB-DG out of CUB-200-2011: the photographs, and three restyled versions of each.

    python examples/cub_dg/make_cub_dg.py CUB_200_2011 data --weights-dir styles

writes data/CUB_DG/{Candy,Mosaic,Natural,Udnie}/CLASS/IMAGE with a style-transfer network, whose weights are
styles/{candy,mosaic,udnie}.pth or .safetensors. Natural holds links to the photographs, or copies. The command can be
stopped and given again: it skips images that were made from the same photograph and weights, which their comment names.
"""

import argparse
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from style_transfer import StyleTransferNetwork, load_style
from tqdm import tqdm

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.cli.values import usable_device
from timm_moe_dg.data.readers.images import as_picture, read_pixels
from timm_moe_dg.errors import DataError
from timm_moe_dg.storage.files import replaced_file

NATURAL, STYLES = "Natural", ("Candy", "Mosaic", "Udnie")
JPEG_QUALITY = 95


def photograph_names(cub_dir: Path) -> list[str]:
    """Reads images.txt: CLASS/IMAGE of every photograph, in its order."""
    lines = (cub_dir / "images.txt").read_text().splitlines()
    names = [line.split(maxsplit=1)[-1].strip() for line in lines]
    if missing := [name for name in names if not (cub_dir / "images" / name).is_file()]:
        reason = f"{len(missing)} of {len(names)} photographs are missing, first images/{missing[0]}"
        raise DataError(f"cub_dir={str(cub_dir)!r}: {reason}; complete the copy")
    return names


def find_weights(folder: Path, style: str) -> Path:
    """Returns the file of a style's weights."""
    for path in (folder / f"{style.lower()}.safetensors", folder / f"{style.lower()}.pth"):
        if path.is_file():
            return path
    raise DataError(f"weights_dir={str(folder)!r}: holds no {style.lower()}.pth or .safetensors; add it")


def restyled_jpeg(network: StyleTransferNetwork, photograph: Path, device: str, origin: bytes) -> bytes:
    """Returns a photograph in the network's style, as the content of a JPEG file with the origin as its comment."""
    pixels = torch.from_numpy(np.array(as_picture(read_pixels(str(photograph))))).permute(2, 0, 1)
    restyled = network.restyle(pixels.to(device)).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(restyled).save(buffer, "JPEG", quality=JPEG_QUALITY, comment=origin)
    return buffer.getvalue()


def is_made_from(path: Path, origin: bytes) -> bool:
    """Whether a file exists and is a JPEG file with this comment."""
    try:
        with Image.open(path) as image:
            return image.info.get("comment") == origin
    except OSError:  # not there, or something else
        return False


def place_natural(target: Path, photograph: Path, *, link: bool) -> None:
    """Links or copies a photograph, unless this was done before."""
    if link:
        if not (target.is_symlink() and target.resolve() == photograph.resolve()):
            target.unlink(missing_ok=True)
            target.symlink_to(photograph.resolve())
    elif target.is_symlink() or not target.is_file() or target.read_bytes() != photograph.read_bytes():
        with replaced_file(target) as fresh:
            fresh.write_bytes(photograph.read_bytes())


@tool
def main(argv: Sequence[str]) -> None:
    """Makes the images that are missing or were made from other photographs or weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cub_dir", type=Path, help="CUB-200-2011 as published: images.txt and images/CLASS/IMAGE")
    parser.add_argument("output", type=Path, help="folder to make CUB_DG in")
    parser.add_argument("--weights-dir", type=Path, required=True, help="folder of {candy,mosaic,udnie}.pth")
    parser.add_argument("--natural", choices=("link", "copy"), default="link", help="what Natural holds")
    parser.add_argument("--device", type=usable_device, default="cpu", help="where the network runs")
    args = parser.parse_args(argv)
    torch.backends.cudnn.deterministic = True  # an image that is made again is the same
    names, folder = photograph_names(args.cub_dir), args.output / "CUB_DG"
    weights = {style: find_weights(args.weights_dir, style) for style in STYLES}
    networks = {style: load_style(path).to(args.device) for style, path in weights.items()}
    contents = {style: path.read_bytes() for style, path in weights.items()}
    for name in tqdm(names, unit="photograph"):
        photograph = args.cub_dir / "images" / name
        for style in (*STYLES, NATURAL):
            (folder / style / name).parent.mkdir(parents=True, exist_ok=True)
        for style, network in networks.items():
            target = folder / style / name
            origin = hashlib.sha256(contents[style] + photograph.read_bytes()).hexdigest().encode()
            if not is_made_from(target, origin):
                with replaced_file(target) as fresh:
                    fresh.write_bytes(restyled_jpeg(network, photograph, args.device, origin))
        place_natural(folder / NATURAL / name, photograph, link=args.natural == "link")
    print(f"complete: {folder} ({4 * len(names)} images)")


if __name__ == "__main__":
    main()
