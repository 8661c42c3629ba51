"""Damaged images: whatever is in a file, the reader gives an image or the one error that names it.

    python -m tests.faults.mutated_images --number 100000

Small pictures in every format that is read, and in some that are refused, are changed at random: bits flipped, bytes
overwritten, parts cut out, doubled or exchanged with those of another format, lengths in headers set to extremes. A
mutation is a function of the seed and its number, so that `--first N --number 1` repeats a finding.
"""

import argparse
import io
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from PIL import Image

from timm_moe_dg.data.bands import Pixels, as_picture, decoders
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.errors import ImageReadError

REFUSED = ("EPS",)  # a format that Pillow would start a program for
MODES = {"BLP": "P", "MSP": "1", "SPIDER": "F", "XBM": "1"}  # in which the format is written, if not RGB
SIDE = 24  # pixels
EXTREMES = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\xff\xff", b"\x80\0\0\0")
SHOWN_EVERY = 2_000
Reader = Callable[[str, io.BytesIO], Pixels]


def pictures() -> dict[str, bytes]:
    """One file of each format."""
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = {}
    for format_ in (*sorted(set(decoders()) & Image.SAVE.keys()), *REFUSED):
        stored = io.BytesIO()
        image.convert(MODES.get(format_, "RGB")).save(stored, format=format_)
        found[format_] = stored.getvalue()
    return found


def mutate(whole: bytes, other: bytes, random: np.random.Generator) -> bytes:
    """Changes a file in one to four places."""
    changed = bytearray(whole)
    for _ in range(random.integers(1, 5)):
        # Headers are where decoders decide, so half of the changes are there
        at = int(random.integers(min(len(changed), 64) if random.random() < 0.5 else len(changed)))
        length = int(random.integers(1, 33))
        kind = random.integers(6)
        if kind == 0:
            changed[at] ^= 1 << int(random.integers(8))
        elif kind == 1:
            changed[at : at + length] = random.bytes(length)
        elif kind == 2:
            del changed[max(at, 1) :]
        elif kind == 3:
            changed[at:at] = changed[at : at + length]
        elif kind == 4:
            changed[at : at + 4] = EXTREMES[random.integers(len(EXTREMES))]
        else:
            changed[at : at + length] = other[at : at + length] or b"\0"
    return bytes(changed)


def read_stored(name: str, file: io.BytesIO) -> Pixels:
    """Reads a file in memory."""
    return read_pixels(name, file=file)


def attack(numbers: Sequence[int], seed: int = 0, read: Reader = read_stored) -> tuple[Counter[str], list[str]]:
    """Reads mutated images.

    Args:
        numbers: Of the mutations.
        seed: Of all of them.
        read: Gives an RGB image or raises ImageReadError; anything else is a finding.

    Returns:
        How many were read and how many refused, by format; and one line for each finding.
    """
    files = pictures()
    counts: Counter[str] = Counter()
    findings = []
    for number in numbers:
        random = np.random.default_rng([seed, number])
        format_, other = random.choice(list(files), size=2).tolist()
        damaged = io.BytesIO(mutate(files[format_], files[other], random))
        try:
            mode = as_picture(read("photo", damaged)).mode
            if mode == "RGB":
                counts[f"{format_} read"] += 1
            else:
                findings.append(f"{number} {format_}: mode {mode}")
        except ImageReadError:
            counts[f"{format_} refused"] += 1
        except Exception as error:
            findings.append(f"{number} {format_}: {type(error).__name__}: {error}")
    return counts, findings


def summary(counts: Mapping[str, int], findings: Sequence[str]) -> str:
    """Says in a line what came of an attack."""
    read = sum(count for name, count in counts.items() if name.endswith(" read"))
    refused = sum(count for name, count in counts.items() if name.endswith(" refused"))
    number = read + refused + len(findings)
    return f"{number} mutated images: {read} read, {refused} refused by name, {len(findings)} uncaught"


def main() -> None:
    """Runs the command line; the status is 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=2000, help="of mutations (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    findings: list[str] = []
    started, end = time.monotonic(), args.first + args.number
    for first in range(args.first, end, SHOWN_EVERY):
        found = attack(range(first, min(first + SHOWN_EVERY, end)), args.seed)
        counts += found[0]
        findings += found[1]
        sys.stdout.write(f"{summary(counts, findings)}, {time.monotonic() - started:.0f} s\n")
        sys.stdout.flush()
    sys.stdout.write(
        "".join(f"{line}\n" for line in [*(f"{name}: {counts[name]}" for name in sorted(counts)), *findings])
    )
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
