"""Hub data sets, from local folders of parquet files that go through the same `datasets.load_dataset`."""

import pickle
import shutil
import sys

import datasets
import huggingface_hub
import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import DataError, ImageReadError, MissingDependencyError

NAMES = ["dog", "cat", "elk"]
ROWS = 12
TEXT = datasets.Value("string")
FEATURES = {"image": datasets.Image(), "domain": TEXT, "label": datasets.ClassLabel(names=NAMES)}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write(root, splits=("train",), lacking=(), **changed):
    """Row k shows k, is of class k % 3, and of the domain photo or art in turn; `changed` are (type, values)."""
    (root / "data").mkdir(parents=True)
    for position, split in enumerate(splits):
        rows = range(ROWS * position, ROWS * (position + 1))
        values = {
            "image": [Image.new("RGB", (5, 4), (k, 0, 0)) for k in rows],
            "domain": [("photo", "art")[k % 2] for k in rows],
            "label": [k % 3 for k in rows],
        }
        columns = {name: (FEATURES[name], values[name]) for name in values if name not in lacking} | changed
        features = datasets.Features({name: kind for name, (kind, _) in columns.items()})
        table = datasets.Dataset.from_dict({name: data for name, (_, data) in columns.items()}, features=features)
        table.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet")
    return f"hub:{root}"


def read(root, *args, **changed):
    return get_benchmark(write(root / "set", *args, **changed)).read(None)


def numbers(domain):
    return [np.asarray(domain.image(index))[0, 0, 0] for index in range(len(domain))]


@pytest.mark.parametrize("splits", [("train",), ("train", "test")])
def test_domains_of_all_splits_in_the_order_of_rows(tmp_path, splits):
    domains, total = read(tmp_path, splits), ROWS * len(splits)
    assert [domain.name for domain in domains] == ["art", "photo"]
    for first, domain in zip((1, 0), pickle.loads(pickle.dumps(domains)), strict=True):  # as workers get them
        assert numbers(domain) == list(range(first, total, 2))
        assert list(domain.targets) == [k % 3 for k in range(first, total, 2)]
        assert domain.classes == tuple(NAMES)
        assert domain.image(0).mode == "RGB"
        fewer = domain.without({1, 4})
        assert numbers(fewer) == [first + row for row in range(0, total, 2) if row not in (2, 8)]
        assert list(fewer.targets) == [number % 3 for number in numbers(fewer)]


@pytest.mark.parametrize("kind", ["names", "numbers"])
def test_labels_and_domains_of_other_types(tmp_path, kind):
    labels = [NAMES[k % 3] if kind == "names" else k % 3 for k in range(ROWS)]
    label = (TEXT if kind == "names" else datasets.Value("int64"), labels)
    domain = (datasets.ClassLabel(names=["photo", "art", "no rows"]), [k % 2 for k in range(ROWS)])
    domains = read(tmp_path, label=label, domain=domain)
    assert [domain.name for domain in domains] == ["art", "photo"]
    assert domains[1].classes == tuple(sorted(set(map(str, labels))))
    assert [domains[1].classes[target] for target in domains[1].targets] == list(map(str, labels[::2]))


@pytest.mark.parametrize("label", [None, -1])
def test_a_row_without_a_label_is_named_by_its_split(tmp_path, label):
    name = write(tmp_path / "set", ("train", "test"))
    path = tmp_path / "set" / "data" / "test-00000-of-00001.parquet"
    table = parquet.read_table(path)
    labels = pyarrow.array([label if k == 7 else 0 for k in range(ROWS)], pyarrow.int64())
    parquet.write_table(table.set_column(table.schema.get_field_index("label"), "label", labels), path)
    with pytest.raises(DataError, match=f"'label' is {label} in row 7 of split 'test'"):
        get_benchmark(name).read(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lacking": ("domain",)}, "columns domain"),
        ({"image": (TEXT, ["a"] * ROWS)}, "column 'image'"),
        ({"domain": (TEXT, [None] * ROWS)}, "column 'domain'"),
        ({"label": (datasets.Value("float32"), [0.5] * ROWS)}, "column 'label'"),
        *(({"label": (TEXT, [*"0123456", text, *"0123"])}, "'label' .*row 7") for text in ("", " ", "NaN")),
        ({"label": (TEXT, ["a", "A"] * 6)}, "spelling"),
    ],
)
def test_a_column_that_is_lacking_or_of_the_wrong_kind_is_refused(tmp_path, changes, message):
    with pytest.raises(DataError, match=f"dataset='hub:.*{message}"):
        read(tmp_path, **changes)


def test_an_image_that_cannot_be_decoded_or_is_a_file_of_this_machine_is_refused(tmp_path, monkeypatch):
    Image.new("RGB", (5, 4)).save(tmp_path / "own.png")
    monkeypatch.chdir(tmp_path)
    broken = [({"bytes": b"no image", "path": "kitten.png"}, r"image='kitten\.png'")]
    for path in (str(tmp_path / "own.png"), "own.png", str(tmp_path / "set" / ".." / "own.png")):
        broken.append(({"bytes": None, "path": path}, "file of this machine"))
    for stored, message in broken:
        art = read(tmp_path, image=(datasets.Image(), [stored] * ROWS))[0]
        with pytest.raises(ImageReadError, match=message):
            art.image(2)
        shutil.rmtree(tmp_path / "set")


def test_without_network_or_datasets_the_message_says_what_to_do(tmp_path, monkeypatch):
    for name in ("httpx", "requests", "aiohttp"):  # which the extra does not bring
        monkeypatch.setitem(sys.modules, name, None)
    assert len(read(tmp_path)) == 2
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("nobody/nothing", str(tmp_path / "nowhere")):
        with pytest.raises(DataError, match=f"dataset='hub:{name}': .*the network"):
            get_benchmark(f"hub:{name}").read(None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match=r"datasets.*timm_moe_dg\[hub-data\]"):
        get_benchmark("hub:nobody/nothing").read(None)
