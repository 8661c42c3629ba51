"""V-MoE's arrays compute here what a plain reading of its network computes, token by token in numpy."""

import numpy as np
import pytest
import timm
import torch

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.vmoe_files import MOE, answer, made_arrays
from timm_moe_dg.conversion.vmoe import convert_vmoe_arrays, vmoe_options
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
    found = network(arrays, top_k)(torch.from_numpy(images).permute(0, 3, 1, 2))
    torch.testing.assert_close(found, torch.from_numpy(answer(arrays, images, top_k)), rtol=0, atol=1e-10)


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
    assert torch.equal(
        model(images), network(made_arrays(before_head=True)).forward_head(model.forward_features(images))
    )


def test_other_networks_are_refused():
    arrays = as_tensors(made_arrays())
    ensemble = {**arrays, "Encoder/encoderblock_1/Moe/Router/dense/kernel": torch.zeros(2, 12, 2)}
    with pytest.raises(CheckpointError, match=r"no V-MoE of this kind has \(1\): .*Router/dense/kernel"):
        convert_vmoe_arrays(ensemble)
    with pytest.raises(CheckpointError, match=r"no V-MoE of this kind has \(1\): MapHead/probe"):
        convert_vmoe_arrays({**arrays, "MapHead/probe": torch.zeros(1, 1, 12)})
    with pytest.raises(CheckpointError, match="it lacks Moe/Router/dense/kernel"):
        vmoe_options({name: value for name, value in arrays.items() if "/Moe/" not in name})
