"""Runs opened for analysis: images are left out as the run did, and the same picture of domains has one column."""

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.saved_run import saved_run
from timm_moe_dg.analysis.run_view import choose_images, choose_pictures, class_index, open_run, picture_names
from timm_moe_dg.data import FolderDomain
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.errors import DataError, ImageReadError


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on two domains of three images, one of which is damaged."""
    root = tmp_path_factory.mktemp("root")
    for domain in ("art", "photo"):
        (root / "images" / domain / "cat").mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8)).save(root / "images" / domain / "cat" / f"{index}.png")
    (root / "images" / "photo" / "cat" / "1.png").write_bytes(b"garbage")
    args = {"dataset": "folder", "data_dir": str(root / "images"), "test_domains": [0], "img_size": 32}
    saved_run(root / "run", "gmoe_tiny_patch16", ("cat", "dog"), args)
    (root / "run" / "results.jsonl").touch()
    return root / "run"


def names(rows):
    return [image.name for _, row in rows for image in row if image is not None]


def test_damaged_images_of_the_data_are_left_out_if_the_run_left_them_out(run):
    files = [str(run.parent / "images" / "photo")]
    for images in (None, files):
        with pytest.raises(ImageReadError, match=r"photo/cat/1\.png': cannot be decoded"):
            choose_images(open_run(run), images, None, 4)
    assert [len(domain) for domain in open_run(run).domains] == [3, 3]
    other = run.with_name("skipping")
    other.mkdir()
    (other / "best").symlink_to(run / "best")
    (other / "results.jsonl").touch()
    args = yaml.safe_load((run / "args.yaml").read_text())
    (other / "args.yaml").write_text(yaml.safe_dump({**args, "skip_unreadable": True}))
    view = open_run(other, split_by_photograph=True)
    assert [len(domain) for domain in view.domains] == [3, 2]
    assert names(choose_images(view, None, None, 4)) == ["0", "2", "1", "0", "2"]
    assert names(choose_images(view, [f"{files[0]}/cat/0.png"], None, 4)) == ["0.png"]


def domain(*paths):
    return FolderDomain(paths[0][0], ("cat", "dog"), [0 if "/cat/" in path else 1 for path in paths], paths)


def test_the_same_stem_stands_in_one_column():
    domains = [domain("a/cat/1.png", "a/cat/2.png", "a/dog/9.png"), domain("b/dog/9.png", "b/cat/2.jpg", "b/cat/3.jpg")]
    assert choose_pictures(domains, 0, 2, by_path=True) == [[1, 0], [1, None]]  # 2 is in both, comes first; then 1
    assert choose_pictures(domains, 0, 9, by_path=True) == [[1, 0, None], [1, None, 2]]
    assert choose_pictures(domains, 1, 4, by_path=True) == [[2], [0]]
    # The same file names in each hospital are other patients
    assert choose_pictures(domains, 0, 9) == [[0, 1], [1, 2]]
    assert picture_names(domains[0], by_path=False) is None


def test_domains_without_common_pictures_or_names_have_their_own():
    domains = [domain("a/cat/1.png", "a/cat/2.png"), domain("b/cat/3.png", "b/dog/4.png")]
    assert choose_pictures(domains, 0, 2, by_path=True) == [[0, 1], [0, None]]
    nameless = FileDomain("a", ("cat", "dog"), [1, 0, 0], [np.zeros((2, 2), np.uint8)] * 3)
    assert picture_names(nameless, by_path=True) is None
    assert choose_pictures([nameless, nameless], 0, 5) == [[1, 2], [1, 2]]


def test_classes_are_named():
    domains = [domain("a/cat/1.png")]
    assert (class_index(domains, None), class_index(domains, "dog")) == (0, 1)
    with pytest.raises(DataError, match=r"class='cow': no such class; choose from cat, dog"):
        class_index(domains, "cow")
    with pytest.raises(DataError, match="class='dog': no domain has an image"):
        choose_pictures(domains, 1, 3)
