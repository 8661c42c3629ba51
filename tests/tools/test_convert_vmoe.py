"""From V-MoE's files to a folder of timm's, by the command line."""

import sys

import pytest
import timm
import torch
from timm.data import resolve_data_config

from tests.load_tool import load_tool
from tests.vmoe_files import MOE, answer, made_arrays, write_vmoe

convert = load_tool("convert_vmoe")


@torch.no_grad()
@pytest.mark.filterwarnings("error:top_k=")
@pytest.mark.parametrize("before_head", [False, True])
def test_a_checkpoint_becomes_a_folder_that_timm_loads(before_head, tmp_path, capsys):
    arrays = made_arrays(before_head=before_head)
    write_vmoe(tmp_path / "vmoe", arrays)
    convert.main([str(tmp_path / "vmoe"), "--output", str(tmp_path / "folder")])
    assert f"4 experts in blocks {list(MOE)} of 4" in capsys.readouterr().out
    model = timm.create_model(f"local-dir:{tmp_path / 'folder'}", pretrained=True).eval()
    images = torch.randn(2, 3, 8, 8)
    assert model(images).shape == (2, 12 if before_head else 5)
    recipe = resolve_data_config(model=model)  # what V-MoE's configurations call resize(8) and value_range(-1, 1)
    assert (recipe["input_size"], recipe["crop_mode"], recipe["crop_pct"]) == ((3, 8, 8), "squash", 1.0)
    assert (recipe["interpolation"], recipe["mean"], recipe["std"]) == ("bilinear", [0.5] * 3, [0.5] * 3)
    assert "license" not in model.pretrained_cfg or model.pretrained_cfg["license"] is None
    if not before_head:
        expected = torch.from_numpy(answer(arrays, images.permute(0, 2, 3, 1).numpy())).float()
        torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-4)


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"convert_vmoe.py: CheckpointError: .*nothing\.index: No such file"):
        convert.main([str(tmp_path / "nothing"), "--output", str(tmp_path / "folder")])
    write_vmoe(tmp_path / "other", {"a/b": made_arrays()["cls"]})
    with pytest.raises(SystemExit, match=r"CheckpointError: prefix='.*other': is no V-MoE .*embedding/kernel"):
        convert.main([str(tmp_path / "other"), "--output", str(tmp_path / "folder")])
    with pytest.raises(SystemExit, match=r"ArgumentError: output=.*exists; name a new folder"):
        convert.main([str(tmp_path / "other"), "--output", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(SystemExit, match=r"MissingDependencyError: .*msgpack.*timm_moe_dg\[vmoe\]"):
        convert.main([str(tmp_path / "vmoe"), "--output", str(tmp_path / "folder")])
