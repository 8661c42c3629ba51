"""Linear probing before fine-tuning: what moves in which step, with every method and optimizer."""

import os
import re
import signal
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.algorithms.networks import CLASSES, DOMAINS, minibatches, network
from tests.load_tool import load_tool
from tests.tools.test_finetune_resume import during_step
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.linear_probing import LinearProbing
from timm_moe_dg.finetuning.optimization import build_optimizer
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.protocols.records import read_records

METHODS = [name for name, method in ALGORITHMS.items() if method.TAKES_LINEAR_STEPS]
HPARAMS = {"mlp_width": 8, "irm_penalty_anneal_iters": 1, "vrex_penalty_anneal_iters": 1}
LR = 0.01


def train(method, opt, steps, **options):
    """Yields the weights before each step and after the last."""
    torch.manual_seed(0)
    net = network("mixture")
    algorithm = ALGORITHMS[method](Setup(net, DOMAINS, CLASSES, hparams=HPARAMS)).double()
    groups = algorithm.parameter_groups(lr=LR, weight_decay=0.1)
    optimizer = build_optimizer(net, opt, lr=LR, weight_decay=0.1, extra_groups=groups, in_turn=True)
    probing = LinearProbing(net, optimizer, RunOptions(**options))
    for step in range(steps):
        yield {name: value.detach().clone() for name, value in net.named_parameters()}
        probing.start_step(step)
        algorithm.update(StepContext(net, optimizer), minibatches("mixture", step))
    yield dict(net.named_parameters())


def moved(before, after):
    """The first part of the names of parameters that are not the same bit for bit."""
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("method", "opt"), [*((name, "adamw") for name in METHODS), ("ERM", "adam"), ("ERM", "momentum"), ("ERM", "lamb")]
)
def test_only_the_classifier_moves_in_the_first_steps(method, opt):
    # Adversarial methods take a step of their discriminator between two of the network
    start, _, probed, _, tuned = train(method, opt, 4, linear_steps=2)
    assert moved(start, probed) == {"head.weight", "head.bias"}
    assert len(moved(probed, tuned)) > len(start) // 2


def test_linear_routers_move_with_the_classifier():
    start, probed = train("ERM", "adam", 1, linear_steps=1, linear_routers=True)
    assert {name.split(".mlp.")[-1].split(".")[0] for name in moved(start, probed)} == {"router", "head"}


def test_the_learning_rate_of_linear_steps_ends_with_them():
    # Gradients of the first step are the same, and plain gradient descent moves in proportion to its rate
    runs = [list(train("ERM", "sgd", 2, linear_steps=1, linear_lr=rate)) for rate in (LR, 3 * LR)]
    usual, faster = (probed["head.weight"] - start["head.weight"] for start, probed, _ in runs)
    assert torch.allclose(faster, 3 * usual, rtol=1e-9)
    assert all(
        torch.equal(*pair)
        for pair in zip(runs[0][2].values(), [*train("ERM", "sgd", 2, linear_steps=1)][2].values(), strict=True)
    )
    net = network("mlp")
    optimizer = build_optimizer(net, "sgd", lr=LR, weight_decay=0.0)
    probing = LinearProbing(net, optimizer, RunOptions(linear_steps=1, linear_lr=1.0))
    probing.start_step(0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == LR


def test_bad_options_are_named():
    net = network("mlp")
    with pytest.raises(ArgumentError, match=r"linear_routers=True: SmallMlp has no routers"):
        LinearProbing(net, build_optimizer(net, "sgd", lr=1.0, weight_decay=0.0), RunOptions(linear_routers=True))


SIZE = ["patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2"]
RUN = ["--model", "gmoe_tiny_patch16", "--model-kwargs", *SIZE, "--batch-size", "2", "--lr", "0.01", "--workers", "0"]
RUN += ["--steps", "6", "--checkpoint-freq", "2", "--linear-steps", "4", "--linear-lr", "0.02", "--cpu-threads", "1"]


@pytest.mark.slow  # whole runs
def test_a_run_that_is_stopped_before_or_at_the_switch_goes_on_bit_for_bit(tmp_path):
    common = [*RUN, "--opt", "adam", "--output", str(tmp_path), "--experiment"]
    load_tool("finetune").main([*common, "whole"])
    for stop in (1, 3):
        tool = load_tool("finetune")
        with during_step(stop, partial(os.kill, os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit):
            tool.main([*common, str(stop)])
        load_tool("finetune").main(["--resume", str(tmp_path / str(stop))])
        whole, resumed = (read_records(tmp_path / run / "results.jsonl") for run in ("whole", str(stop)))
        assert [record.out_loss for record in resumed] == [record.out_loss for record in whole]
        weights = [load_file(tmp_path / run / "best_oracle" / "model.safetensors") for run in ("whole", str(stop))]
        assert not moved(*weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "MLDG"], "linear_steps=4: MLDG moves all weights in its inner steps; leave it out"),
        (["--steps", "3"], "linear_steps=4: is more than the run's 3 steps"),
        (["--freeze", "backbone"], "linear_steps=4: leave it out, or --freeze backbone"),
        (["--linear-steps", "0"], "linear_lr=0.02: has no effect without --linear-steps N; add it"),
    ],
)
def test_options_that_contradict_linear_steps_are_one_line(words, message, tmp_path):
    with pytest.raises(SystemExit, match=re.escape(message)):
        load_tool("finetune").main([*RUN, "--output", str(tmp_path), *words])
    assert not list(tmp_path.iterdir())
