"""V-MoE checkpoints: files are read as written, and converted networks equal a plain numpy implementation."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.vmoe_files import MOE, Arrays, answer, made_arrays, write_vmoe
from timm_moe_dg.conversion.vmoe import convert_vmoe_arrays, read_vmoe_shards, vmoe_options
from timm_moe_dg.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:top_k=")


def as_tensors(arrays):
    return {name: torch.from_numpy(value) for name, value in arrays.items()}


def network(arrays, top_k=2):
    given = as_tensors(arrays)
    model = timm.create_model(**vmoe_options(given, top_k))
    model.load_state_dict(convert_vmoe_arrays(given))
    return model.double().eval()


@torch.no_grad()
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_logits_are_those_of_the_network_read_literally(top_k):
    arrays = made_arrays()
    images = np.random.default_rng(1).normal(size=(3, 8, 8, 3))
    logits = network(arrays, top_k)(torch.from_numpy(images).permute(0, 3, 1, 2))
    torch.testing.assert_close(logits, torch.from_numpy(answer(arrays, images, top_k)), rtol=0, atol=1e-10)


def test_the_architecture_is_read_from_the_arrays():
    options = vmoe_options(as_tensors(made_arrays()))
    expected = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 4, "num_heads": 3, "num_classes": 5}
    assert {name: options[name] for name in expected} == expected
    assert (options["moe_layers"], options["num_experts"], options["mlp_ratio"]) == (list(MOE), 4, 20 / 12)


@torch.no_grad()
def test_a_classifier_behind_another_layer_is_left_out_with_it():
    model = network(made_arrays(before_head=True))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert model.num_classes == 0
    assert torch.equal(model(images), model.forward_head(model.forward_features(images)))


def test_other_networks_are_refused():
    arrays = as_tensors(made_arrays())
    ensemble = {**arrays, "Encoder/encoderblock_1/Moe/Router/dense/kernel": torch.zeros(2, 12, 2)}
    with pytest.raises(CheckpointError, match=r"no V-MoE of this kind has \(1\): .*Router/dense/kernel"):
        convert_vmoe_arrays(ensemble)
    with pytest.raises(CheckpointError, match=r"no V-MoE of this kind has \(1\): MapHead/probe"):
        convert_vmoe_arrays({**arrays, "MapHead/probe": torch.zeros(1, 1, 12)})
    with pytest.raises(CheckpointError, match="it lacks Moe/Router/dense/kernel"):
        vmoe_options({name: value for name, value in arrays.items() if "/Moe/" not in name})


@pytest.fixture
def arrays(tmp_path: Path) -> Arrays:
    """Eleven blocks' worth of names, so that 10 sorts before 2."""
    made = made_arrays() | {f"Encoder/encoderblock_{n}/LayerNorm_0/scale": np.full(3, n, "float32") for n in (10, 11)}
    write_vmoe(tmp_path / "vmoe", made)
    return made


@pytest.mark.parametrize(("files", "parts"), [(1, 1), (2, 2), (3, 4)])
def test_arrays_come_back_as_they_were_whatever_they_were_cut_into(arrays, files, parts, tmp_path):
    write_vmoe(tmp_path / "vmoe", arrays, files, parts)
    loaded = read_vmoe_shards(tmp_path / "vmoe")
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name].numpy(), value) for name, value in arrays.items())


def test_a_missing_or_damaged_file_is_named(arrays, tmp_path):
    path = tmp_path / "vmoe.data-00001-of-00002"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"vmoe\.data-00001-of-00002: No such file.*give the prefix"):
        read_vmoe_shards(tmp_path / "vmoe")
    with pytest.raises(CheckpointError, match=r"nothing\.index: No such file"):
        read_vmoe_shards(tmp_path / "nothing")
    path.write_bytes(content[:-50])
    with pytest.raises(CheckpointError, match="is damaged, or no file of V-MoE's"):
        read_vmoe_shards(tmp_path / "vmoe")
    (tmp_path / "vmoe.index").write_bytes(b"\x80")  # an empty map
    with pytest.raises(CheckpointError, match="is no index of a V-MoE checkpoint"):
        read_vmoe_shards(tmp_path / "vmoe")


def test_files_of_another_checkpoint_are_noticed(arrays, tmp_path):
    write_vmoe(tmp_path / "other", made_arrays(), parts=1)
    for number in range(2):
        (tmp_path / f"other.data-{number:05d}-of-00002").replace(tmp_path / f"vmoe.data-{number:05d}-of-00002")
    with pytest.raises(CheckpointError, match="data files lack slices that the index names"):
        read_vmoe_shards(tmp_path / "vmoe")
