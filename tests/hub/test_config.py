"""config.json is changed where it is changed, and nowhere else."""

from timm_moe_dg.hub.config import read_config, write_config


def test_what_is_written_is_read(tmp_path):
    config = {"architecture": "vit", "pretrained_cfg": {"mean": [0.5], "license": None}, "label_names": ["ä", "b"]}
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
