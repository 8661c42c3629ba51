"""Makes CUB-DG out of CUB-200-2011: the photographs, and three restyled versions of each.

    python examples/cub_dg/make_cub_dg.py CUB_200_2011 data --weights-dir styles

writes data/CUB_DG/{Candy,Mosaic,Natural,Udnie}/CLASS/IMAGE with a style-transfer network, whose weights are
styles/{candy,mosaic,udnie}.pth or .safetensors. Natural holds links to the photographs, or copies. The command can be
stopped and given again: it skips images that were made from the same photograph and weights, which their comment names.
"""

import argparse
import hashlib
import io
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image
from style_transfer import StyleTransferNetwork, find_weights, load_style

from timm_moe_dg.cli.tool import tool
from timm_moe_dg.cli.values import usable_device
from timm_moe_dg.data.readers.images import as_picture, read_pixels
from timm_moe_dg.errors import DataError, StorageError, check_regular_file

NATURAL, STYLES = "Natural", ("Candy", "Mosaic", "Udnie")
JPEG_QUALITY = 95
PROGRESS = 200  # photographs from one line of progress to the next


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="make_cub_dg.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("cub_dir", metavar="CUB_DIR", type=Path, help="CUB-200-2011 as published: images.txt and images/CLASS/IMAGE")
    add("output", metavar="OUT", type=Path, help="folder to make CUB_DG in")
    weights = "folder of {candy,mosaic,udnie}.pth or .safetensors"
    add("--weights-dir", metavar="DIR", type=Path, required=True, help=weights)
    natural = "what Natural holds: symbolic links or copies (default: %(default)s)"
    add("--natural", choices=("link", "copy"), default="link", help=natural)
    add("--device", type=usable_device, default="cpu", help="where the network runs (default: %(default)s)")
    return parser


def photograph_names(cub_dir: Path) -> list[str]:
    """Reads images.txt: CLASS/IMAGE of every photograph, in its order.

    Raises:
        DataError: There is no such file, it has another form, or photographs are missing.
    """
    index = cub_dir / "images.txt"
    try:
        check_regular_file(index)
        lines = index.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"images.txt cannot be read ({error}); give the folder of CUB-200-2011 that holds it"
        raise DataError(f"cub_dir={str(cub_dir)!r}: {reason}") from error
    names = [line.split(maxsplit=1)[-1].strip() for line in lines if line.strip()]
    odd = [name for name in names if len(PurePosixPath(name).parts) != 2 or ".." in PurePosixPath(name).parts]
    if odd or not names:
        actual = f"the line of {odd[0]!r}" if odd else "no line"
        raise DataError(f"images={str(index)!r}: expected lines such as `1 CLASS/IMAGE.jpg` and found {actual}")
    stems = Counter(PurePosixPath(name).stem for name in names)
    if len(stems) < len(names):
        raise DataError(f"images={str(index)!r}: two photographs are called {stems.most_common(1)[0][0]!r}; rename one")
    missing = [name for name in names if not (cub_dir / "images" / name).is_file()]
    if missing:
        reason = f"{len(missing)} of {len(names)} photographs are missing, first images/{missing[0]}"
        raise DataError(f"cub_dir={str(cub_dir)!r}: {reason}; complete the copy")
    return names


def restyled_jpeg(network: StyleTransferNetwork, photograph: Path, device: str, origin: bytes) -> bytes:
    """Returns a photograph in the network's style, as the content of a JPEG file with the origin as its comment.

    Raises:
        ImageReadError: The photograph cannot be decoded.
    """
    pixels = torch.from_numpy(np.array(as_picture(read_pixels(str(photograph))))).permute(2, 0, 1)
    restyled = network.restyle(pixels.to(device)).permute(1, 2, 0).cpu().numpy()
    buffer = io.BytesIO()
    Image.fromarray(restyled).save(buffer, "JPEG", quality=JPEG_QUALITY, comment=origin)
    return buffer.getvalue()


def digest(*contents: bytes) -> bytes:
    """Returns the SHA-256 of some contents, hexadecimal."""
    return hashlib.sha256(b"".join(contents)).hexdigest().encode()


def is_made_from(path: Path, origin: bytes) -> bool:
    """Whether a file exists and is a JPEG file with this comment."""
    try:
        with Image.open(path) as image:
            return image.info.get("comment") == origin
    except OSError:  # not there, or something else
        return False


def place(target: Path, content: bytes | Path) -> None:
    """Writes a file, or a symbolic link to a path, that is complete at every moment under its name."""
    # Readers skip the temporary file, which has no image's extension.
    beside = target.with_name(f".{target.name}.new")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside.unlink(missing_ok=True)
    if isinstance(content, Path):
        beside.symlink_to(content)
    else:
        beside.write_bytes(content)
    os.replace(beside, target)


def place_natural(target: Path, photograph: Path, how: str) -> bool:
    """Links or copies a photograph, and returns whether that was necessary."""
    if how == "link":
        if target.is_symlink() and target.resolve() == photograph.resolve():
            return False
        place(target, photograph.resolve())
        return True
    content = photograph.read_bytes()
    if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
        return False
    place(target, content)
    return True


def make_all(args: argparse.Namespace) -> None:
    """Makes the images that are missing or were made from other photographs or weights.

    Raises:
        CheckpointError: Weights are missing, or belong to another network.
        DataError: The folder of CUB-200-2011 cannot be used.
        StorageError: A file cannot be written.
    """
    names, folder = photograph_names(args.cub_dir), args.output / "CUB_DG"
    weights = {style: find_weights(args.weights_dir, style.lower()) for style in STYLES}
    networks = {style: load_style(path).to(args.device) for style, path in weights.items()}
    style_digests = {style: digest(path.read_bytes()) for style, path in weights.items()}
    start, written = time.monotonic(), 0
    try:
        for number, name in enumerate(names, 1):
            photograph = args.cub_dir / "images" / name
            content = photograph.read_bytes()
            for style, network in networks.items():
                origin = digest(style_digests[style], content)
                if not is_made_from(folder / style / name, origin):
                    place(folder / style / name, restyled_jpeg(network, photograph, args.device, origin))
                    written += 1
            written += place_natural(folder / NATURAL / name, photograph, args.natural)
            if number % PROGRESS == 0 or number == len(names):
                rate = written / (time.monotonic() - start)
                print(f"{number}/{len(names)} photographs, {written} files written, {rate:.1f} a second", flush=True)
    except OSError as error:
        remedy = "free some space or correct the permissions, then give the same command again"
        raise StorageError(f"output={str(folder)!r}: cannot be written ({error}); {remedy}") from error
    print(f"complete: {folder} ({4 * len(names)} images)")


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    torch.backends.cudnn.deterministic = True  # an image that is made again is the same
    make_all(build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
