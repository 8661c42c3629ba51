"""Optimizers and schedules against their closed forms, and what moves in linear probing before fine-tuning."""

import math

import pytest
import timm
import torch
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.algorithms.networks import CLASSES, DOMAINS, minibatches
from tests.algorithms.networks import network as build_network
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.optimization import LinearProbing, build_optimizer, build_schedule, check_optimizer
from timm_moe_dg.protocols.options import RunOptions
from timm_moe_dg.storage.run_folder import Checkpoints, read_checkpoint


@pytest.fixture(scope="module")
def network():
    return timm.create_model("gmoe_tiny_patch16", embed_dim=48, depth=3, num_heads=3, moe_layers=(1,), img_size=32)


def rates(optimizer, schedule, steps):
    found = []
    for step in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step + 1)
    return found


def test_default_is_one_group_of_everything_decayed_alike(network):
    optimizer = build_optimizer(network, "adam", lr=1e-3, weight_decay=0.1)
    (group,) = optimizer.param_groups
    assert type(optimizer) is torch.optim.Adam
    assert group["fused"]
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in network.parameters()]
    assert group["weight_decay"] == 0.1
    assert build_schedule(optimizer, None, steps=10) is None


def test_groups_of_the_algorithm_keep_their_own_rates(network):
    extra = nn.Parameter(torch.zeros(3))
    extra_groups = [{"params": [extra], "lr": 0.5, "weight_decay": 0.0}]
    optimizer = build_optimizer(network, "adamw", lr=1e-3, weight_decay=0.1, extra_groups=extra_groups)
    assert (optimizer.param_groups[1]["lr"], optimizer.param_groups[1]["weight_decay"]) == (0.5, 0.0)
    assert "params" in extra_groups[0]


SHAPES = {  # share of the learning rate after a share of the steps that follow the warm-up
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "tanh": lambda share: (1 - math.tanh(10 * share - 7)) / 2,
    "poly": lambda share: 1 - share,
}


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 3), (20, 4), (5, 4)])
@pytest.mark.parametrize("name", SHAPES)
def test_schedules_rise_to_the_learning_rate_and_decay_over_the_other_steps(network, name, steps, warmup):
    optimizer = build_optimizer(network, "sgd", lr=0.8, weight_decay=0.0)
    schedule = build_schedule(optimizer, name, steps=steps, warmup_steps=warmup, min_lr=0.1)
    rising = [0.8 * step / warmup for step in range(warmup)]
    falling = [0.1 + 0.7 * SHAPES[name](step / (steps - warmup)) for step in range(steps - warmup)]
    assert rates(optimizer, schedule, steps) == pytest.approx(rising + falling)


@pytest.mark.parametrize("layer_decay", [None, 0.5])
@pytest.mark.parametrize("name", [*SHAPES, None])
def test_rates_after_a_stop_at_any_step_are_those_of_a_run_without_one(network, name, layer_decay):
    def start():
        optimizer = build_optimizer(network, "sgd", lr=0.8, weight_decay=0.0, layer_decay=layer_decay)
        return optimizer, build_schedule(optimizer, name, steps=10, warmup_steps=3, min_lr=0.1)

    expected = rates(*start(), 10)
    for stop in range(10):
        optimizer, schedule = start()
        before = rates(optimizer, schedule, stop)
        resumed, schedule = start()
        resumed.load_state_dict(optimizer.state_dict())
        after = []
        for step in range(stop, 10):
            after.append(resumed.param_groups[0]["lr"])
            schedule.step_update(step + 1)
        assert before + after == expected


def test_warmup_alone_stays_constant_afterwards(network):
    optimizer = build_optimizer(network, "adam", lr=0.4, weight_decay=0.0)
    schedule = build_schedule(optimizer, None, steps=200, warmup_steps=2)
    assert rates(optimizer, schedule, 200) == pytest.approx([0.0, 0.2, *[0.4] * 198])


def test_layer_decay_reaches_the_rates_at_a_constant_schedule(network):
    optimizer = build_optimizer(network, "adam", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    build_schedule(optimizer, None, steps=10)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    rate = {names[id(value)]: group["lr"] for group in optimizer.param_groups for value in group["params"]}
    assert rate["head.weight"] == 1.0
    above = [rate[f"blocks.{block}.norm1.weight"] for block in (2, 1, 0)] + [rate["patch_embed.proj.weight"]]
    assert above == pytest.approx([0.5, 0.25, 0.125, 0.0625])


def test_mistakes_are_named(network):
    with pytest.raises(ArgumentError, match="opt='adamm'"):
        check_optimizer("adamm")
    optimizer = build_optimizer(network, "adam", lr=0.4, weight_decay=0.0)
    with pytest.raises(ArgumentError, match="warmup_steps=10: is not less than the run's 10 steps"):
        build_schedule(optimizer, "cosine", steps=10, warmup_steps=10)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "lamb"])
def test_moments_from_a_checkpoint_have_the_memory_layout_of_their_parameters(tmp_path, name):
    def start():
        torch.manual_seed(0)
        layer = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        return layer, build_optimizer(layer, name, lr=0.1, weight_decay=0.01)

    def steps(layer, optimizer, numbers):
        for number in numbers:
            optimizer.zero_grad()
            layer(torch.linspace(0, number, 100).view(1, 4, 5, 5)).square().sum().backward()
            optimizer.step()

    layer, optimizer = start()
    steps(layer, optimizer, (1, 2))
    resumed = start()
    resumed[0].load_state_dict(layer.state_dict())
    resumed[1].load_state_dict(read_checkpoint(Checkpoints(tmp_path).save(2, optimizer.state_dict())))
    for pair in ((layer, optimizer), resumed):
        steps(*pair, (3, 4))
    assert torch.equal(layer.weight, resumed[0].weight)


METHODS = [name for name, method in ALGORITHMS.items() if method.TAKES_LINEAR_STEPS]
HPARAMS = {"mlp_width": 8, "irm_penalty_anneal_iters": 1, "vrex_penalty_anneal_iters": 1}
LR = 0.01


def train(method, opt, steps, **options):
    """Yields the weights before each step and after the last."""
    torch.manual_seed(0)
    net = build_network("mixture")
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


# Of each family: three betas, signs, matrices, reset slow weights, factored moments, norms, variance reduction
ODD = ["adan", "adanw", "lion", "muon", "nadamuon", "madgrad", "adafactorbv", "lamb", "novograd", "mars", "cadopt"]
ODD += ["nesterovw", "adadelta", "Adan"]


@pytest.mark.parametrize("opt", ODD)
@pytest.mark.parametrize("method", ["DANN", "CDANN", "Fish", "MLDG", "IRM", "RDM", "Fishr"])
def test_methods_with_inner_steps_or_changes_of_the_optimizer_train_with_any_optimizer(method, opt):
    check_optimizer(opt)
    start, *_, end = train(method, opt, 4)
    assert len(moved(start, end)) > len(start) // 2
    assert all(value.isfinite().all() for value in end.values())


@pytest.mark.parametrize("opt", ["lookahead_adam", "Lookahead_muon", "typo_adam", "adam_", "lbfgs", ""])
def test_an_optimizer_that_the_methods_cannot_reset_or_timm_does_not_list_is_refused(opt):
    with pytest.raises(ArgumentError, match=f"^opt='{opt}'"):
        check_optimizer(opt)


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
    net = build_network("mlp")
    optimizer = build_optimizer(net, "sgd", lr=LR, weight_decay=0.0)
    probing = LinearProbing(net, optimizer, RunOptions(linear_steps=1, linear_lr=1.0))
    probing.start_step(0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == LR


def test_bad_options_are_named():
    net = build_network("mlp")
    with pytest.raises(ArgumentError, match=r"linear_routers=True: SmallMlp has no routers"):
        LinearProbing(net, build_optimizer(net, "sgd", lr=1.0, weight_decay=0.0), RunOptions(linear_routers=True))
