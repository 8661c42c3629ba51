"""Runs of two processes that divide the network by FSDP2, beside the same runs by DDP: on CPUs, and on two GPUs."""

import json
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import distributed
from torch.distributed.tensor import DTensor

from tests.load_tool import load_tool
from tests.quick_python import run_ranks
from tests.tools.test_finetune_resume import during_step
from timm_moe_dg.finetuning import loop
from timm_moe_dg.finetuning.model import _placement, whole
from timm_moe_dg.finetuning.processes import FSDP, Interruption
from timm_moe_dg.finetuning.run import FineTuning
from timm_moe_dg.layers import LinearRouter, register_router
from timm_moe_dg.protocols.records import read_records

pytestmark = pytest.mark.slow  # processes


class CountingRouter(LinearRouter):
    """Remembers the experts' items of the last step, of all processes."""

    counted: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("counted", torch.zeros(self.num_experts, dtype=torch.int64))

    def after_step(self) -> None:
        self.counted.copy_(self.expert_counts)


SIZE = ["patch_size=8", "embed_dim=32", "depth=2", "num_heads=2", "moe_layers=(1,)"]
GMOE = ["--model", "gmoe_tiny_patch16", "--img-size", "16", "--model-kwargs", *SIZE, "num_experts=3", "expert_drop=0.1",
        "--test-domains", "2"]  # fmt: skip
MOGE = ["--model", "moge_tiny", "--img-size", "16", "--model-kwargs", *SIZE, "num_experts=3",
        "metadata_drop=0.0", "--dataset", "place_folder", "--cka-tokens", "4", "--data-dir"]  # fmt: skip
RUN = ["--steps", "4", "--eval-freq", "3", "-b", "4", "--workers", "0", "--cpu-threads", "1", "--lr", "0.01",
       "--opt", "sgd"]  # fmt: skip
EARLY = {"Fishr": {"penalty_anneal_iters": 2, "lambda": 10.0}}
METHODS = ("ERM", "CORAL", "Fishr")
RUNS = {
    **{name: [*GMOE, "--algorithm", name, "--hparams", json.dumps(EARLY.get(name, {}))] for name in METHODS},
    "ema": [*GMOE, "--averaging", "ema", "--hparams", '{"ema_decay": 0.9}'],
    "accumulated": [*GMOE, "--grad-accum-steps", "2", "--grad-checkpointing"],
    "linear": [*GMOE, "--linear-steps", "2", "--opt", "adamw", "--lr", "1e-5"],
    "places": [*MOGE, "PLACES"],
    "counts": [*GMOE, "--model-kwargs", *SIZE, "num_experts=3", "router=counting"],
}


def bytes_held(run: FineTuning) -> int:
    """Bytes of parameters, averages and optimizer state in this process."""
    averages = run.model.averaging.parameters() if run.model.averaging else ()
    moments = [value for state in run.model.training.optimizer.state.values() for value in state.values()]
    tensors = (*run.model.network.parameters(), *averages, *moments)
    shards = [value.to_local() if isinstance(value, DTensor) else value for value in tensors if torch.is_tensor(value)]
    return sum(shard.numel() * shard.element_size() for shard in shards)


def train(tool: Any, words: list[str], sharded: bool) -> dict[str, Any]:
    """Trains, and returns whole weights and what this process holds."""
    os.environ[FSDP] = str(sharded).lower()
    result: dict[str, Any] = {}

    def finish(run: FineTuning, stop: Interruption) -> None:
        result["bytes"] = bytes_held(run)
        result["weights"] = whole(run.model.network.state_dict())
        result["average"] = whole(run.model.averaging.state_dict()) if run.model.averaging else {}
        original(run, stop)

    with pytest.MonkeyPatch.context() as patch:
        original = loop.finish
        patch.setattr(loop, "finish", finish)
        patch.setattr(loop, "plot_learning_curves", lambda *_: None)
        tool.main(words)
    return result


def work(rank: int, folder: str, images: str, device: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29677", "FSDP_VERSION": "2"}
    os.environ |= {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    register_router("counting")(CountingRouter)
    tool = load_tool("finetune")
    common = ["--dataset", "folder", "--data-dir", f"{images}/folder", *RUN, "--output", folder]

    def save(experiment: str, words: list[str], sharded: bool = True) -> None:
        torch.save(train(tool, [*common, *words], sharded), f"{folder}/{experiment}-{rank}.pt")

    for name, words in RUNS.items():
        words = [f"{images}/places" if word == "PLACES" else word for word in words]
        for kind in ("ddp", "fsdp"):
            save(f"{name}-{kind}", [*words, "--experiment", f"{name}-{kind}"], sharded=kind == "fsdp")
    adam = [*RUNS["ema"], "--opt", "adam"]
    save("whole", [*adam, "--experiment", "whole"])
    # Ends during a step, and goes on
    with during_step(2, partial(os.kill, os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
        train(tool, [*common, *adam, "--experiment", "stopped"], sharded=True)
    torch.save(train(tool, ["--resume", f"{folder}/stopped"], sharded=True), f"{folder}/resumed-{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    (root / "places").mkdir()
    rows = ["path,label,lon,lat,split,group"]
    for index in range(72):
        image = Image.fromarray(random.integers(0, 255, (16, 16, 3), dtype=np.uint8))
        path = root / "folder" / "abc"[index % 3] / "xy"[index // 3 % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
        image.save(root / "places" / path.name)
        place = f"{random.uniform(-180, 180):.2f},{random.uniform(-90, 90):.2f}"
        rows.append(
            f"{path.name},{'xy'[index % 2]},{place},{('train', 'train', 'id_val', 'ood_test')[index // 2 % 4]},here"
        )
    (root / "places" / "metadata.csv").write_text("\n".join(rows))
    return root


GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPUS])])
def trained(request: Any, images: Path, tmp_path_factory: pytest.TempPathFactory, fresh_python: str) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(fresh_python, work, str(folder), str(images), request.param)
    return folder


def results(folder: Path, experiment: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{experiment}-{rank}.pt", map_location="cpu", weights_only=True)


def losses(folder: Path, experiment: str) -> list[Mapping[str, float]]:
    return [record.losses for record in read_records(folder / experiment / "results.jsonl")]


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_weights_are_those_of_whole_networks(name: str, trained: Path) -> None:
    for rank in range(2):
        undivided, parts = (results(trained, f"{name}-{kind}", rank) for kind in ("ddp", "fsdp"))
        for part in ("weights", "average"):
            torch.testing.assert_close(parts[part], undivided[part], rtol=0, atol=1e-5)
        assert parts["bytes"] <= 0.55 * undivided["bytes"]
    for one, other in zip(*(losses(trained, f"{name}-{kind}") for kind in ("ddp", "fsdp")), strict=True):
        assert other == pytest.approx(one, abs=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(trained: Path) -> None:
    for rank in range(2):
        left_alone, resumed = (results(trained, name, rank) for name in ("whole", "resumed"))
        for part in ("weights", "average"):
            assert all(torch.equal(resumed[part][name], value) for name, value in left_alone[part].items())
    assert (trained / "stopped" / "best" / "model.safetensors").read_bytes() == (
        trained / "whole" / "best" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(("shape", "axis"), [((6, 4), 0), ((3, 4), 1), ((1, 5, 8), 2), ((5,), 0), ((1, 3), 0)])
def test_a_parameter_is_divided_along_an_axis_of_equal_parts(shape: tuple[int, ...], axis: int) -> None:
    assert _placement(torch.nn.Parameter(torch.empty(shape)), 2).dim == axis
