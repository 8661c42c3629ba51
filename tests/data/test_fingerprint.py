"""Fingerprints: the same wherever the data lies, and another after each change, which is named."""

import shutil
from dataclasses import replace

import datasets
import numpy as np
import pytest
from PIL import Image

from tests.data.files import write_csv
from tests.data.readers.test_hub_data import write as write_hub
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.data.inspection import difference, fingerprint, same_images, short, with_readable
from timm_moe_dg.data.readers.digits import CLASSES, DigitsDomain


def folder(root):
    """Two domains of two classes; nobody decodes the files."""
    for domain in ("art", "photo"):
        for label in ("cat", "dog"):
            (root / domain / label).mkdir(parents=True)
            for number in range(3):
                (root / domain / label / f"{number}.png").write_bytes(bytes(10 + number))
    return root


def of_folder(root):
    return fingerprint(get_benchmark("folder").read(root))


def test_a_moved_folder_has_the_same_fingerprint_and_a_renamed_domain_the_same_images(tmp_path, monkeypatch):
    before = of_folder(folder(tmp_path / "data"))
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(tmp_path / "data", tmp_path / "elsewhere" / "images")
    monkeypatch.chdir(tmp_path)
    for place in (moved, "elsewhere/images"):
        assert of_folder(place) == before
    assert short(of_folder(moved)) == short(before)
    (moved / "photo").rename(moved / "zebra")
    renamed = of_folder(moved)
    assert difference(before, renamed) == "the domains are art, zebra and were art, photo"
    assert same_images(before[1], renamed[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cat: (cat / "0.png").rename(cat / "7.png"), "the names of images"),
        (lambda cat: (cat / "0.png").write_bytes(bytes(99)), "the sizes or pixels of images"),
        (lambda cat: (cat / "new.png").touch(), "the number of images (7, and it was 6)"),
        (lambda cat: (cat / "0.png").unlink(), "the number of images (5, and it was 6)"),
        (lambda cat: (cat / "2.png").rename(cat.parent / "dog" / "20.png"), "the names of images"),
    ],
)
def test_every_change_of_files_is_named(tmp_path, change, words):
    before = of_folder(folder(tmp_path))
    change(tmp_path / "photo" / "cat")
    after = of_folder(tmp_path)
    assert short(after) != short(before)
    assert difference(before, after) == f"domain 'photo' differs in {words}"


@pytest.mark.parametrize("side", [8, 600])
def test_other_images_of_equal_names_and_sizes_are_other_images(tmp_path, side):
    """As those of formats without compression, with borders or without."""
    for root in ("old", "new", "copy"):
        for number in range(3):
            (tmp_path / root / "a" / "x").mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (side, side), number)
            image.putpixel((side - 1 if side < 99 else side // 2, side // 2), 255 * (root == "new"))
            image.save(tmp_path / root / "a" / "x" / f"{number}.bmp")
    old, new, copy = (of_folder(tmp_path / root) for root in ("old", "new", "copy"))
    assert old == copy
    assert not same_images(old[0], new[0])
    assert difference(old, new) == "domain 'a' differs in the content of images"


def test_classes_that_were_swapped_are_found_among_many_of_equal_sizes(tmp_path, monkeypatch):
    for label in range(100):
        (tmp_path / "a" / f"{label:03}").mkdir(parents=True)
        for number in range(20):
            (tmp_path / "a" / f"{label:03}" / f"{number}.bmp").write_bytes(bytes((label, number)))
    before = of_folder(tmp_path)
    for name, other in (("040", "x"), ("041", "040"), ("x", "041")):
        (tmp_path / "a" / name).rename(tmp_path / "a" / other)
    assert difference(before, of_folder(tmp_path)) == "domain 'a' differs in the content of images"
    opened = []
    monkeypatch.setattr("timm_moe_dg.data.inspection._content", lambda path: opened.append(path) or b"")
    of_folder(tmp_path)
    assert len(opened) == 512


def test_files_of_a_data_set_of_the_hub_count_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.csv").write_text("file_name,domain,label\n0.bmp,a,x\n")
    found = []
    for level in (0, 9):
        Image.new("L", (8, 8), level).save(tmp_path / "data" / "0.bmp")
        found += fingerprint(get_benchmark(f"hub:{tmp_path / 'data'}").read(None))
    assert found[0]["contents"] == found[1]["contents"]
    assert not same_images(*found)


@pytest.mark.parametrize(
    ("column", "value", "part"), [("lon", 8.5, "metadata"), ("label", "cat", "labels"), ("split", "id_val", "split")]
)
def test_every_change_of_a_table_is_named(tmp_path, column, value, part):
    rows = [
        {"path": f"{split}-{label}.png", "label": label, "lon": 1.5, "lat": 2, "split": split, "group": "all"}
        for split in ("train", "id_val", "id_test")
        for label in ("cat", "dog")
    ]
    for row in rows:
        (tmp_path / row["path"]).touch()

    def read():
        write_csv(tmp_path / "metadata.csv", rows)
        return fingerprint(get_benchmark("place_folder").read(tmp_path))

    before = read()
    rows[1][column] = value
    assert [name for name in before[0] if before[0][name] != read()[0][name]] == [part]


def test_a_domains_digests_do_not_depend_on_other_domains(tmp_path):
    rows = [
        {"path": f"{split}.png", "label": "cat", "lon": 1, "lat": 2, "split": split, "group": "all"}
        for split in ("train", "id_val", "id_test")
    ]
    tables = []
    for name in ("ood.png", "a-name-that-is-longer-than-all-others.png"):
        table = [*rows, {**rows[0], "path": name, "split": "ood_test"}]
        for row in table:
            (tmp_path / row["path"]).touch()
        write_csv(tmp_path / "metadata.csv", table)
        tables.append(fingerprint(get_benchmark("place_folder").read(tmp_path)))
    assert [first == second for first, second in zip(*tables, strict=True)] == [True, True, False]


def digits(*images, targets=(0, 1)):
    return [DigitsDomain("a", CLASSES, list(targets), [np.array(image, dtype=np.uint8) for image in images])]


def test_images_in_memory_count_by_their_pixels():
    before = fingerprint(digits([[1, 2]], [[3, 4]]))
    assert difference(before, fingerprint(digits([[1, 2]], [[3, 4]]))) is None
    assert "pixels" in difference(before, fingerprint(digits([[1, 2]], [[3, 5]])))
    assert "labels" in difference(before, fingerprint(digits([[1, 2]], [[3, 4]], targets=(0, 2))))
    assert short(fingerprint(get_benchmark("geo_digits").read(None))) == short(
        fingerprint(get_benchmark("geo_digits").read(None))
    )


def test_images_that_cannot_be_read_count_where_they_were_left_out(tmp_path):
    domains = get_benchmark("folder").read(folder(tmp_path))
    whole = fingerprint(domains)
    assert with_readable(whole, domains) == whole
    tables = [
        with_readable(whole, [replace(domains[0].without([position])), domains[1]])[0]["readable"]
        for position in range(2)
    ]
    assert tables[0] != tables[1]


def test_rows_of_the_hub_count_by_names_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    first, again, other = (
        fingerprint(get_benchmark(write_hub(tmp_path / name, **columns)).read(None))
        for name, columns in {"a": {}, "b": {}, "c": {"splits": ("train", "test")}}.items()
    )
    assert first == again
    assert difference(first, other) == "domain 'art' differs in the number of images (12, and it was 6)"
