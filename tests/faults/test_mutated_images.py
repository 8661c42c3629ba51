"""Damaged images: whatever is in a file, the reader gives an image or the one error that names it.

Small pictures in every format that is read, and in some that are refused, are changed at random: bits flipped, bytes
overwritten, parts cut out, doubled or exchanged with those of another format, lengths in headers set to extremes.
"""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from timm_moe_dg.data.readers.images import as_picture, decoders, read_pixels
from timm_moe_dg.errors import ImageReadError

REFUSED = ("EPS", "SPIDER")  # a format that Pillow would start a program for, and one of more than 8 bits
MODES = {"BLP": "P", "MSP": "1", "SPIDER": "F", "XBM": "1"}  # in which the format is written, if not RGB
SIDE = 24  # pixels
EXTREMES = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\xff\xff", b"\x80\0\0\0")


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # decoders warn of broken files
def test_a_mutation_is_read_as_rgb_or_refused_by_the_error_that_names_it():
    files = pictures()
    counts: Counter[str] = Counter()
    for number in range(800):
        random = np.random.default_rng([0, number])
        format_, other = random.choice(list(files), size=2).tolist()
        damaged = io.BytesIO(mutate(files[format_], files[other], random))
        try:
            mode = as_picture(read_pixels("photo", file=damaged)).mode
            assert mode == "RGB", (number, format_)
            counts[f"{format_} read"] += 1
        except ImageReadError:
            counts[f"{format_} refused"] += 1
    assert {name.partition(" ")[0] for name in counts if name.endswith("refused")} == set(files)
    # Some damage leaves an image; a mutation may also turn one format's header into another's
    assert len({name for name in counts if name.endswith(" read")}) > 4


def test_whole_pictures_are_read_or_of_a_format_that_is_not():
    for name, content in pictures().items():
        if name in REFUSED:
            with pytest.raises(ImageReadError):
                read_pixels("photo", file=io.BytesIO(content))
        else:
            size = as_picture(read_pixels("photo", file=io.BytesIO(content))).size
            assert size == ((1024, 1024) if name == "ICNS" else (24, 24))  # which is written in sizes of icons
