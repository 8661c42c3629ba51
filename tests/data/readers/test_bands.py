"""Images of four bands are read as three, which is said once."""

import logging

from PIL import Image

from timm_moe_dg.data.readers import images


def test_a_file_of_four_bands_says_so_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_SAID", set())
    for name in ("a.tif", "b.tif"):
        Image.new("RGBA", (4, 4)).save(tmp_path / name)
    Image.new("RGB", (4, 4)).save(tmp_path / "c.tif")
    with caplog.at_level(logging.WARNING):
        modes = [images.read_image(str(tmp_path / name)).mode for name in ("c.tif", "a.tif", "b.tif")]
    assert modes == ["RGB"] * 3
    (message,) = caplog.messages
    assert "a.tif': has 4 bands (R, G, B, A), read as three" in message
