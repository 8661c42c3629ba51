"""Folders DOMAIN/CLASS/IMAGE against torchvision's ImageFolder, images of any sources, and bad folders."""

import os
from unicodedata import normalize

import pytest
from torchvision.datasets import ImageFolder

from tests.data.files import write_image
from timm_moe_dg.data import read_folder
from timm_moe_dg.data.readers.folders import find_images
from timm_moe_dg.errors import DataError

DOMAINS = ("Photo", "art", "sketch")


@pytest.fixture
def root(tmp_path):
    for domain in DOMAINS:
        for name in ("dog", "Cat"):
            for image in ("10.png", "9.png", "b.JPG", "nested/0.png"):
                write_image(tmp_path / domain / name / image)
    (tmp_path / "art" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "README.md").write_text("not a domain")
    return tmp_path


def read(root):
    return [(domain.name, domain.classes, domain.paths) for domain in read_folder(root)]


def test_order_is_that_of_image_folder(root):
    domains = read_folder(root)
    assert [domain.name for domain in domains] == list(DOMAINS)
    for domain in domains:
        reference = ImageFolder(str(root / domain.name))
        assert list(zip(domain.paths, domain.targets, strict=True)) == reference.samples
        assert list(domain.classes) == reference.classes
        assert len(domain) == 8


def test_hidden_files_and_folders_are_skipped(root):
    expected = read(root)
    hidden = ["@eaDir/dog/0.png", "art/__MACOSX/0.png", "art/dog/@eaDir/9.png", "art/dog/$RECYCLE.BIN/9.png"]
    hidden += [".cache/dog/0.png", "art/.thumbnails/0.png", "art/dog/._9.png", "art/dog/.ipynb_checkpoints/9.png"]
    for name in hidden:
        write_image(root / name)
    (root / "art" / "dog" / "Thumbs.db").touch()
    assert read(root) == expected


def test_a_class_may_be_empty_in_one_domain_and_in_all_that_are_only_evaluated(root):
    for image in (root / "art" / "Cat").rglob("*.*"):
        image.unlink()
    art = read_folder(root)[1]
    assert set(art.targets) == {1}
    assert art.classes == ("Cat", "dog")
    for domain in DOMAINS:
        (root / domain / "empty").mkdir()
        (root / domain / "empty" / "0.heic").touch()
    with pytest.raises(DataError, match=r"classes 'empty'; .*: 3 \.heic"):
        read_folder(root)
    assert read_folder(root, evaluating=True)[0].classes == ("Cat", "dog", "empty")


def test_two_forms_of_the_same_letters_are_one_class(tmp_path):
    for domain, form in (("a", "NFC"), ("b", "NFD")):
        write_image(tmp_path / normalize(form, f"\u00e9{domain}") / normalize(form, "L\u00f6we") / "0.png")
    domains = read_folder(tmp_path)
    assert [domain.classes for domain in domains] == [("L\u00f6we",)] * 2
    assert {domain.name for domain in domains} == {"\u00e9a", "\u00e9b"}


def test_domains_that_differ_by_spelling_alone_are_shown(tmp_path, caplog):
    for name in ("b\u00e9", "Site A", "site a"):
        write_image(tmp_path / name / "x" / "0.png")
    assert len(read_folder(tmp_path)) == 3
    assert "these domains differ by spelling alone: 'Site A' in this folder, 'site a' in this folder" in caplog.text
    write_image(tmp_path / "be\u0301" / "x" / "0.png")
    with pytest.raises(DataError, match=r"domains .*be.u0301' in this folder, 'b.xe9' in"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("files", "folders", "message"),
    [
        ([], [], "data_dir=.*domain folders"),
        ([], ["art"], "class folders in art"),
        (["a/dog/0.png", "a/Cat/0.png"], ["zebra/dog", "zebra/Cat"], "domain 'zebra'"),
        (["a/x/0.png", "a/y/0.png", "b/x/0.png", "c/z/0.png"], [], "'a' lacks z; 'b' lacks y, z; 'c' lacks x, y"),
    ],
)
def test_a_folder_without_domains_classes_or_images_is_refused(tmp_path, files, folders, message):
    for name in files:
        write_image(tmp_path / name)
    for name in folders:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(DataError, match=message):
        read_folder(tmp_path)


@pytest.mark.parametrize("below", ["", "art", "art/dog", "art/dog/nested"])
def test_a_folder_that_cannot_be_listed_is_named(root, monkeypatch, below):
    """As for a user without permission; the user who runs the tests may have all of them."""
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path) == str(root / below):
            raise PermissionError(13, "Permission denied", str(root / below))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match=rf"folder='{root / below}': .*Permission denied"):
        read_folder(root)


def test_a_name_that_is_no_utf_8_is_refused(root):
    os.mkdir(os.fsencode(root) + b"/\xff")
    with pytest.raises(DataError, match=r"folder=.*UTF-8"):
        read_folder(root)


@pytest.mark.parametrize(
    ("link", "target", "message"),
    [
        *(("art/dog/link", target, "dog/link': is a link") for target in (".", "..", "../Cat", "../../..")),
        ("art/self", ".", "self/self': is a link"),  # a class that leads back
        ("copy", "art", "domain 'art' has two names"),
    ],
)
def test_links_that_lead_to_the_same_images_are_refused(root, link, target, message):
    (root / link).symlink_to(target)
    with pytest.raises(DataError, match=message):
        read_folder(root)


@pytest.mark.parametrize("link", ["lost", "art/lost"])
def test_links_to_nothing_are_noticed(root, caplog, link):
    (root / link).symlink_to("disk/that/is/not/there")
    assert len(read_folder(root)) == 3
    assert f"links to nothing are left out: {root / link}" in caplog.text


def test_domains_classes_and_images_may_be_links(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("links")
    (other / "art").symlink_to(root / "art")
    (other / "photo").mkdir()
    (other / "photo" / "Cat").symlink_to(root / "Photo" / "Cat")
    (other / "photo" / "dog").mkdir()
    (other / "photo" / "dog" / "0.png").symlink_to(root / "Photo" / "dog" / "9.png")
    assert [(domain.name, len(domain)) for domain in read_folder(other)] == [("art", 8), ("photo", 5)]
    assert read_folder(other)[1].image(4).size == (4, 4)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, in which hidden files are no images."""
    for name in ("b.png", "a-b.png", "a/z.JPG", "a/c.jpeg", "ab/.hidden.png"):
        write_image(tmp_path / name)
    (tmp_path / "odd.data").write_bytes((tmp_path / "b.png").read_bytes())
    for name in ("notes.txt", "._b.png", ".thumbnails/b.png", "a/._z.JPG", "@eaDir/b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (".", "a-b.png a/c.jpeg a/z.JPG b.png"),
        ("odd.data **/*.JPG a/../b.png .", "odd.data a/z.JPG b.png a-b.png a/c.jpeg"),
        # A file comes once, whatever names it
        ("a ab/.hidden.png . ./a/../a *.data b.png", "a/c.jpeg a/z.JPG ab/.hidden.png a-b.png b.png odd.data"),
        # Hidden files count only if they are named
        ("**/*.png **/*.[jJ]*", "a-b.png b.png a/c.jpeg a/z.JPG"),
        ("._b.png", "._b.png"),
    ],
)
def test_images_come_in_the_order_of_sources_and_paths(folder, sources, expected):
    assert [os.path.normpath(path) for path in find_images(sources.split())] == expected.split()


@pytest.mark.parametrize("source", ["absent", "absent/", "*.gif", "empty"])
def test_a_source_without_images_is_refused(folder, source):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=r"images="):
        list(find_images([str(folder), source]))
