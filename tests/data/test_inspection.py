"""Unreadable images, statistics of bands, and fingerprints: another one after each change, which is named."""

import shutil
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from tests.band_files import band_folder
from tests.data.files import Toy, write_csv, write_domains, write_image
from tests.data.readers.test_hub_data import write as write_hub
from tests.geo_files import write_raster
from timm_moe_dg.data import Split, check_readable, drop_unreadable, get_benchmark
from timm_moe_dg.data.bands import Bands
from timm_moe_dg.data.domains import FileDomain
from timm_moe_dg.data.inspection import (
    band_statistics,
    difference,
    fingerprint,
    same_images,
    short,
    warn_of_copies,
    with_decided_values,
    with_readable,
)
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.errors import ArgumentError, DataError


def toy(name, *images):
    return Toy(name, ("a",), [0] * len(images), list(images))


def test_unreadable_images_are_left_out_and_named(caplog):
    whole, torn = toy("whole", 1, 2), toy("torn", 3, -4, 5, -6)
    torn = replace(torn, split=Split(np.array([1, 2]), np.array([0, 3])))
    domains, complaints = drop_unreadable([whole, torn], workers=3)
    assert domains[0] is whole
    assert (domains[1].images, domains[1].targets) == ([3, 5], [0, 0])
    assert (domains[1].split.inside.tolist(), domains[1].split.outside.tolist()) == ([1], [0])
    assert complaints == ["image=-4", "image=-6"]
    assert "2 unreadable images left out: image=-4; image=-6" in caplog.text
    drop_unreadable([toy("torn", -1, -2, -3, -4, -5, -6, -7, -8, 9)])
    assert "8 unreadable images left out: image=-1; image=-2; image=-3; image=-4; image=-5; and 3 more" in caplog.text


@pytest.mark.parametrize(
    ("read", "images", "message"),
    [
        (drop_unreadable, (-1, -2), "domain='torn'"),
        (check_readable, (-1, -2, -3, -4, -5, -6, -7, 8), "images: 7 of 9 .*image=-1; .*; image=-5; and 2 more"),
    ],
)
def test_unreadable_images_are_refused(read, images, message):
    whole = toy("whole", 1)
    check_readable([whole])
    with pytest.raises(DataError, match=message):
        read([whole, toy("torn", *images)], workers=3)


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    folder = band_folder(tmp_path_factory.mktemp("bands") / "data", bands=5)
    return get_benchmark("place_folder").read(folder, bands=5)


def test_statistics_are_those_of_all_training_pixels(bands):
    splits = [Split(np.array([0, 2]), np.array([1, 3])) for _ in bands]
    mean, std, low, high = band_statistics(bands, splits, [0, 1], workers=2)
    pixels = torch.stack([bands[index].pixels(position) for index in (0, 1) for position in (0, 2)]).double()
    torch.testing.assert_close(torch.tensor(mean).double(), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std).double(), pixels.std((0, 2, 3), correction=0))
    assert (low, high) == (pixels.amin((0, 2, 3)).tolist(), pixels.amax((0, 2, 3)).tolist())


def test_statistics_of_photographs_are_of_their_channels_from_0_to_1():
    levels = np.zeros((4, 6, 3), np.uint8)
    levels[:2, :, 0], levels[:, :3, 1], levels[..., 2] = 255, 102, 51
    photographs = FileDomain("a", ("x",), [0], [levels])
    statistics = band_statistics([photographs], [Split(np.array([0]), np.arange(0))], [0])
    np.testing.assert_allclose(statistics, [[0.5, 0.2, 0.2], [0.5, 0.2, 1], [0, 0, 0.2], [1, 0.4, 0.2]])
    assert statistics.describe().splitlines()[0] == "  band 1: 0 to 1, mean 0.5, deviation 0.5"


def test_statistics_leave_out_missing_data_and_divide_no_constant_band_by_nothing(bands):
    domain = replace(bands[0])
    whole, part = domain.pixels(0), domain.pixels(0).clone()
    part[1, :4], part[2] = np.nan, 0.1
    object.__setattr__(domain, "pixels", lambda index: part)
    mean, std, low, _ = band_statistics([domain], [Split(np.array([0]), np.arange(0))], [0])
    assert mean[0] == pytest.approx(whole[0].mean().item())
    assert mean[1] == pytest.approx(whole[1, 4:].mean().item())
    assert std[1] == pytest.approx(whole[1, 4:].std(correction=0).item(), rel=1e-5)
    assert std[2] == 1.0
    assert low[1] == pytest.approx(whole[1, 4:].min().item())


def folder(root):
    """Two domains of two classes."""
    return write_domains(root, ("art", "photo"), ("cat", "dog"), images=3)


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
        (lambda cat: (cat / "photo_0.png").rename(cat / "7.png"), "the names of images"),
        (lambda cat: (cat / "photo_2.png").rename(cat / "qhoto_2.png"), "the names of images"),
        (lambda cat: (cat / "photo_0.png").write_bytes(bytes(99)), "the sizes or pixels of images"),
        (lambda cat: (cat / "new.png").touch(), "the number of images (7, and it was 6)"),
        (lambda cat: (cat / "photo_0.png").unlink(), "the number of images (5, and it was 6)"),
        (lambda cat: (cat / "photo_2.png").rename(cat.parent / "dog" / "20.png"), "the names of images"),
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


def test_data_sets_of_the_hub_count_by_names_sizes_and_content(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.csv").write_text("file_name,domain,label\n0.bmp,a,x\n")
    found = []
    for level in (0, 9):
        Image.new("L", (8, 8), level).save(tmp_path / "data" / "0.bmp")
        found += fingerprint(get_benchmark(f"hub:{tmp_path / 'data'}").read(None))
    assert found[0]["contents"] == found[1]["contents"]
    assert not same_images(*found)
    first, again, other = (
        fingerprint(get_benchmark(write_hub(tmp_path / name, **columns)).read(None))
        for name, columns in {"a": {}, "b": {}, "c": {"splits": ("train", "test")}}.items()
    )
    assert first == again
    assert difference(first, other) == "domain 'art' differs in the number of images (12, and it was 6)"


def of_table(root, rows):
    for row in rows:
        (root / row["path"]).touch()
    write_csv(root / "metadata.csv", rows)
    return fingerprint(get_benchmark("place_folder").read(root))


ROWS = [
    {"path": f"{split}-{label}.png", "label": label, "lon": 1.5, "lat": 2, "split": split, "group": "all"}
    for split in ("train", "id_val", "id_test")
    for label in ("cat", "dog")
]


@pytest.mark.parametrize(
    ("column", "value", "part"), [("lon", 8.5, "metadata"), ("label", "cat", "labels"), ("split", "id_val", "split")]
)
def test_every_change_of_a_table_is_named(tmp_path, column, value, part):
    before = of_table(tmp_path, ROWS)[0]
    after = of_table(tmp_path, [{**row, column: value} if row is ROWS[1] else row for row in ROWS])[0]
    assert [name for name in before if before[name] != after[name]] == [part]


def test_a_domains_digests_do_not_depend_on_other_domains(tmp_path):
    names = ("ood.png", "a-name-that-is-longer-than-all-others.png")
    tables = [of_table(tmp_path, [*ROWS, {**ROWS[0], "path": name, "split": "ood_test"}]) for name in names]
    assert [first == second for first, second in zip(*tables, strict=True)] == [True, True, False]


def test_images_in_memory_count_by_their_pixels():
    def of_digits(*images, targets=(0, 1)):
        return fingerprint([FileDomain("a", CLASSES, list(targets), [np.array(image, np.uint8) for image in images])])

    before = of_digits([[1, 2]], [[3, 4]])
    assert difference(before, of_digits([[1, 2]], [[3, 4]])) is None
    assert "pixels" in difference(before, of_digits([[1, 2]], [[3, 5]]))
    assert "labels" in difference(before, of_digits([[1, 2]], [[3, 4]], targets=(0, 2)))


def test_images_that_cannot_be_read_count_where_they_were_left_out(tmp_path):
    domains = get_benchmark("folder").read(folder(tmp_path))
    whole = fingerprint(domains)
    assert with_readable(whole, domains) == whole
    tables = [with_readable(whole, [domains[0].without([gone]), domains[1]])[0]["readable"] for gone in range(2)]
    assert tables[0] != tables[1]


def band_files(folder, *names, scale=None, dtype="uint16"):
    """A domain of GeoTIFFs, one for each description of its two bands."""
    paths = []
    for number, described in enumerate(names):
        facts = {"descriptions": described} | ({"scales": [1e-4] * len(described)} if scale and number in scale else {})
        values = np.full((len(described), 8, 8), 7, dtype)
        paths.append(str(write_raster(folder / f"{number}.tif", values, **facts)))
    return FileDomain("a", ("x",), [0] * len(paths), paths, bands=Bands(2))


def test_bands_in_different_orders_need_names(tmp_path):
    domain = band_files(tmp_path, ("B02", "B03"), ("B03", "B02"), ("B02", "B03"))
    with pytest.raises(ArgumentError, match=r"in_chans=2: .*1.tif.*--bands"):
        with_decided_values([domain], domain.bands)
    with_decided_values([domain], Bands.of(("sentinel2:B02", "sentinel2:B03")))
    colors = [("B02", "B03", "B04"), ("B04", "B03", "B02"), ("red", "green", "blue")]
    domain = band_files(tmp_path, *colors)
    with pytest.raises(ArgumentError, match=r"in_chans=3: .*--bands"):
        with_decided_values([domain], Bands(3))
    with_decided_values([band_files(tmp_path, *colors[1:])], Bands(3))  # other words, and no other order


@pytest.mark.parametrize(
    ("scale", "dtype", "physical"), [((0, 1), "uint16", True), ((), "float32", True), ((), "uint16", False)]
)
def test_values_follow_the_scale_of_training_images(tmp_path, scale, dtype, physical):
    (domain,) = with_decided_values([band_files(tmp_path, ("", ""), ("", ""), scale=scale, dtype=dtype)], Bands(2))
    assert domain.bands.physical is physical
    expected = 7e-4 if scale else 7.0 if physical else 7 / 65535
    np.testing.assert_allclose(domain.pixels(0), expected, rtol=1e-6)


def test_files_with_and_without_a_scale_do_not_mix(tmp_path):
    with pytest.raises(DataError, match=r"1 of 3 files .* state a scale, such as '.*1.tif', and 2 none"):
        with_decided_values([band_files(tmp_path, *[("", "")] * 3, scale=(1,))], Bands(2))


def test_copies_of_training_images_in_held_out_domains_are_counted(tmp_path, caplog):
    domains = []
    for name, grays in (("a", (1, 2, 3)), ("b", (4, 5)), ("held", (2, 3, 9))):
        for gray in grays:
            write_image(tmp_path / name / f"{gray}.png", gray)
        paths = sorted(map(str, (tmp_path / name).iterdir()))
        domains.append(FileDomain(name, ("x",), [0] * len(paths), paths))
    warn_of_copies(domains, {2})
    assert "2 images of held-out domains are copies of training images" in caplog.text
    caplog.clear()
    warn_of_copies(domains, {1})
    assert not caplog.text
