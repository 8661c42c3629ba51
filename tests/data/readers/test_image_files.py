"""Images without labels: what is found and in which order, metadata by path, unreadable files."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from timm_moe_dg.data import EvaluationImages, Split, evaluation_transform
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.data.readers import images
from timm_moe_dg.data.readers.csv_tables import Metadata
from timm_moe_dg.data.readers.folders import find_images, image_paths
from timm_moe_dg.errors import DataError
from timm_moe_dg.inference.image_rows import ImageRow, MetadataNames, RowImages, batches, row_loader


@pytest.fixture
def folder(tmp_path):
    for number, name in enumerate(["b.png", "a/z.JPG", "a/c.jpeg", "odd.data"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (number * 10, 0, 0)).save(path, format="PNG")
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def level(image):
    return torch.tensor(image.getpixel((0, 0)))


def decoded(paths, view=level, workers=0, metadata=None):
    rows = [ImageRow(path, metadata and metadata[position]) for position, path in enumerate(paths)]
    images = RowImages(view, MetadataNames())
    return list(row_loader(images, batches([(0, rows)], batch_size=2), workers))


def test_order_and_extensions(folder):
    names = [path.removeprefix(f"{folder}/") for path in find_images([str(folder)])]
    assert names == ["a/c.jpeg", "a/z.JPG", "b.png"]
    sources = [f"{folder}/odd.data", f"{folder}/**/*.JPG", f"{folder}/a/../b.png", str(folder)]
    names = [path.removeprefix(f"{folder}/") for path in find_images(sources)]
    assert names == ["odd.data", "a/z.JPG", "a/../b.png", "a/c.jpeg"]


def test_folders_that_a_pattern_matches_are_named(folder, caplog):
    for pattern in (f"{folder}/*", f"{folder}/*", f"{folder}/**"):
        find_images([pattern])
    assert [record.getMessage() for record in caplog.records] == [
        f"images='{folder}/*': matches folders (1), which are not searched; use ** to search them"
    ]


def test_hidden_files_count_only_if_they_are_named(folder):
    for name in ("._b.png", ".thumbnails/b.png", "a/._z.JPG"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\0\5\x16\7")
    expected = [str(folder / name) for name in ("a/c.jpeg", "a/z.JPG", "b.png")]
    assert find_images([str(folder)]) == expected
    assert sorted(find_images([f"{folder}/*.png", f"{folder}/**/*.[jJ]*"])) == expected
    assert find_images([f"{folder}/._b.png"]) == [f"{folder}/._b.png"]


@pytest.mark.parametrize("source", ["absent", "absent/", "*.gif", "empty"])
def test_a_source_without_images_is_named(folder, source):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"images=.*no such file, or no image"):
        find_images([str(folder), str(folder / source)])


def test_a_file_comes_once_whatever_names_it(folder, monkeypatch):
    """As with a set of all paths, of which only those of files and patterns are in memory."""
    monkeypatch.chdir(folder)
    (folder / "ab").mkdir()
    Image.new("RGB", (4, 4)).save("ab/.hidden.png")
    Image.new("RGB", (4, 4)).save("a-b.png")
    sources = ["a", "ab/.hidden.png", ".", "./a/../a", "*.data", "odd.data", "b.png"]
    names = [os.path.normpath(path) for path in find_images(sources)]
    assert names == ["a/c.jpeg", "a/z.JPG", "ab/.hidden.png", "a-b.png", "b.png", "odd.data"]


def test_folders_are_read_as_their_images_are_taken(folder):
    paths = image_paths([str(folder)])
    assert next(paths).endswith("a/c.jpeg")
    (folder / "a" / "d.png").touch()  # the names of this folder were read
    (folder / "b.png").unlink()
    assert [os.path.basename(path) for path in paths] == ["z.JPG", "b.png"]


def test_metadata_by_path(folder):
    paths = find_images([str(folder)])
    table = folder / "a" / "places.csv"
    table.write_text(f"path,lon,lat\n{folder}/b.png,1.5,-2\nz.JPG,nan,nan\nelsewhere.png,7,7\nc.jpeg,3,4\n")
    np.testing.assert_array_equal([Metadata(table).of(path) for path in paths], [[3, 4], [np.nan, np.nan], [1.5, -2]])
    table.write_text("path,location\nz.JPG,12\nc.jpeg,-1\n")
    assert [Metadata(table, ids=True).of(path) for path in paths] == [(-1,), (12,), None]
    table.write_text(f"path,lon,lat\nz.JPG,1,2\nc.jpeg,3,4\n{folder}/a/z.JPG,1,2\n")
    with pytest.raises(DataError, match=r"lines 2 and 4 have the same path '.*z\.JPG'"):
        Metadata(table)
    table.write_text("path,lon,lat\nz.JPG,200,0\n")
    with pytest.raises(DataError, match=r"column 'lon' is \['200'\] in lines 2"):
        Metadata(table)


def test_paths_of_metadata_are_compared_as_files(folder, tmp_path_factory, monkeypatch):
    """By a link to the folder, relative paths, ./ and backslashes; no path that is an image is an error."""
    link = tmp_path_factory.mktemp("links") / "site"
    link.symlink_to(folder)
    table = folder / "places.csv"
    for written in ("a/z.JPG", "./a/../a/z.JPG", "a\\z.JPG", str(folder / "a" / "z.JPG"), str(link / "a" / "z.JPG")):
        table.write_text(f"path,lon,lat\n{written},1,2\n")
        monkeypatch.chdir(folder)
        for path in ("a/z.JPG", str(link / "a" / "z.JPG")):
            assert Metadata(table).of(path) == (1, 2)
    (link.parent / "other.JPG").symlink_to(folder / "a" / "z.JPG")
    assert Metadata(table).of(str(link.parent / "other.JPG")) == (1, 2)
    Metadata(table).check(["b.png", "a/z.JPG"])
    table.write_text("path,lon,lat\nelsewhere/z.JPG,1,2\n")
    with pytest.raises(DataError, match=r"metadata=.*places.csv': none of its 1 paths is one of the images"):
        Metadata(table).check([str(folder / "b.png")])


def test_files_left_out_are_counted_and_system_folders_skipped(folder, caplog):
    (folder / "a" / "phone.heic").touch()
    (folder / "@eaDir").mkdir()
    (folder / "@eaDir" / "b.png").touch()
    assert len(find_images([str(folder)])) == 3
    for kind in ("1 .heic", "1 .data", "1 .txt"):
        assert kind in caplog.text
    assert str(folder / "@eaDir" / "b.png") not in find_images([f"{folder}/**/*.png"])


def test_images_many_times_the_input_are_warned_of_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(images, "_warned", set())
    sizes = {"a.png": (403, 302), "b.png": (1000, 100), "c.png": (500, 600), "d.png": (600, 600)}
    for name, size in sizes.items():
        Image.new("RGB", size).save(tmp_path / name)
    view = evaluation_transform((22, 22), [0.5] * 3, [0.5] * 3)  # as 224 for a photograph of 4032 x 3024 pixels
    decoded([str(tmp_path / name) for name in sizes], view)
    (message,) = caplog.messages
    assert "c.png': has 500 x 600 pixels, 23 times the input of 22 x 22" in message
    images._warned.clear()
    scenes = FileDomain("a", ("x",), [0, 0], [str(tmp_path / name) for name in ("a.png", "d.png")])
    list(EvaluationImages([scenes], [Split(np.arange(2), np.arange(0))], view))
    assert "d.png': has 600 x 600 pixels" in caplog.messages[1]
    assert "into tiles" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_rows_images_and_metadata(folder, workers):
    paths = find_images([str(folder)])
    found = decoded(paths, workers=workers, metadata=[(0.0, 1.0), (2.0, 3.0), None])
    assert [batch.positions for batch in found] == [[0, 1], [0]]
    assert [[row.path for row in batch.batch.rows] for batch in found] == [paths[:2], paths[2:]]
    assert [batch.images[:, 0].tolist() for batch in found] == [[20, 10], [0]]
    assert found[0].metadata.tolist() == [[0, 1], [2, 3]]
    assert found[1].metadata.isnan().all()


def test_unreadable_files_are_named_and_left_out(folder):
    (folder / "a" / "z.JPG").write_bytes(b"no image")
    paths = find_images([str(folder)])
    found = decoded(paths)
    assert [batch.positions for batch in found] == [[0], [0]]
    assert [len(batch.reasons) for batch in found] == [1, 0]
    assert "z.JPG" in found[0].reasons[0]
