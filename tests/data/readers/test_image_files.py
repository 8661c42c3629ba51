"""Images without labels: what is found and in which order, metadata by path, unreadable files."""

import numpy as np
import pytest
import torch
from PIL import Image

from timm_moe_dg.data import EvaluationImages, Split, evaluation_transform
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.data.readers import images
from timm_moe_dg.data.readers.image_files import ImageFiles, find_images, image_loader, read_metadata
from timm_moe_dg.errors import DataError, ImageReadError


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


def test_order_and_extensions(folder):
    names = [path.removeprefix(f"{folder}/") for path in find_images([str(folder)])]
    assert names == ["a/c.jpeg", "a/z.JPG", "b.png"]
    sources = [f"{folder}/odd.data", f"{folder}/**/*.JPG", f"{folder}/a/../b.png", str(folder)]
    names = [path.removeprefix(f"{folder}/") for path in find_images(sources)]
    assert names == ["odd.data", "a/z.JPG", "a/../b.png", "a/c.jpeg"]


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


def test_metadata_by_path(folder):
    paths = find_images([str(folder)])
    table = folder / "a" / "places.csv"
    table.write_text(f"path,lon,lat\n{folder}/b.png,1.5,-2\nz.JPG,nan,nan\nelsewhere.png,7,7\nc.jpeg,3,4\n")
    np.testing.assert_array_equal(read_metadata(table, paths), np.float32([[3, 4], [np.nan, np.nan], [1.5, -2]]))
    table.write_text("path,location\nz.JPG,12\nc.jpeg,-1\n")
    ids = read_metadata(table, paths, ids=True)
    assert ids.tolist() == [-1, 12, -1]
    assert ids.dtype == np.int64
    table.write_text(f"path,lon,lat\nz.JPG,1,2\nc.jpeg,3,4\n{folder}/a/z.JPG,1,2\n")
    with pytest.raises(DataError, match=r"lines 2 and 4 have the same path '.*z\.JPG'"):
        read_metadata(table, paths)
    table.write_text("path,lon,lat\nz.JPG,200,0\n")
    with pytest.raises(DataError, match=r"column 'lon' is \['200'\] in lines 2"):
        read_metadata(table, paths)


def test_paths_of_metadata_are_compared_as_files(folder, tmp_path_factory, monkeypatch):
    """By a link to the folder, relative paths, ./ and backslashes; no path that is an image is an error."""
    link = tmp_path_factory.mktemp("links") / "site"
    link.symlink_to(folder)
    table = folder / "places.csv"
    for written in ("a/z.JPG", "./a/../a/z.JPG", "a\\z.JPG", str(folder / "a" / "z.JPG"), str(link / "a" / "z.JPG")):
        table.write_text(f"path,lon,lat\n{written},1,2\n")
        monkeypatch.chdir(folder)
        for paths in (["a/z.JPG", "b.png"], [str(link / "a" / "z.JPG"), "b.png"]):
            assert read_metadata(table, paths)[0].tolist() == [1, 2]
    table.write_text("path,lon,lat\nelsewhere/z.JPG,1,2\n")
    with pytest.raises(DataError, match=r"metadata=.*places.csv': none of its 1 paths is one of the images"):
        read_metadata(table, [str(folder / "b.png")])


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
    loader = image_loader(ImageFiles([str(tmp_path / name) for name in sizes], view), batch_size=3, workers=0)
    list(loader)
    (message,) = caplog.messages
    assert "c.png': has 500 x 600 pixels, 23 times the input of 22 x 22" in message
    images._warned.clear()
    scenes = FileDomain("a", ("x",), [0, 0], [str(tmp_path / name) for name in ("a.png", "d.png")])
    list(EvaluationImages([scenes], [Split(np.arange(2), np.arange(0))], view))
    assert "d.png': has 600 x 600 pixels" in caplog.messages[1]
    assert "into tiles" in message


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_hold_positions_images_and_metadata(folder, workers):
    paths = find_images([str(folder)])
    files = ImageFiles(paths, level, np.arange(3))
    batches = list(image_loader(files, batch_size=2, workers=workers))
    assert [positions.tolist() for positions, _, _ in batches] == [[0, 1], [2]]
    assert [values[:, 0].tolist() for _, values, _ in batches] == [[20, 10], [0]]
    assert [metadata.tolist() for _, _, metadata in batches] == [[0, 1], [2]]


def test_unreadable_files_are_named_or_left_out(folder):
    (folder / "b.png").write_bytes(b"no image")
    paths = find_images([str(folder)])
    with pytest.raises(ImageReadError, match=r"b.png"):
        list(image_loader(ImageFiles(paths, level), batch_size=2, workers=0))
    skipping = ImageFiles(paths, level, skip_unreadable=True)
    assert [batch and batch[0].tolist() for batch in image_loader(skipping, batch_size=2, workers=0)] == [[0, 1], []]
