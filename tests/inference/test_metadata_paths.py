"""Predictions with metadata of every encoder are those of the network, and an image is judged by the path it takes."""

import io
import math
import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config

import timm_moe_dg
from tests.data.readers.test_csv_tables import gps
from tests.geo_files import halves, write_scene
from tests.inference.conftest import TREES
from tests.saved_run import saved_run
from timm_moe_dg.data import Split
from timm_moe_dg.data.readers.csv_tables import own_place
from timm_moe_dg.data.readers.digits import geo_digits
from timm_moe_dg.errors import MetadataError
from timm_moe_dg.inference.predictor import OK, SHARED_EXPERT
from timm_moe_dg.layers.encoders.pretrained import GeoClipEncoder, SatClipEncoder
from timm_moe_dg.models import metadata_options
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.networks.calibration import calibrate
from timm_moe_dg.networks.trained import load_trained, network_digest
from timm_moe_dg.storage.run_folder import save_calibration

PLACES = [[13.4, 52.5], [-58.4, -34.6], [math.nan, math.nan], [139.7, 35.7]]
IDS = [[3], [0], [-1], [7]]
MONTHS = [[13.4, 52.5, 6.0], [-58.4, -34.6, math.nan], [math.nan] * 3, [math.nan, math.nan, 1.0]]


def geoclip():
    encoder = GeoClipEncoder()
    for scale in encoder.scales:
        scale[0].frequencies.normal_()
    return encoder


@pytest.mark.parametrize(
    ("model", "options", "names", "rows"),
    [
        ("moge_small_patch32_384", {}, ["location"], IDS),
        ("moge_tiny", {"metadata_encoder": "location_id", "seen_locations": [0, 3, 7]}, ["location"], IDS),
        ("moge_tiny", {}, ["lon", "lat"], PLACES),
        ("moge_tiny", {"metadata_encoder": "sincos"}, ["lon", "lat"], PLACES),
        ("moge_tiny", {"metadata_encoder": "geoclip"}, ["lon", "lat"], PLACES),
        ("moge_tiny", {"metadata_encoder": "satclip:x"}, ["lon", "lat"], PLACES),
        ("moge_tiny", {"metadata_columns": {"month": (6.0, 3.0)}}, ["lon", "lat", "month"], MONTHS),
    ],
)
def test_answers_are_those_of_the_network(model, options, names, rows, images, tmp_path, monkeypatch):
    monkeypatch.setattr(metadata_options, "load_satclip", lambda source: SatClipEncoder(4, 8, 8))
    monkeypatch.setattr(metadata_options, "load_geoclip", geoclip)
    saved_run(tmp_path, model, TREES, **options)
    network = load_trained(f"local-dir:{tmp_path / 'best'}")
    paths = [str(images / f"{number}.png") for number in range(len(rows))]
    view = create_transform(**resolve_model_data_config(network), is_training=False)
    batch = torch.stack([view(Image.open(path)) for path in paths])
    metadata = torch.tensor(rows)[:, 0] if names == ["location"] else torch.tensor(rows)
    with torch.inference_mode():
        without, expected = network(batch), network(batch, metadata)
    assert [torch.allclose(*pair) for pair in zip(without, expected, strict=True)] == [False, False, True, False]
    table = pd.DataFrame(rows, columns=names).assign(path=paths)
    table.to_csv(tmp_path / "list.csv", index=False, na_rep="nan")
    settings = {"workers": 0, "columns": ["logits"], "batch_size": 3}
    statuses = [OK, OK, SHARED_EXPERT, OK]
    for answers in (
        timm_moe_dg.predict(network, tmp_path / "list.csv", **settings),
        timm_moe_dg.predict(network, paths, metadata=str(tmp_path / "list.csv"), **settings),
        timm_moe_dg.predict_part(network, table, **settings),
    ):
        np.testing.assert_allclose(np.stack(answers.logits), expected, rtol=0, atol=2e-6)
        assert answers.status.tolist() == statuses
    answers = timm_moe_dg.predict(network, paths, **settings)
    np.testing.assert_allclose(np.stack(answers.logits), without, rtol=0, atol=2e-6)
    assert set(answers.status) == {SHARED_EXPERT}


@torch.inference_mode()
def test_ids_of_no_training_image_are_answered_by_the_shared_expert(images, tmp_path):
    network = saved_run(tmp_path, "moge_small_patch32_384", TREES)
    before, batch, ids = network_digest(network), torch.randn(4, 3, 32, 32), torch.tensor([3, 4, 5, -1])
    routed, shared = network(batch, ids), network(batch)
    network.set_seen_locations([5, 3, -1, 3])
    torch.testing.assert_close(network(batch, ids), torch.stack([routed[0], shared[1], routed[2], shared[3]]))
    present = network.metadata_encoder.encoder.train().present(ids)
    assert present.tolist() == [True, True, True, False]  # or new places could not be learned
    save_network(network.eval(), tmp_path / "best", TREES, data_config(network, 32))
    again = load_trained(f"local-dir:{tmp_path / 'best'}")
    assert again.metadata_encoder.encoder.seen_locations == (3, 5)
    assert network_digest(again) == network_digest(network) != before
    table = {"path": [str(images / "0.png")] * 4, "location": ids.tolist()}
    answers = timm_moe_dg.predict_part(again, table, workers=0, columns=["experts"])
    assert answers.status.tolist() == [OK, SHARED_EXPERT, OK, SHARED_EXPERT]
    assert [experts[0] >= 0 for experts in answers.experts] == [True, False, True, False]
    with pytest.raises(MetadataError, match="location id=323"):
        network.set_seen_locations([323])
    with pytest.raises(MetadataError, match="metadata_encoder='LocationEncoder'"):
        timm.create_model("moge_tiny").set_seen_locations([1])


@pytest.mark.parametrize("has_places", [True, False])
def test_training_images_look_familiar_with_their_places_and_without(has_places, tmp_path):
    network = saved_run(tmp_path, "moge_tiny", tuple("0123456789"))
    domain = geo_digits()[0]
    domain = domain if has_places else domain.__class__(**{**vars(domain), "metadata": None})
    split = Split(domain.split.inside[:500], domain.split.outside)
    settings = {"method": "", "metadata_columns": None, "batch_size": 250, "workers": 0}
    save_calibration(calibrate(network, [domain], [split], [0], [], **settings), tmp_path / "best")
    rows = {"path": []}
    for position in split.inside[:100]:
        rows["path"].append(str(tmp_path / f"{position}.png"))
        domain.image(position).convert("RGB").save(rows["path"][-1])
    places = dict(zip(("lon", "lat"), geo_digits()[0].metadata[split.inside[:100]].T.tolist(), strict=True))
    for given, status in ((rows, SHARED_EXPERT), ({**rows, **places}, OK)):
        answers = timm_moe_dg.predict_part(tmp_path / "best", given, workers=0)
        assert (answers.status == status).mean() >= 0.97


def test_images_without_metadata_have_the_place_of_their_file(tmp_path):
    """A GeoTIFF, a photograph with GPS tags, and one without a place."""
    saved_run(tmp_path, "moge_tiny", TREES)
    values = (halves(32, 32)[:3] // 256).astype(np.uint8)
    write_scene(tmp_path / "a.tif", values)
    Image.new("RGB", (32, 32), (90, 60, 30)).save(tmp_path / "b.jpg", exif=gps(-58.38, -34.6))
    Image.new("RGB", (32, 32)).save(tmp_path / "c.png")
    paths = [str(tmp_path / name) for name in ("a.tif", "b.jpg", "c.png")]
    network = load_trained(f"local-dir:{tmp_path / 'best'}")
    answers = timm_moe_dg.predict(network, paths, workers=0, columns=["logits"])
    place = own_place(paths[0]).degrees
    rows = [[*place], [-58.38, -34.6], [math.nan, math.nan]]
    table = pd.DataFrame(rows, columns=["lon", "lat"]).assign(path=paths)
    expected = timm_moe_dg.predict_part(network, table, workers=0, columns=["logits"])
    np.testing.assert_allclose(np.stack(answers["logits"]), np.stack(expected["logits"]), atol=1e-5)
    assert answers["status"].tolist() == [OK, OK, SHARED_EXPERT]
    note = tarfile.TarInfo("b.json")  # which tells no place
    note.size = len(b"{}")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for path in paths[:2]:
            tar.add(path, Path(path).name)
        tar.addfile(note, io.BytesIO(b"{}"))
        tar.add(paths[2], "c.png")
    members = timm_moe_dg.predict(network, tmp_path / "x.tar", workers=0, columns=["logits"])
    np.testing.assert_array_equal(np.stack(members["logits"]), np.stack(answers["logits"]))
    assert members["status"].tolist() == answers["status"].tolist()
