"""The annotations of a miniature CUB-200-2011, with the release's oddities."""

from pathlib import Path

import pytest
import torch

from timm_moe_dg.analysis.routing.annotations import AnnotatedDomain, middles, read_cub
from timm_moe_dg.analysis.routing.chosen_images import picture_key
from timm_moe_dg.data import FolderDomain
from timm_moe_dg.errors import ArgumentError, DataError

FILES = {
    "images.txt": "1 001.Crow/Crow_1.jpg\n2 002.Owl/Owl_7.jpg\n",
    "bounding_boxes.txt": "1 10.0 20.0 30.0 40.0\n2 1.0 2.0 3.0 4.0\n",
    "parts/parts.txt": "1 back\n2 left eye\n3 right eye\n",
    "parts/part_locs.txt": "1 1 5.5 6.5 1\n1 2 0.0 0.0 0\n1 3 7.0 8.0 1\n2 1 1.0 1.0 1\n2 2 2.0 2.0 1\n2 3 0.0 0.0 0\n",
    "attributes/attributes.txt": "1 has_bill_shape::curved (up or down)\n2 has_size::small\n",
    "attributes/image_attribute_labels.txt": "1 1 1 3 12.7\n1 2 0 1 2.1\n2 1 0 4 0 9.9\n2 2 1 3 0 0 1.1\n",
}


@pytest.fixture
def cub(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "CUB_200_2011" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize("below", ["", "CUB_200_2011"])
def test_everything_is_read_and_photographs_are_known_in_other_styles(cub, below):
    annotations = read_cub(cub / below)
    paths = ["/data/Candy/002.Owl/Owl_7.png", "Natural/001.Crow/Crow_1.jpg", "001.Crow/Owl_7.jpg"]
    assert [annotations.images.get(picture_key(path)) for path in paths] == [1, 0, None]
    assert annotations.parts == ("back", "left eye", "right eye")
    assert annotations.points[0].tolist() == [[5.5, 6.5], [0, 0], [7, 8]]
    assert annotations.visible.tolist() == [[True, False, True], [True, True, False]]
    assert annotations.boxes.tolist() == [[10, 20, 30, 40], [1, 2, 3, 4]]
    assert annotations.attribute_names == ("has_bill_shape::curved (up or down)", "has_size::small")
    assert annotations.attributes.tolist() == [[True, False], [False, True]]  # fields too many do no harm


def test_a_copy_without_attributes_has_none(cub):
    (cub / "CUB_200_2011" / "attributes" / "attributes.txt").unlink()
    assert read_cub(cub).attributes is None
    (cub / "attributes.txt").write_text(FILES["attributes/attributes.txt"])  # where the release has it
    assert read_cub(cub).attributes is not None


def test_a_part_is_in_the_middle_of_its_patches_and_nowhere_without_any():
    members = torch.tensor([[[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], [[0, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0]]]).bool()
    photographs = FolderDomain("a", ("crow",), [0, 0], ["1", "2"])
    birds = AnnotatedDomain(photographs, [0, 1], ["a", "b"], members, ("beak", "tail"), None, ())
    first, second = middles(birds, ["tail", "beak"], (2, 3))
    assert first == {"tail": pytest.approx((5 / 6, 3 / 4)), "beak": pytest.approx((2 / 6, 1 / 4))}
    assert second == {"tail": pytest.approx((1 / 6, 2 / 4))}
    with pytest.raises(ArgumentError, match=r"parts='beek': no such part; did you mean beak\?"):
        middles(birds, ["beek"], (2, 3))


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("parts/part_locs.txt", "1 1 five 6.5 1\n", "part_locs.txt', line 1: .*five"),
        ("parts/part_locs.txt", "1 1\n", "part_locs.txt', line 1: '1 1' has fewer than 5 fields"),
        ("bounding_boxes.txt", "9 1 1 1 1\n", "bounding_boxes.txt', line 1: no image or part has the number '9'"),
        ("parts/part_locs.txt", None, r"cub=.*: lacks parts/part_locs.txt; give the folder CUB_200_2011"),
    ],
)
def test_a_wrong_line_or_a_missing_file_is_named(cub, name, line, message):
    path = cub / "CUB_200_2011" / name
    path.unlink()
    if line is not None:
        path.write_text(line)
    with pytest.raises(DataError, match=message):
        read_cub(cub)
