"""Routers that balance by buffers, in a model: steps, checkpoints, saved files, processes and averages."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import timm_moe_dg
from timm_moe_dg.algorithms import ERM, Setup, StepContext
from timm_moe_dg.finetuning.optimization import LinearProbing
from timm_moe_dg.layers import LossWeights, Router
from timm_moe_dg.networks.averages import match_experts, mean_weights
from timm_moe_dg.networks.freeze import FREEZABLE
from timm_moe_dg.protocols.options import RunOptions

SIZES = {"img_size": 32, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 4}
KINDS: dict[str, dict[str, Any]] = {
    "bias": {"scores": "sigmoid", "bias_speed": 0.01},
    "threshold": {"choice": "threshold"},
}


def still(kind: str, **options: Any) -> nn.Module:
    """A model whose forwards in training are those of evaluation."""
    torch.manual_seed(0)
    quiet = {"router_noise": 0.0, "expert_drop": 0.0, "router": "linear", "router_kwargs": KINDS[kind]}
    return timm.create_model("gmoe_tiny_patch16", **SIZES, **quiet, **options).train()


def domains() -> list[tuple[Tensor, Tensor]]:
    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return [(part, torch.arange(4)) for part in images.split(4)]


def take_steps(model: nn.Module, number: int, lr: float = 0.1, **context: Any) -> dict[str, Tensor]:
    setup = Setup(model, 3, 4, loss_weights=LossWeights(z_coef=0.1, image_coef=0.1, domain_coef=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(number):
        scalars = ERM(setup).take_step(StepContext(model, optimizer, **context), domains())
    return scalars


def state(model: nn.Module) -> Tensor:
    (router,) = (module for module in model.modules() if isinstance(module, Router))
    return router.expert_thresholds if router.expert_bias is None else router.expert_bias


@pytest.mark.parametrize("kind", KINDS)
def test_in_half_precision_the_state_moves_by_small_steps_too(kind):
    whole, half = still(kind), still(kind).bfloat16()
    assert {value.dtype for value in half.parameters()} == {torch.bfloat16}
    for model in (whole, half):
        (router,) = (module for module in model.modules() if isinstance(module, Router))
        state(model).fill_(0.75)
        router.expert_counts = torch.arange(router.num_experts)
        if router.threshold_sums is not None:
            router.threshold_sums = torch.tensor([0.7] * router.num_experts + [1.0])
        timm_moe_dg.after_step(model)
    assert torch.equal(state(half), state(whole))


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_checkpointing_move_the_state_as_a_plain_step(kind):
    states = {}
    for way in ("plain", "accumulated", "checkpointed"):
        model = still(kind)
        model.set_grad_checkpointing(way == "checkpointed")
        take_steps(model, 1, grad_accum_steps=2 if way == "accumulated" else 1)
        states[way] = state(model).clone()
    torch.testing.assert_close(states["checkpointed"], states["plain"])
    # Thresholds of the parts of a batch are averaged, and a quantile is not a mean
    tolerance = {"rtol": 0, "atol": 0.01 if kind == "threshold" else 1e-8}
    torch.testing.assert_close(states["accumulated"], states["plain"], **tolerance)
    assert states["plain"].isfinite().all()
    assert states["plain"].abs().max() > 0


@pytest.mark.parametrize("part", ["backbone", "routers"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_a_frozen_router_stays(kind, part):
    model = still(kind)
    take_steps(model, 1)
    before = state(model).clone()
    FREEZABLE[part](model)
    take_steps(model, 2)
    assert torch.equal(state(model), before)


@pytest.mark.parametrize("routers", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_steps_move_the_state_of_routers_that_they_train(kind, routers):
    model = still(kind)
    take_steps(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probing = LinearProbing(model, optimizer, RunOptions(linear_steps=2, linear_routers=routers))
    states = [state(model).clone()]
    for step in range(3):
        probing.start_step(step)
        ERM(Setup(model, 3, 4)).take_step(StepContext(model, optimizer), domains())
        states.append(state(model).clone())
    moves = [not torch.equal(*pair) for pair in pairwise(states)]
    assert moves == [routers, routers, True]


@pytest.mark.parametrize(("shares", "is_unset"), [(None, False), ([0.5, 0.5], False), ([0, 1], False), ([1, 0], True)])
def test_thresholds_that_no_step_has_set_do_not_count_in_an_average(shares, is_unset):
    start, model = still("threshold"), still("threshold")
    take_steps(model, 1)
    mean = mean_weights([start.state_dict(), model.state_dict()], shares)
    (thresholds,) = (value for name, value in mean.items() if name.endswith("expert_thresholds"))
    assert torch.equal(thresholds, state(start) if is_unset else state(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_and_a_saved_file_go_on_bit_by_bit(kind, tmp_path: Path):
    model = still(kind, shared_expert=True, expert_width=0.5)
    take_steps(model, 2)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())["model_args"]
    assert config["router_kwargs"] == KINDS[kind]
    assert (config["shared_expert"], config["expert_width"], config["expert_reinit"]) == (True, 0.5, 0.0)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).train()
    resumed = still(kind, shared_expert=True, expert_width=0.5)
    resumed.load_state_dict(model.state_dict())
    for network in (model, loaded, resumed):
        take_steps(network, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_another_order_are_matched_with_their_state(kind):
    model = still(kind)
    take_steps(model, 1)
    weights = model.state_dict()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    rows = ("experts.fc1", "experts.fc2", "router.gate.weight", *(f"router.{name}" for name in Router.expert_state))
    other = {name: value[order] if any(row in name for row in rows) else value for name, value in weights.items()}
    matched = match_experts(model, weights, other)
    assert all(torch.equal(matched[name], value) for name, value in weights.items())


def _work(rank: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for kind in KINDS:
        model = still(kind)
        wrapped = nn.parallel.DistributedDataParallel(model)
        halves = [(part[rank::2], targets[rank::2]) for part, targets in domains()]
        context = StepContext(wrapped, torch.optim.SGD(model.parameters(), lr=0.0))
        ERM(Setup(model, 3, 4)).take_step(context, halves)
        torch.save(state(model), f"{folder}/{kind}{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_move_the_state_as_two_parts_of_one(tmp_path: Path):
    torch.multiprocessing.spawn(_work, (str(tmp_path),), nprocs=2)
    for kind in KINDS:
        model = still(kind)
        for rank in range(2):  # the same halves, one after the other in one step
            model(torch.cat([part[rank::2] for part, _ in domains()]))
        timm_moe_dg.after_step(model)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=True), state(model))
