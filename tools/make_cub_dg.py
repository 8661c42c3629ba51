"""Makes CUB-DG out of CUB-200-2011: the photographs, and three restyled versions of each.

    python tools/make_cub_dg.py CUB_200_2011 data --weights-dir styles
    python tools/make_cub_dg.py CUB_200_2011 data --style approximate --split-by-photograph

The first command writes data/CUB_DG/{Candy,Mosaic,Natural,Udnie}/CLASS/IMAGE with a style-transfer network, whose
weights are styles/{candy,mosaic,udnie}.pth or .safetensors. The second needs no weights: fixed filters take the
network's place, and the folder is data/CUB_DG_approximate; results on it are not to be set beside published ones.
Natural holds links to the photographs, or copies. manifest.json has the hash of every file. A command that was stopped
goes on when it is given again.
"""

import argparse
import hashlib
import io
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm_moe_dg.data.approximate_styles import APPROXIMATE_STYLES

import timm_moe_dg
from timm_moe_dg.cli.arguments import parse_words, usable_device
from timm_moe_dg.cli.ending import tool
from timm_moe_dg.data.readers import read_image
from timm_moe_dg.data.splits import photograph_part
from timm_moe_dg.data.style_transfer import StyleTransferNetwork, find_weights, load_style
from timm_moe_dg.errors import ArgumentError, DataError, ImageReadError
from timm_moe_dg.storage.checksums import file_hash
from timm_moe_dg.storage.manifest import Manifest

NATURAL, STYLES = "Natural", ("Candy", "Mosaic", "Udnie")
FOLDERS = {"network": "CUB_DG", "approximate": "CUB_DG_approximate"}
QUALITY = 95
Painter = Callable[[np.ndarray], np.ndarray]


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line."""
    parser = argparse.ArgumentParser(
        prog="make_cub_dg.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("cub_dir", metavar="CUB_DIR", type=Path, help="CUB-200-2011 as it comes: images.txt and images/CLASS/IMAGE")
    add("output", metavar="OUT", type=Path, help="folder to make CUB_DG, or CUB_DG_approximate, in")
    add("--style", choices=tuple(FOLDERS), default="network", help="how to restyle (default: %(default)s)")
    add("--weights-dir", metavar="DIR", help="holds {candy,mosaic,udnie}.pth or .safetensors, for --style network")
    add("--natural", choices=("link", "copy"), default="link", help="how Natural comes (default: symbolic %(default)s)")
    add("--split-by-photograph", action="store_true", help="write the split by photograph into the manifest")
    add("--device", type=usable_device, default="cpu", help="where the network runs (default: %(default)s)")
    return parser


def photographs(cub_dir: Path) -> list[str]:
    """Reads images.txt: CLASS/IMAGE of every photograph, in its order.

    Raises:
        DataError: There is no such file, it has another form, or photographs that it names are missing.
    """
    index = cub_dir / "images.txt"
    try:
        lines = index.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = f"images.txt cannot be read ({error}); give the folder of CUB-200-2011 that holds it"
        raise DataError(f"cub_dir={str(cub_dir)!r}: {reason}") from error
    names = [line.split(maxsplit=1)[-1].strip() for line in lines if line.strip()]
    odd = [name for name in names if len(PurePosixPath(name).parts) != 2 or ".." in PurePosixPath(name).parts]
    if odd or not names:
        found = f"the line of {odd[0]!r}" if odd else "no line"
        raise DataError(f"images={str(index)!r}: expected lines such as `1 CLASS/IMAGE.jpg` and found {found}")
    stems = Counter(PurePosixPath(name).stem for name in names)
    if len(stems) < len(names):
        raise DataError(f"images={str(index)!r}: two photographs are called {stems.most_common(1)[0][0]!r}; rename one")
    missing = [name for name in names if not (cub_dir / "images" / name).is_file()]
    if missing:
        reason = f"{len(missing)} of {len(names)} photographs are missing, first images/{missing[0]}"
        raise DataError(f"cub_dir={str(cub_dir)!r}: {reason}; complete the copy")
    return names


def network_painter(network: StyleTransferNetwork, device: str) -> Painter:
    """A style's network as a function of pixels, (H, W, 3) uint8."""
    network = network.to(device)

    def paint(pixels: np.ndarray) -> np.ndarray:
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(device)
        return network.restyle(image).permute(1, 2, 0).cpu().numpy()

    return paint


def prepare_styles(args: argparse.Namespace) -> tuple[dict[str, Painter], dict[str, Any]]:
    """Returns each style's painter, and what the manifest says about them: the weights' files and hashes.

    Raises:
        ArgumentError: The options contradict each other.
        CheckpointError: Weights are missing, or are those of another network.
    """
    if (args.style == "network") != (args.weights_dir is not None):
        remedy = "--style network needs --weights-dir DIR, and --style approximate takes none"
        raise ArgumentError.of("weights_dir", args.weights_dir, remedy)
    if args.style == "approximate":
        return dict(APPROXIMATE_STYLES), {"style": "approximate", "weights": None}
    files = {style: find_weights(args.weights_dir, style.lower()) for style in STYLES}
    painters = {style: network_painter(load_style(path), args.device) for style, path in files.items()}
    hashes = {style: {"file": path.name, "sha256": file_hash(path)} for style, path in files.items()}
    return painters, {"style": "network", "weights": hashes}


def jpeg(pixels: np.ndarray) -> bytes:
    """(H, W, 3) uint8 as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def read_pixels(path: Path) -> np.ndarray:
    """Reads a photograph as (H, W, 3) uint8."""
    try:
        return np.asarray(read_image(str(path)))
    except ImageReadError as error:
        raise ImageReadError(f"image={str(path)!r}: cannot be decoded ({error.__cause__}); restore the file") from error


def make(name: str, source: Path, painters: Mapping[str, Painter], manifest: Manifest, natural: str) -> None:
    """Makes what is still missing of one photograph's four versions."""
    lacking = [style for style in painters if f"{style}/{name}" not in manifest]
    pixels = read_pixels(source) if lacking else np.empty(0)
    for style in lacking:
        manifest.write(f"{style}/{name}", jpeg(painters[style](pixels)))
    if f"{NATURAL}/{name}" not in manifest:
        if natural == "link":
            manifest.link(f"{NATURAL}/{name}", source)
        else:
            manifest.write(f"{NATURAL}/{name}", source.read_bytes())


def make_all(args: argparse.Namespace) -> None:
    """Makes the data set, or what is missing of it."""
    names = photographs(args.cub_dir)
    painters, facts = prepare_styles(args)
    index = hashlib.sha256("\n".join(names).encode()).hexdigest()
    source = {"photographs_sha256": index, "natural": args.natural}
    identity = {"data_set": FOLDERS[args.style], **facts, "jpeg_quality": QUALITY, **source}
    manifest = Manifest(args.output / FOLDERS[args.style], identity)
    print(f"{len(names)} photographs; {len(manifest.files)} of {4 * len(names)} files are there and intact", flush=True)
    start, done = time.monotonic(), len(manifest.files)
    for number, name in enumerate(names, 1):
        make(name, args.cub_dir / "images" / name, painters, manifest, args.natural)
        if number % 200 == 0 or number == len(names):
            rate = (len(manifest.files) - done) / (time.monotonic() - start)
            print(f"{number}/{len(names)} photographs, {rate:.1f} files/s", flush=True)
    parts = {PurePosixPath(name).stem: photograph_part(name) for name in names} if args.split_by_photograph else None
    manifest.finish({"timm_moe_dg": timm_moe_dg.__version__, "split_by_photograph": parts})
    print(f"written: {manifest.folder} ({len(manifest.files)} files)")


@tool
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    torch.backends.cudnn.deterministic = True  # what is made anew has the same hash
    make_all(parse_words(build_parser(), argv))


if __name__ == "__main__":
    main()
