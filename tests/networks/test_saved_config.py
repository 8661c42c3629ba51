"""config.json of saved networks: what timm wrote is taken as it is; damage is in tests/faults/test_damaged_files.py."""

import json

import timm
from timm.models import save_for_hf

from timm_moe_dg.networks.saved_config import read_config, saved_config


def test_what_timm_writes_is_read(tmp_path):
    network = timm.create_model("gmoe_tiny_patch16", depth=2, moe_layers=(1,), num_classes=3)
    save_for_hf(network, str(tmp_path), model_config={"label_names": ["a", "b", "c"]}, safe_serialization=True)
    written = json.loads((tmp_path / "config.json").read_text())
    assert read_config(tmp_path / "config.json") == saved_config(f"local-dir:{tmp_path}") == written
    assert written["label_names"] == ["a", "b", "c"]


def test_older_files_without_a_table_of_their_own_are_read(tmp_path):
    old = {"architecture": "vit", "num_classes": 2, "mean": [0.5], "std": [0.5], "label_names": {"0": "a", "1": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_config(tmp_path / "config.json") == old


def test_a_registered_model_has_none():
    assert saved_config("gmoe_tiny_patch16") == {}
