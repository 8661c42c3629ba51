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


def test_a_cache_that_timm_filled_lacks_a_calibration_and_says_so_until_the_hub_has_answered(best, monkeypatch, caplog):
    timm.create_model(SOURCE, pretrained=True)
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert load_calibration(SOURCE) is None
    assert f"model='{SOURCE}': calibration.safetensors is not in the Hub's cache" in caplog.text
    caplog.clear()
    for is_offline in (False, True):  # the Hub answers that there is none, and the cache remembers it
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
        assert load_calibration(SOURCE) is None
    assert not caplog.text


def test_a_network_that_is_not_there_is_named(best):
    with pytest.raises(SystemExit, match=r"CheckpointError: .*hf-hub:someone/other cannot be had"):
        load_tool("evaluate").main(["--model", "hf-hub:someone/other", "--dataset", "rotated_digits", *QUICK])
