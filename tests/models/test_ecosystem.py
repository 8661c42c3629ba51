"""What other libraries do to a network: meta tensors, torch.func, quantization, offloading, shards, adapters, wrappers.

Other libraries, their versions and results: docs/guides/other_libraries.md.
"""

import copy
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.models.cases import BY_NAME, FAMILIES, Case, mixture_layers, randomize
from tests.quick_python import run_ranks
from timm_moe_dg.errors import MetadataError
from timm_moe_dg.layers.parameters import UpcastLinear

pytestmark = pytest.mark.slow  # whole runs, programs and processes

GMOE, SFMOE, MOGE = (BY_NAME[name] for name in ("gmoe_tiny_patch16", "sfmoe_small", "moge_tiny"))


@dataclass(frozen=True)
class OnBackbone(Case):
    """A model that takes `backbone=`, on its dense twin."""

    def build(self, **kwargs: Any) -> nn.Module:
        return timm.create_model(self.name, backbone=self.dense, **{"patch_size": 16, **kwargs})


GATED = OnBackbone("gmoe", "", "vit_giant_patch14_reg4_dinov2")  # SwiGLU, layer scale
PLACED = OnBackbone("moge", "", "vit_base_patch16_siglip_224", metadata="coordinates")  # pooled by attention
ROUTED = pytest.mark.parametrize("case", [GMOE, SFMOE, MOGE, GATED, PLACED], ids=lambda case: case.name)


def prepared(case: Case, **options: object) -> nn.Module:
    """A small model in which every expert differs, without draws in training."""
    return randomize(case.small(**case.without_chance, **options)).eval()


@pytest.mark.parametrize("case", [*FAMILIES, GATED, PLACED], ids=lambda case: case.name)
def test_a_forward_on_the_meta_device(case: Case) -> None:
    options = {} if case.metadata else {"capacity_factor": 1.0}
    for training in (False, True):
        model = case.small(device="meta", **options).train(training)
        outputs = model(*(value.to("meta") for value in case.inputs()))
        assert outputs.is_meta
        assert outputs.shape == (3, 10)


@ROUTED
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamic_quantization_leaves_the_routing_in_float32(case: Case) -> None:
    model = prepared(case)
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    assert isinstance(quantized.blocks[0].attn.qkv, torch.ao.nn.quantized.dynamic.Linear)
    assert [module for module in quantized.modules() if isinstance(module, UpcastLinear)] or case is MOGE
    with torch.no_grad():
        exact, rounded = model(*case.inputs()), quantized(*case.inputs())
    # weights and activations of the dense layers are rounded to 8 bits
    assert (rounded - exact).abs().max() < 0.2 * exact.abs().max()


@ROUTED
def test_offloaded_weights_come_back_for_each_forward(case: Case, tmp_path: Path) -> None:
    model, inputs = prepared(case), case.inputs()
    with torch.no_grad():
        expected = model(*inputs)
        accelerate.disk_offload(model, str(tmp_path), torch.device("cpu"))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        assert torch.equal(model(*inputs), expected)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard(model: nn.Module) -> nn.Module:
    """Mixture layers and the linear layers of routers as units of their own, then the whole model."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in mixture_layers(model).values():
        for module in layer.router.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: nn.Module, inputs: tuple[Tensor, ...], adam: bool = False) -> dict[str, Tensor]:
    """Whole weights after three steps with momentum."""
    parameters = model.train().parameters()
    # eps keeps gradients that are rounding alone from becoming whole steps
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    optimizer = adamw(parameters) if adam else torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(*inputs), torch.arange(len(inputs[0])) % 10).backward()
        optimizer.step()
    return {
        name: value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
        for name, value in model.state_dict().items()
    }


def test_shards_in_bfloat16_refuse_rounded_coordinates_and_take_whole_ones(gloo: None) -> None:
    (images, places), mesh, model = MOGE.inputs(), dist.init_device_mesh("cpu", (1,)), prepared(MOGE)
    expected = model(images, places)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(MetadataError, match=r"metadata dtype=torch.bfloat16: .*cast_forward_inputs=False"):
        fully_shard(copy.deepcopy(model), mesh=mesh, mp_policy=policy)(images, places)
    whole = replace(policy, cast_forward_inputs=False)
    rounded = fully_shard(model, mesh=mesh, mp_policy=whole)(images.bfloat16(), places)
    assert (rounded - expected).abs().max() < 0.05 * expected.abs().max()


SHARED = [(GMOE, False), (SFMOE, False), (MOGE, False), (GMOE, True), (PLACED, True), (GATED, True)]


def _train_shards(rank: int, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)  # another number adds in another order
    dist.init_process_group("gloo", store=dist.FileStore(os.path.join(folder, "store"), 2), rank=rank, world_size=2)
    for number, (case, adam) in enumerate(SHARED):
        torch.manual_seed(0)
        weights = trained(shard(prepared(case)), case.inputs(), adam)
        if rank == 0:
            torch.save(weights, os.path.join(folder, f"{number}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory: pytest.TempPathFactory, fresh_python: str) -> Path:
    """Weights of all that is shared, one file each: two processes start once for them."""
    folder = tmp_path_factory.mktemp("shared")
    run_ranks(fresh_python, _train_shards, str(folder), torch.get_num_threads())
    return folder


@pytest.mark.parametrize(
    "number", range(len(SHARED)), ids=[f"{case.name}-{'AdamW' if adam else 'SGD'}" for case, adam in SHARED]
)
def test_two_processes_that_share_a_model_train_as_one_with_the_same_batch(number: int, trained_by_two: Path) -> None:
    case, adam = SHARED[number]
    expected = trained(prepared(case), case.inputs(), adam)
    weights = torch.load(trained_by_two / f"{number}.pt", weights_only=True)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():  # (g + g) / 2 is g, but for rounding, since shards are other memory
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
