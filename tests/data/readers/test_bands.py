"""Images of four bands are read as three, which is said once; those of more are refused."""

import logging
import struct

import pytest
from PIL import Image

from timm_moe_dg.data.readers import images
from timm_moe_dg.errors import ImageReadError


def test_a_file_of_four_bands_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warned_bands", set())
    for name in ("a.tif", "b.tif"):
        Image.new("RGBA", (4, 4)).save(tmp_path / name)
    Image.new("RGB", (4, 4)).save(tmp_path / "c.tif")
    with caplog.at_level(logging.WARNING):
        modes = [images.read_image(str(tmp_path / name)).mode for name in ("c.tif", "a.tif", "b.tif")]
    assert modes == ["RGB"] * 3
    (message,) = caplog.messages
    assert "a.tif': has 4 bands (R, G, B, A), read as three" in message


def five_bands(path, photometric):
    """Writes an uncompressed TIFF file of five bands, which Pillow cannot."""
    pixels, bits = bytes(range(80)), struct.pack("<5H", *[8] * 5)  # 4 x 4 pixels
    tags = {256: 4, 257: 4, 259: 1, 262: photometric, 277: 5, 278: 4, 279: len(pixels), 284: 1}
    start = 8 + 2 + 12 * (len(tags) + 3) + 4
    entries = {tag: struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()}
    entries[258] = struct.pack("<HHII", 258, 3, 5, start)
    entries[273] = struct.pack("<HHII", 273, 4, 1, start + len(bits))
    entries[338] = struct.pack("<HHIHH", 338, 3, 2, 0, 0)
    directory = struct.pack("<H", len(entries)) + b"".join(entries[tag] for tag in sorted(entries)) + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + directory + bits + pixels)


@pytest.mark.parametrize("photometric", [1, 2])  # as gray with four more, and as RGB with two more
def test_a_file_of_five_bands_is_refused_with_what_helps(tmp_path, photometric):
    five_bands(tmp_path / "a.tif", photometric)
    with pytest.raises(ImageReadError, match=r"a.tif': cannot be decoded .*save three of them as RGB"):
        images.read_image(str(tmp_path / "a.tif"))


def test_pillow_reads_fewer_than_five_bands_by_itself(tmp_path):
    """The reason for the refusal: the others would be gone without a word."""
    five_bands(tmp_path / "a.tif", 2)
    with Image.open(tmp_path / "a.tif") as image:
        assert len(image.getbands()) < 5
