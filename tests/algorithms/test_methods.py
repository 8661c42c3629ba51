"""Properties that methods share, such as metadata, precision and accumulation, and details of single methods."""

from copy import deepcopy
from dataclasses import replace

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

from tests.algorithms.networks import CLASSES, SmallMlp, build, minibatches, network, train
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.algorithms.adversarial import cycle_length
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.layers.router import Router
from timm_moe_dg.networks.freeze import freeze_batch_norm


@pytest.mark.parametrize("method", ["ERM", "SD", "MIRO"])
def test_accumulated_parts_add_up_where_the_objective_is_a_mean_over_images(method):
    nets = network("mlp"), network("mlp")
    for net, parts in zip(nets, (1, 3), strict=True):
        algorithm, context = build(method, net)
        train(algorithm, replace(context, grad_accum_steps=parts), "mlp", range(2))
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def places():
    """Minibatches with coordinates."""
    torch.manual_seed(0)
    return [
        (torch.randn(4, 3, 16, 16), torch.randint(CLASSES, (4,)), torch.rand(4, 2) * 60 + 10 * domain)
        for domain in range(3)
    ]


@pytest.mark.parametrize("method", sorted(ALGORITHMS.keys() - {"Mixup"}))
def test_metadata_reach_the_model_and_its_own_losses_every_objective(method):
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": (1,)}
    network = timm.create_model("moge_tiny", num_classes=CLASSES, num_experts=3, top_k=2, **size).train()
    algorithm = ALGORITHMS[method](Setup(network, 3, CLASSES, hparams={"lr": 1e-3, "n_meta_test": 1}))
    parameters = [*network.parameters(), *(p for g in algorithm.parameter_groups(1e-3, 0.0) for p in g["params"])]
    losses = algorithm.update(StepContext(network, torch.optim.Adam(parameters, lr=1e-3)), places())
    assert {"aux_loss", "supcon_loss"} <= losses.keys()
    assert all(value.isfinite() for value in losses.values())
    # The location encoder learns from places only
    assert any(parameter.grad.abs().max() > 0 for parameter in network.metadata_encoder.parameters())


@pytest.mark.parametrize("method", ALGORITHMS)
def test_bfloat16_stays_near_float32(method):
    found = []
    for enabled in (False, True):
        net = network("mixture").float()
        algorithm, context = build(method, net)
        algorithm.float()
        forward = net.forward

        def half(images, forward=forward, enabled=enabled):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return forward(images)

        net.forward = half
        for step in range(2):
            torch.manual_seed(step)
            losses = algorithm.update(context, [(x.float(), y) for x, y in minibatches("mixture", step)])
        found.append(losses)
    for name, value in found[1].items():
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(found[0][name].item(), rel=0.1, abs=0.02), name


def nonlinear():
    net = SmallMlp()
    net.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    return net


def refused_step(method, change=lambda context: context, step=lambda: minibatches("mlp", 0), **hparams):
    algorithm, context = build(method, network("mlp"), **hparams)
    algorithm.update(change(context), step())


def with_scaler(context):
    context.optimizer.scaler = object()  # as accelerate's optimizer has it with float16
    return context


PARTS = [name for name, method in ALGORITHMS.items() if not method.ACCUMULATES]
SEVERAL = [name for name, method in ALGORITHMS.items() if method.MIN_DOMAINS > 1]
REFUSED = [
    *(
        (f"grad_accum_steps=2: {m} ", lambda m=m: refused_step(m, lambda c: replace(c, grad_accum_steps=2)))
        for m in PARTS
    ),
    *((f"algorithm='{m}': ", lambda m=m: ALGORITHMS[m](Setup(network("mlp"), 1, CLASSES))) for m in SEVERAL),
    *(
        ("model='SmallMlp': ", lambda m=m: ALGORITHMS[m](Setup(nonlinear(), 3, CLASSES)))
        for m in ("Fishr", "CORAL", "MMD", "DANN", "CDANN")
    ),
    ("model='Linear': ", lambda: ALGORITHMS["MIRO"](Setup(nn.Linear(2, 2), 3, CLASSES))),
    ("algorithm='Mixup': ", lambda: refused_step("Mixup", step=places)),
    ("n_meta_test=2: ", lambda: ALGORITHMS["MLDG"](Setup(network("mlp"), 2, CLASSES))),
    ("amp_dtype='float16': ", lambda: refused_step("MLDG", with_scaler)),
]


@pytest.mark.parametrize(("argument", "call"), REFUSED, ids=lambda value: None if callable(value) else value)
def test_what_a_method_cannot_train_is_refused(argument, call):
    with pytest.raises((ArgumentError, ProtocolError), match=f"^{argument}"):
        call()


@pytest.mark.parametrize("method", ALGORITHMS)
def test_methods_without_these_limits_take_one_domain_and_parts(method):
    if ALGORITHMS[method].MIN_DOMAINS == 1:
        algorithm, context = build(method, network("mlp"), domains=1)
        assert algorithm.update(context, minibatches("mlp", 0, domains=1))["loss"].isfinite()
    if ALGORITHMS[method].ACCUMULATES:
        algorithm, context = build(method, network("mlp"))
        assert algorithm.update(replace(context, grad_accum_steps=2), minibatches("mlp", 0))["loss"].isfinite()


# Details of single methods


def risks_of(net, batches):
    return torch.stack([F.cross_entropy(net(images), targets) for images, targets in batches]).detach()


def test_group_dro_raises_weights_with_risks_and_leaves_the_proportions_of_other_domains():
    net, batches = network("mlp"), minibatches("mlp", 0, domains=2)
    risks = risks_of(net, batches)
    algorithm, context = build("GroupDRO", net, domains=5, per_step=2, groupdro_eta=0.5)
    losses = algorithm.update(replace(context, domains=[3, 1]), batches)
    factors = torch.ones(5, dtype=torch.float64)
    factors[[3, 1]] = (0.5 * risks).exp()
    torch.testing.assert_close(algorithm.weights, factors / factors.sum(), rtol=1e-6, atol=0)
    # Over all pairs that can be drawn alike, each domain's share of the loss is its weight
    torch.testing.assert_close(losses["task_loss"], 5 / 2 * (algorithm.weights[[3, 1]] * risks).sum())
    torch.testing.assert_close(losses["worst_risk"], risks.max())


@pytest.mark.parametrize("name", ["adam", "lamb", "adan"])
def test_a_fresh_optimizer_takes_the_steps_of_a_new_one(name):
    net = network("mlp")
    algorithm, context = build("VREx", net, vrex_penalty_anneal_iters=2)
    optimizer = create_optimizer_v2(net, name, lr=0.1)
    train(algorithm, replace(context, optimizer=optimizer), "mlp", range(2))
    other = deepcopy(net)
    for model, its_optimizer in ((net, optimizer), (other, create_optimizer_v2(other, name, lr=0.1))):
        train(algorithm, replace(context, model=model, optimizer=its_optimizer), "mlp", range(2, 3))
        algorithm.count = 2
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_network_that_is_tapped_can_be_copied_and_stores_nothing_in_evaluations():
    net = network("mlp")
    algorithm, context = build("CORAL", net)
    train(algorithm, context, "mlp", range(1))
    deepcopy(net).train()(minibatches("mlp", 0)[0][0])
    net.eval()(minibatches("mlp", 0)[0][0])
    assert algorithm._features._stored is None


def test_adversaries_give_the_run_s_optimizer_their_betas_and_take_turns():
    net = network("mlp")
    algorithm, context = build("DANN", net, beta1=0.25)
    turns = []
    for step in range(4):
        algorithm.update(context, minibatches("mlp", step))
        turns.append(algorithm.trains_network)
    assert turns == [False, True, False, False]  # two steps of the discriminator for one of the network
    assert (cycle_length(algorithm.hparams), cycle_length({})) == (3, 1)
    assert context.optimizer.param_groups[0]["betas"] == (0.25, 0.9)
    sgd = StepContext(net, torch.optim.SGD(net.parameters(), lr=0.1))
    algorithm.update(sgd, minibatches("mlp", 1))
    assert "betas" not in sgd.optimizer.param_groups[0]


@pytest.mark.parametrize("name", ["adan", "adanw", "adamp", "lion"])
def test_adversaries_leave_further_betas_as_they_are(name):
    net = network("mlp").float()
    optimizer = create_optimizer_v2(net, name, lr=1e-3)
    before = optimizer.param_groups[0]["betas"]
    algorithm, _ = build("DANN", net, d_steps_per_g_step=1)
    algorithm.float()
    for step in range(2):
        batch = [(images.float(), targets) for images, targets in minibatches("mlp", step)]
        algorithm.update(StepContext(net, optimizer), batch)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.9, *before[2:])


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("name", "turns"), [("DANN", [0, 1, 0, 0, 1]), ("CDANN", [1, 0, 1, 0, 1]), ("ERM", [1] * 5)])
def test_routers_count_the_items_of_the_network_s_own_steps(monkeypatch, name, turns, skipped):
    counts = []
    monkeypatch.setattr(Router, "after_step", lambda self: counts.append(int(self.expert_counts.sum())))
    net = network("mixture")
    layer = net.blocks[1].mlp
    layer.router.expert_bias = torch.zeros(3, dtype=torch.float64)
    algorithm, context = build(name, net)
    for step, is_network in enumerate(turns):
        counts.clear()
        context.optimizer.step_was_skipped = skipped
        algorithm.take_step(context, minibatches("mixture", step))
        items = 3 * 6 * 5 * layer.router.top_k  # domains, images, and four patches with a class token
        assert counts == ([items] if is_network and not skipped else [])
        assert layer.router.expert_counts.sum() == 0


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("name", "buffer"), [("GroupDRO", "weights"), ("Fishr", "variances")])
def test_a_step_that_the_scaling_of_float16_skips_moves_no_weights_and_averages(name, buffer, skipped):
    algorithm, context = build(name, network("mlp"))
    algorithm.take_step(context, minibatches("mlp", 0))
    before = getattr(algorithm, buffer).clone()
    context.optimizer.step_was_skipped, context.optimizer.scaler = skipped, object()
    algorithm.take_step(context, minibatches("mlp", 1))
    assert torch.equal(getattr(algorithm, buffer), before) == skipped


def test_fish_interpolates_running_statistics_and_keeps_counts():
    class Normalized(SmallMlp):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(10)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # as an attention mask has it

        def embed(self, images):
            return self.out(self.norm(self.hidden(images.flatten(1))))

    net = Normalized().double()
    algorithm, context = build("Fish", net, meta_lr=0.25)
    before, inner = net.norm.running_mean.clone(), deepcopy(net)
    _, again = build("ERM", inner)
    for images, targets in minibatches("mlp", 0):
        again.optimizer.zero_grad()
        F.cross_entropy(inner(images), targets).backward()
        again.optimizer.step()
    algorithm.update(context, minibatches("mlp", 0))
    torch.testing.assert_close(net.norm.running_mean, before + 0.25 * (inner.norm.running_mean - before))
    assert net.norm.num_batches_tracked == 3
    assert net.mask.tolist() == [0.0, -torch.inf]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", {"channels": (8, 8, 8, 8), "stem_width": 8}),
        ("densenet121", {"growth_rate": 4, "block_config": (1, 1)}),  # its first tapped module is a BatchNorm
    ],
)
def test_miro_finds_the_channels_of_convolutional_networks_with_frozen_statistics(name, size):
    net = timm.create_model(name, num_classes=CLASSES, **size).train()
    freeze_batch_norm(net)
    algorithm = ALGORITHMS["MIRO"](Setup(net, 1, CLASSES, hparams={"ld": 0.1}))
    images = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    losses = algorithm.objective(StepContext(net, None), [images])
    assert [len(b) for b in algorithm.b] == [info["num_chs"] for info in net.feature_info]
    assert losses["penalty"].isfinite()
