"""Mutated images: two thousand in the suite; a hundred thousand by hand, see mutated_images.py."""

import io

import pytest
from PIL import Image

from tests.faults.mutated_images import REFUSED, attack, pictures, summary
from timm_moe_dg.data.bands import as_picture
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.errors import ImageReadError


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # decoders say of broken files what they think
def test_no_mutation_raises_anything_but_the_error_that_names_it():
    counts, findings = attack(range(2000))
    assert findings == []
    assert sum(counts.values()) == 2000
    formats = set(pictures())
    assert {name.partition(" ")[0] for name in counts if name.endswith("refused")} == formats
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


def test_the_attack_sees_what_goes_wrong():
    def read(name: str, file: io.BytesIO) -> Image.Image:
        raise KeyError(name)

    counts, findings = attack(range(3), read=read)
    assert not counts
    assert [line.partition(" ")[0] for line in findings] == ["0", "1", "2"]
    assert summary(counts, findings) == "3 mutated images: 0 read, 0 refused by name, 3 uncaught"
    _, (line,) = attack([1], read=lambda name, file: Image.new("L", (1, 1)))
    assert line.endswith("mode L")
