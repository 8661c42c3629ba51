"""Patches of parts, and the annotations of a miniature CUB-200-2011, with the release's oddities."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from timm_moe_dg.analysis.annotations import (
    annotate,
    area_members,
    patch_centers,
    point_members,
    read_cub,
)
from timm_moe_dg.analysis.run_view import picture_key
from timm_moe_dg.data import Domain, FolderDomain
from timm_moe_dg.data.domains import FileDomain
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


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("parts/part_locs.txt", "1 1 five 6.5 1\n", "part_locs.txt': .*five.* row 0"),
        ("parts/part_locs.txt", "1 1\n", "part_locs.txt': .* row 1 with 2 columns"),
        ("bounding_boxes.txt", "9 1 1 1 1\n", "bounding_boxes.txt': .* the number 9"),
        ("images.txt", "1\n", "images.txt': "),
        ("parts/part_locs.txt", None, "cub=.*: lacks parts/part_locs.txt"),
    ],
)
def test_a_wrong_line_or_a_missing_file_is_named(cub, name, line, message):
    path = cub / "CUB_200_2011" / name
    path.unlink()
    if line is not None:
        path.write_text(line)
    with pytest.raises(DataError, match=message):
        read_cub(cub)


def test_centers_run_in_rows():
    centers = patch_centers((2, 3), (32, 48))
    assert centers.tolist() == [[8, 8], [24, 8], [40, 8], [8, 24], [24, 24], [40, 24]]


def test_the_nearest_nine_by_hand():
    """14 x 14 patches of 16 pixels: at a center a 3 x 3 block; in a corner the nine of its quarter disc."""
    points, box = torch.tensor([[[5 * 16 + 8.0, 3 * 16 + 8.0], [0.0, 0.0]]]), torch.tensor([[0.0, 0.0, 224.0, 224.0]])
    members = point_members(points, torch.ones(1, 2).bool(), box, patch_centers((14, 14), (224, 224)))
    block, corner, _ = ([int(index) for index in part.nonzero()] for part in members[0])
    assert block == [r * 14 + c for r in (2, 3, 4) for c in (4, 5, 6)]
    squares = {r * 14 + c: (16 * c + 8) ** 2 + (16 * r + 8) ** 2 for r in range(14) for c in range(14)}
    nearest = sorted(squares, key=lambda index: (squares[index], index))[:9]  # ties: the lower index
    assert corner == sorted(nearest)


def test_points_count_where_they_are_visible_and_the_rest_of_the_box_is_no_background():
    centers = patch_centers((4, 4), (64, 64))
    points = torch.tensor([[[24.0, 24.0], [40.0, 40.0]]])
    members = point_members(points, torch.tensor([[True, False]]), torch.tensor([[16.0, 16.0, 32.0, 32.0]]), centers)
    assert members.shape == (1, 3, 16)
    assert members[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert not members[0, 1].any()  # not visible
    assert (~members[0, 2]).nonzero().flatten().tolist() == [5, 6, 9, 10]


def test_areas_count_for_the_part_with_most_pixels():
    maps = torch.zeros(1, 4, 4, dtype=torch.long)
    maps[0, 0, :2] = 1
    maps[0, 1, 0] = 1  # three of four pixels
    maps[0, 2:, 2] = 2  # two of four: a tie with the background
    maps[0, 2:, 0:2] = 3
    assert area_members(maps, 4, (2, 2))[0].long().argmax(0).tolist() == [1, 0, 3, 0]


def test_sides_need_not_be_multiples_of_the_grid():
    maps = torch.zeros(1, 3, 5, dtype=torch.long)
    maps[0, :, 2:] = 1  # the middle column counts for both halves
    assert area_members(maps, 2, (1, 2))[0].long().argmax(0).tolist() == [0, 1]
    assert area_members(maps[:, :1, :1], 2, (2, 2))[0].long().argmax(0).tolist() == [0, 0, 0, 0]


@dataclass(frozen=True, eq=False)
class Arrays(Domain):
    """A user's domain in memory."""

    part_maps = np.array([[[0, 0, 1, 1]] * 2, [[1, 1, 0, 0]] * 2], dtype=np.uint8)
    part_names = ("ground", "leaf")
    attributes = np.array([[True, False], [False, True]])
    attribute_names = ("size::small", "size::large")

    def image(self, index):
        raise NotImplementedError


class Files(FileDomain):
    """A user's domain of files."""

    part_maps, part_names = Arrays.part_maps, Arrays.part_names
    attributes, attribute_names = Arrays.attributes, Arrays.attribute_names


class PhotographsInFolders(Files, FolderDomain):
    """A user's domain of files CLASS/IMAGE."""


class WithoutAttributes(FileDomain):
    """A domain that lacks two of the four."""

    part_maps, part_names = Arrays.part_maps, Arrays.part_names


def view_of(kind, shares_photographs=False, **options):
    domains = [kind(name, ("c",), [0, 0], [f"{name}/c/0.png", f"{name}/c/1.png"], **options) for name in "ab"]
    return SimpleNamespace(domains=domains, args={"dataset": "x"}, shares_photographs=shares_photographs)


@pytest.mark.parametrize(
    ("view", "pictures"),
    [
        (view_of(Arrays, pictures=["one", "two"]), ["one", "two", "two"]),
        (view_of(Arrays), ["a/0", "a/1", "b/1"]),  # of an equal position, but not the same picture
        (view_of(Files, pictures=["one", "two"]), ["one", "two", "two"]),
        (view_of(Files), ["a/0", "a/1", "b/1"]),
        (view_of(PhotographsInFolders, shares_photographs=True), ["c/0", "c/1", "c/1"]),
    ],
)
def test_domains_of_a_user_with_part_maps_are_annotated(view, pictures):
    first, second = annotate(view, [[0, 1], [1]], (1, 2), None)
    assert first.members.long().argmax(1).tolist() == [[0, 1], [1, 0]]
    assert second.members.long().argmax(1).tolist() == [[1, 0]]
    assert [*first.pictures, *second.pictures] == pictures
    assert (first.domain, first.positions, second.positions) == (view.domains[0], [0, 1], [1])
    assert (first.parts, first.attribute_names) == (("ground", "leaf"), ("size::small", "size::large"))
    assert second.attributes.tolist() == [[False, True]]


@pytest.mark.parametrize("kind", [FolderDomain, WithoutAttributes])
def test_a_domain_without_part_maps_or_attributes_is_refused(kind):
    view = view_of(Arrays)
    view.domains[1] = view_of(kind).domains[1]
    with pytest.raises(ArgumentError, match="cub=None"):
        annotate(view, [[0], [0]], (1, 2), None)
