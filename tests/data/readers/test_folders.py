"""Folders DOMAIN/CLASS/IMAGE against torchvision's ImageFolder, and what is wrong with bad ones."""

import logging
import os
import tracemalloc
from pathlib import Path
from unicodedata import normalize

import pytest
from PIL import Image
from torchvision.datasets import ImageFolder

from tests.data.copies import small, write_domains
from timm_moe_dg.data import get_benchmark, read_folder
from timm_moe_dg.data.readers.folders import DUPLICATES
from timm_moe_dg.errors import DataError, ImageReadError


def write_image(path, value=0, mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 4), (value, 10, 20)).convert(mode).save(path)


@pytest.fixture
def root(tmp_path):
    for domain in ("sketch", "Photo", "art"):
        for name in ("dog", "Cat"):
            for image in ("10.png", "9.png", "b.JPG", "nested/0.png"):
                write_image(tmp_path / domain / name / image)
    (tmp_path / "art" / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / "README.md").write_text("not a domain")
    return tmp_path


def test_order_is_that_of_image_folder(root):
    domains = read_folder(root)
    assert [domain.name for domain in domains] == ["Photo", "art", "sketch"]
    for domain in domains:
        reference = ImageFolder(str(root / domain.name))
        assert list(zip(domain.paths, domain.targets, strict=True)) == reference.samples
        assert list(domain.classes) == reference.classes
        assert len(domain) == 8


def test_hidden_files_and_folders_are_skipped(root):
    expected = [(domain.name, domain.classes, domain.paths) for domain in read_folder(root)]
    for name in ("@eaDir/dog/0.png", "art/__MACOSX/0.png", "art/dog/@eaDir/9.png", "art/dog/$RECYCLE.BIN/9.png"):
        write_image(root / name)
    (root / "art" / "dog" / "Thumbs.db").touch()
    for name in (".cache/dog/0.png", "art/.thumbnails/0.png", "art/dog/._9.png", "art/dog/.ipynb_checkpoints/9.png"):
        write_image(root / name)
    assert [(domain.name, domain.classes, domain.paths) for domain in read_folder(root)] == expected


def test_a_class_may_be_empty_in_one_domain(root):
    for image in (root / "art" / "Cat").rglob("*.*"):
        image.unlink()
    art = read_folder(root)[1]
    assert set(art.targets) == {1}
    assert art.classes == ("Cat", "dog")


def test_files_that_are_no_images_are_counted_by_kind(root, caplog):
    for name in ("a.heic", "b.HEIC", "c", "d.eps"):
        (root / "art" / "dog" / name).touch()
    for suffix in ("jfif", "JPE", "gif", "jp2"):
        Image.new("RGB", (6, 4)).save(root / "art" / "dog" / f"more.{suffix}", format="PNG")
    assert len(read_folder(root)[1]) == 12
    for kind in ("2 .heic", "1 .eps", "1 .txt", "1 no extension"):
        assert kind in caplog.text


def test_a_class_without_any_image_is_refused_unless_only_evaluated(root):
    for domain in ("sketch", "Photo", "art"):
        (root / domain / "empty").mkdir()
        (root / domain / "empty" / "0.heic").touch()
    with pytest.raises(DataError, match=r"no domain holds an image of the classes 'empty'; .*: 3 \.heic"):
        read_folder(root)
    assert read_folder(root, evaluating=True)[0].classes == ("Cat", "dog", "empty")


def test_data_for_evaluation_may_lack_classes(tmp_path):
    write_image(tmp_path / "a" / "x" / "0.png")
    write_image(tmp_path / "b" / "y" / "0.png")
    assert [list(domain.targets) for domain in read_folder(tmp_path, evaluating=True)] == [[0], [1]]


def test_two_forms_of_the_same_letters_are_one_class(tmp_path):
    for domain, form in (("a", "NFC"), ("b", "NFD")):
        write_image(tmp_path / normalize(form, f"\u00e9{domain}") / normalize(form, "L\u00f6we") / "0.png")
    domains = read_folder(tmp_path)
    assert [domain.classes for domain in domains] == [("L\u00f6we",)] * 2
    assert {domain.name for domain in domains} == {"\u00e9a", "\u00e9b"}


@pytest.mark.parametrize(
    ("first", "second"),
    [("1", "1.0"), ("1", "01"), ("1e3", "1000"), ("cat", "cat "), ("cat", "Cat"), ("a_b", "a b"), ("-0", "0")],
)
def test_classes_that_differ_by_spelling_alone_are_shown(tmp_path, first, second):
    for domain, label in (("a", first), ("b", second)):
        write_image(tmp_path / domain / label / "0.png")
    for evaluating in (False, True):
        with pytest.raises(DataError, match=r"by spelling alone: .*; give them one name") as caught:
            read_folder(tmp_path, evaluating)
        assert f"{first!r} in a" in str(caught.value)
        assert f"{second!r} in b" in str(caught.value)


@pytest.mark.parametrize("names", [("1", "10"), ("C", "C++"), ("+1", "-1"), ("1.5", "15"), ("9" * 19, "9" * 18 + "8")])
def test_classes_that_differ_by_more_are_different(tmp_path, names):
    for name in names:
        write_image(tmp_path / "a" / name / "0.png")
    assert set(read_folder(tmp_path)[0].classes) == set(names)


def test_domains_that_differ_by_spelling_alone_are_shown(tmp_path, caplog):
    for name in ("b\u00e9", "Site A", "site a"):
        write_image(tmp_path / name / "x" / "0.png")
    assert len(read_folder(tmp_path)) == 3
    assert "these domains differ by spelling alone: 'Site A' in this folder, 'site a' in this folder" in caplog.text
    write_image(tmp_path / "be\u0301" / "x" / "0.png")
    with pytest.raises(DataError, match=r"these domains differ .*be.u0301' in this folder, 'b.xe9' in"):
        read_folder(tmp_path)


def test_images_in_no_class_folder_are_counted(tmp_path, caplog):
    for name in ("a/x/0.png", "a/loose.png", "loose.JPG", "a/.hidden.png", "a/notes.txt"):
        write_image(tmp_path / "a" / "x" / "0.png")
        (tmp_path / name).write_bytes((tmp_path / "a" / "x" / "0.png").read_bytes())
    assert len(read_folder(tmp_path)[0]) == 1
    assert "2 images in no class folder are left out, such as" in caplog.text


def test_missing_folder(tmp_path):
    with pytest.raises(DataError, match=r"data_dir='.*nowhere': no such folder"):
        read_folder(tmp_path / "nowhere")


def test_empty_folder(tmp_path):
    with pytest.raises(DataError, match="holds no domain folders; expected DOMAIN/CLASS/IMAGE"):
        read_folder(tmp_path)


def test_domains_without_classes(tmp_path):
    (tmp_path / "art").mkdir()
    with pytest.raises(DataError, match="no class folders in art"):
        read_folder(tmp_path)


def test_domain_without_images(root):
    for folder in ("dog", "Cat"):
        (root / "zebra" / folder).mkdir(parents=True)
    with pytest.raises(DataError, match="domain 'zebra' holds no images"):
        read_folder(root)


def test_differing_classes_are_named_by_domain(root):
    write_image(root / "art" / "elephant" / "0.png")
    write_image(root / "sketch" / "giraffe" / "0.png")
    with pytest.raises(DataError) as caught:
        read_folder(root)
    message = str(caught.value)
    assert "'Photo' lacks elephant, giraffe" in message
    assert "'art' lacks giraffe" in message
    assert "'sketch' lacks elephant" in message


def refuse_to_list(monkeypatch, folder):
    """As for a user without permission; the user who runs the tests may have all of them."""
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path) == str(folder):
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)


@pytest.mark.parametrize("below", ["", "art", "art/dog", "art/dog/nested"])
def test_a_folder_that_cannot_be_listed_is_named(root, monkeypatch, below):
    refuse_to_list(monkeypatch, root / below)
    with pytest.raises(DataError, match=rf"folder='{root / below}': cannot be listed \(Permission denied\)"):
        read_folder(root)


@pytest.mark.parametrize("target", [".", "..", "../Cat", "../../.."])
def test_links_to_folders_below_a_class_are_refused(root, target):
    (root / "art" / "dog" / "link").symlink_to(target)
    with pytest.raises(DataError, match="dog/link': is a link, which is not followed"):
        read_folder(root)


def test_a_class_that_leads_back_is_refused(root):
    for domain in ("sketch", "Photo", "art"):
        (root / domain / "self").symlink_to(".")
    with pytest.raises(DataError, match="self/self': is a link, which is not followed"):
        read_folder(root)


def test_two_names_of_one_domain_are_refused(root):
    (root / "copy").symlink_to("art")
    with pytest.raises(DataError, match="the domain 'art' has two names; remove the link to it"):
        read_folder(root)


@pytest.mark.parametrize("link", ["lost", "art/lost"])
def test_links_to_nothing_are_noticed(root, caplog, link):
    (root / link).symlink_to("disk/that/is/not/there")
    assert len(read_folder(root)) == 3
    assert f"links to nothing are left out: {root / link}" in caplog.text


@pytest.mark.parametrize("place", ["train", "."])
def test_a_level_of_folders_too_many_is_noticed(tmp_path, caplog, place):
    for path in ("train/a/x/1.png", "train/b/x/1.png", "test/a/x/1.png", "test/b/x/1.png"):
        write_image(tmp_path / path)
    read_folder(tmp_path / place)
    message = "all images lie in folders of the classes a, b; if these are domains, give the folder of them"
    assert (message in caplog.text) == (place == ".")


def test_domains_classes_and_images_may_be_links(root, tmp_path_factory):
    other = tmp_path_factory.mktemp("links")
    (other / "art").symlink_to(root / "art")
    (other / "photo").mkdir()
    (other / "photo" / "Cat").symlink_to(root / "Photo" / "Cat")
    (other / "photo" / "dog").mkdir()
    (other / "photo" / "dog" / "0.png").symlink_to(root / "Photo" / "dog" / "9.png")
    assert [(domain.name, len(domain)) for domain in read_folder(other)] == [("art", 8), ("photo", 5)]
    assert read_folder(other)[1].image(4).size == (6, 4)


@pytest.mark.parametrize("content", [b"", b"not an image at all"])
def test_unreadable_image_is_named(root, content):
    domain = read_folder(root)[0]
    path = domain.paths[2]
    Path(path).write_bytes(content)
    with pytest.raises(ImageReadError) as caught:
        domain.image(2)
    assert path in str(caught.value)


@pytest.mark.parametrize("place", ["among", "beside"])
def test_listed_duplicates_are_left_out(tmp_path, place, caplog):
    row = small("DomainNet", num_classes=7)
    root = write_domains(tmp_path / "domain_net", row.domains)
    listed = ["clipart/class_1/clipart_0.png", "real/class_6/real_1.png", "real/class_6/removed_already.png"]
    folder = root if place == "among" else tmp_path
    (folder / DUPLICATES).write_text("\n".join(listed) + "\n\n")
    with caplog.at_level(logging.INFO, "timm_moe_dg"):
        domains = row.read(tmp_path)
    everything = {path.relative_to(root).as_posix() for path in root.rglob("*.png")}
    actual = {path.removeprefix(f"{root}/") for domain in domains for path in domain.paths}
    assert actual == everything - set(listed)
    assert f"2 of the 3 images listed in {folder / DUPLICATES} left out" in caplog.text
    for domain in domains:
        assert all(domain.classes[target] in path for target, path in zip(domain.targets, domain.paths, strict=True))


def test_without_a_list_nothing_is_left_out(tmp_path):
    row = small("DomainNet", num_classes=7)
    write_domains(tmp_path, row.domains)
    assert [len(domain) for domain in row.read(tmp_path)] == [14] * 6


def test_a_list_that_is_no_text_is_named(tmp_path):
    row = small("DomainNet", num_classes=7)
    write_domains(tmp_path, row.domains)
    (tmp_path / DUPLICATES).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=rf"{DUPLICATES}.*cannot be read as a list of images"):
        row.read(tmp_path)


@pytest.mark.parametrize("dataset", ["folder", "place_folder"])
def test_an_image_takes_its_path_and_some_numbers(tmp_path, dataset):
    names = [f"{place}/{label}/photograph_{number:04}.png" for place in "ab" for label in "xy" for number in range(500)]
    rows = ["path,label,lon,lat,split,group,year"]
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        part, group = (("train", "north"), ("id_val", "north"), ("id_test", "north"), ("ood_test", "south"))[number % 4]
        rows.append(f"{name},{name.split('/')[1]},{number / 90:.6f},1.5,{part},{group},2004")
    (tmp_path / "metadata.csv").write_text("\n".join(rows))
    columns = ("year",) if dataset == "place_folder" else ()
    get_benchmark(dataset).read(tmp_path, columns)  # what is kept from the first time on does not count
    tracemalloc.start()
    domains = get_benchmark(dataset).read(tmp_path, columns)
    size = tracemalloc.get_traced_memory()[0] / len(names)
    tracemalloc.stop()
    assert sum(map(len, domains)) == len(names)
    # A list of strings takes the path and 57 bytes, and as much again in each worker
    assert size < 1.3 * (len(domains[0].file(0)) + 60)
