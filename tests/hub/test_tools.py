"""Tools take a published network by its name on the Hub."""

import pytest
import timm
from PIL import Image

from tests.hub_server import Repository
from tests.load_tool import load_tool
from tests.saved_run import saved_run
from timm_moe_dg.data.readers.digits import CLASSES
from timm_moe_dg.networks.calibration import load_calibration

QUICK = ["--workers", "0", "--batch-size", "500"]
SOURCE = "hf-hub:someone/network"


@pytest.fixture
def best(hub, tmp_path):
    """A saved network that is published as well."""
    saved_run(tmp_path, "gmoe_tiny_patch16", CLASSES)
    hub.repositories["someone/network"] = Repository(tmp_path / "best")
    return f"local-dir:{tmp_path / 'best'}"


def test_predictions_of_a_published_network(best, tmp_path, capsys):
    Image.effect_noise((20, 30), 80).save(tmp_path / "image.png")
    rows = []
    for model in (SOURCE, best):
        load_tool("predict").main(["--model", model, str(tmp_path / "image.png"), "--top-k", "10", *QUICK])
        rows.append(capsys.readouterr().out)
    assert rows[0] == rows[1]
    assert sorted(rows[0].splitlines()[1].split(",")[1:-1:2]) == list(CLASSES)


def test_a_published_network_has_its_calibration(best, hub, tmp_path, capsys):
    words = ["--dataset", "rotated_digits", "--test-domains", "rot_75", "--calibrate", *QUICK]
    with pytest.raises(SystemExit, match="calibrate=True: stores a file with the model"):
        load_tool("evaluate").main(["--model", SOURCE, *words])
    load_tool("evaluate").main(["--model", best, *words])
    hub.repositories["someone/network"] = Repository(tmp_path / "best")
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    tables = []
    for model in (SOURCE, best):
        capsys.readouterr()
        load_tool("predict").main(["--model", model, str(tmp_path / "black.png"), "--coverage", "0.9", *QUICK])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    assert ",unlike," in tables[0]


def test_a_cache_that_timm_filled_has_no_calibration_which_is_said(best, monkeypatch, caplog):
    timm.create_model(SOURCE, pretrained=True)
    assert load_calibration(SOURCE) is None  # the Hub answers that there is none
    assert "without the Hub" not in caplog.text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert load_calibration(SOURCE) is None
    assert f"{SOURCE}: without the Hub, and calibration.safetensors is not in its cache" in caplog.text


def test_a_network_that_is_not_there_is_named(best):
    with pytest.raises(SystemExit, match=r"CheckpointError: .*hf-hub:someone/other cannot be had"):
        load_tool("evaluate").main(["--model", "hf-hub:someone/other", "--dataset", "rotated_digits", *QUICK])
