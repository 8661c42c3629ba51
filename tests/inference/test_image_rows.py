"""Images as a stream of rows: lists in csv and Parquet, tar files as WebDataset writes them, and damaged ones."""

import io
import json
import tarfile
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from timm_moe_dg.errors import DataError
from timm_moe_dg.inference import image_rows as module
from timm_moe_dg.inference.image_rows import MetadataNames, RowImages, batches, chunks, image_rows, row_loader

PLACES = MetadataNames()


def png(level):
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (level, 0, 0)).save(file, "PNG")
    return file.getvalue()


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return str(path)


def level(image):
    return torch.tensor([image.getpixel((0, 0))[0]])


def decode(rows, names=PLACES, reasons=None):
    """Levels and metadata of rows by path."""
    images = RowImages(level, names)
    found = {}
    for decoded in row_loader(images, batches(enumerate(chunks(iter(rows), 3)), 2), workers=0):
        paths = [decoded.batch.rows[position].path for position in decoded.positions]
        if reasons is not None:
            reasons += decoded.reasons
        found |= zip(paths, zip(decoded.images.flatten().tolist(), decoded.metadata.tolist(), strict=True), strict=True)
    return found


SAMPLES = [
    ("a/1.json", json.dumps({"lon": 1.5, "lat": -2, "caption": "x"}).encode()),
    ("a/1.png", png(10)),
    ("a/2.left.PNG", png(20)),
    ("a/2.right.png", png(21)),
    ("a/2.json", json.dumps({"lat": 4, "lon": 3.25}).encode()),
    ("b/2.png", png(30)),  # another sample than a/2
    ("b/2.cls", b"7"),
    ("._b/2.png", png(0)),
    ("b/@eaDir/2.png", png(0)),
    ("b/._3.png", b"hidden"),
    ("./c.png", png(40)),  # as `tar` names the content of a folder
]


def test_members_of_a_tar_file_have_the_metadata_of_their_sample(tmp_path, caplog):
    path = write_tar(tmp_path / "x.tar", SAMPLES)
    with tarfile.open(path, "a") as tar:
        link = tarfile.TarInfo("d.png")
        link.type, link.linkname = tarfile.SYMTYPE, "c.png"
        tar.addfile(link)
    nan = pytest.approx(float("nan"), nan_ok=True)
    expected = {
        "a/1.png": (10, [1.5, -2]),
        "a/2.left.PNG": (20, [3.25, 4]),
        "a/2.right.png": (21, [3.25, 4]),
        "b/2.png": (30, [nan, nan]),
        "./c.png": (40, [nan, nan]),
    }
    assert decode(image_rows([path], PLACES)) == {f"{path}/{name}": found for name, found in expected.items()}
    assert "members of tar files: left out" in caplog.text
    assert "1 .cls, 1 link" in caplog.text


def test_a_tar_file_cut_anywhere_is_an_error(tmp_path):
    content = Path(write_tar(tmp_path / "x.tar", SAMPLES[:4])).read_bytes()
    end = 2 * 512 * len(SAMPLES[:4])  # of header and content of each
    contents = {content[:length]: "" for length in (*range(0, end, 256), end, end + 511)}
    contents[content + content] = f"more follows behind its end mark at byte {end}"  # two files, one after the other
    contents[content[:1024] + b"x" * 512 + content[1536:]] = "no end mark at byte 1024"
    path = tmp_path / "cut.tar"
    for damaged, reason in contents.items():
        path.write_bytes(damaged)
        with pytest.raises(
            DataError, match=rf"'.*cut.tar': cannot be read as a tar file \(.*{reason}.*\); give an uncom"
        ):
            list(image_rows([str(path)], PLACES))
    path.write_bytes(content[: end + 512])
    assert len(list(image_rows([str(path)], PLACES))) == 3


@pytest.mark.parametrize(
    "note",
    [
        *(b"{", b'{"lon": "east", "lat": 0}', b'{"lon": 0, "lat": 91}', b"[" * 100_000),
        *(b'{"lon": 1%b, "lat": 0}' % (b"0" * 400), b'{"lon": true, "lat": 0}'),
    ],
)
def test_metadata_that_cannot_be_read_are_those_of_an_unreadable_image(tmp_path, note):
    path = write_tar(
        tmp_path / "x.tar", [("1.png", png(1)), ("1.json", note), ("2.png", b"no image"), ("3.png", png(3))]
    )
    rows = list(image_rows([path], PLACES))
    reasons = []
    assert [found[0] for found in decode(rows, reasons=reasons).values()] == [3]
    assert "x.tar/1.png': its metadata cannot be read" in reasons[0]
    assert "x.tar/2.png': cannot be decoded" in reasons[1]


def test_null_in_the_metadata_of_a_member_is_unknown_and_ids_are_whole(tmp_path):
    notes = [("1", b'{"lon": null, "lat": null}'), ("2", b'{"location": null}'), ("3", b'{"location": 7.0}')]
    notes.append(("4", b'{"location": 7.5}'))
    members = [(f"{name}.{kind}", part) for name, note in notes for kind, part in (("png", png(9)), ("json", note))]
    path = write_tar(tmp_path / "x.tar", members)
    assert np.isnan([row[1] for row in decode(image_rows([path], PLACES)).values()]).all()
    names, reasons = MetadataNames(ids=True), []
    ids = decode(image_rows([path], names), names, reasons)
    assert [row[1] for row in ids.values()] == [[-1], [-1], [7]]
    assert "4.png': its metadata cannot be read" in reasons[0]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_list_has_paths_relative_to_its_folder_and_metadata(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(module, "_CHUNK", 2)
    names = ["a.png", "b.png", str(tmp_path / "c.png"), "a.png", "absent.png"]
    table = pa.table({"year": [1.0, 2, 3, None, 5], "lat": [1.5, 2, 3, None, 5], "path": names, "lon": [0.1] * 5})
    if suffix == "csv":
        table.to_pandas().to_csv(tmp_path / "list.csv", na_rep="nan", index=False)
    else:
        pq.write_table(table, tmp_path / "list.parquet")
    rows = list(image_rows([str(tmp_path / f"list.{suffix}")], MetadataNames(columns=("year",))))
    assert [row.path for row in rows] == [str(tmp_path / name) for name in names]
    values = np.array([row.metadata for row in rows])
    np.testing.assert_array_equal(values.T[:2], [[0.1] * 5, [1.5, 2, 3, np.nan, 5]])
    np.testing.assert_array_equal(values.T[2], [1, 2, 3, np.nan, 5])
    (tmp_path / "year.csv").write_text("path,year\na.png,1\n")
    with pytest.raises(DataError, match=r"year.csv': lacks the columns lon, lat; it has path, year; add them"):
        list(image_rows([str(tmp_path / "year.csv")], MetadataNames(columns=("year",))))
    with pytest.raises(
        DataError, match=r"list.*': lacks the columns month; it has .*; add them, or leave out the others"
    ):
        list(image_rows([str(tmp_path / f"list.{suffix}")], MetadataNames(columns=("month",))))


def test_a_list_may_hold_another_form_of_the_letters_of_a_name(tmp_path):
    for listed, stored in (("NFC", "NFD"), ("NFD", "NFC")):
        name = tmp_path / f"{normalize(stored, 'é')}.png"
        name.write_bytes(png(7))
        (tmp_path / "list.csv").write_text(f"path\n{normalize(listed, 'é')}.png\nß.png\n", encoding="utf-8")
        rows = list(image_rows([str(tmp_path / "list.csv")], PLACES))
        assert [row.path for row in rows] == [str(name), str(tmp_path / "ß.png")]
        assert decode(rows).keys() == {str(name)}
        name.unlink()


def test_mistakes_in_lists_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 2)
    (tmp_path / "a.csv").write_text("path,lon,lat\n" + "x.png,0,0\n" * 4 + "y.png,500,0\n")
    (tmp_path / "b.csv").write_text("path,lon\nx.png,0\n")
    (tmp_path / "c.csv").write_text("file\nx.png\n")
    (tmp_path / "d.parquet").write_text("no Parquet")
    pq.write_table(pa.table({"path": ["x.png", None]}), tmp_path / "e.parquet")
    pq.write_table(pa.table({"file": ["x.png"]}), tmp_path / "f.parquet")
    pq.write_table(pa.table([["x.png"], ["y.png"]], names=["path", "path"]), tmp_path / "g.parquet")
    messages = {
        "a.csv": r"column 'lon' is \['500'\] in lines 6; every row needs degrees",
        "b.csv": "lacks the columns lat; it has path, lon; add them",
        "c.csv": "lacks the columns path; it has file",
        "d.parquet": "cannot be read as Parquet",
        "e.parquet": r"column 'path' is \[''\] in lines 2; every row needs the path of an image",
        "f.parquet": "lacks the columns path; it has file",
        "g.parquet": "names the column 'path' twice; rename or remove one",
    }
    for name, message in messages.items():
        with pytest.raises(DataError, match=rf"{name}': {message}"):
            list(image_rows([str(tmp_path / name)], PLACES))
