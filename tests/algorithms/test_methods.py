"""Properties that methods share, such as metadata, precision and accumulation, and details of single methods."""

from copy import deepcopy
from dataclasses import replace

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from tests.algorithms.networks import CLASSES, SmallMlp, minibatches, network
from tests.algorithms.test_updates import build, train
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError, ProtocolError
from timm_moe_dg.networks.freeze import freeze_batch_norm


@pytest.mark.parametrize("method", ALGORITHMS)
def test_one_training_domain(method):
    setup = Setup(network("mlp"), 1, CLASSES)
    if ALGORITHMS[method].MIN_DOMAINS > 1:
        with pytest.raises(ProtocolError, match=f"{method}.*needs 2 training domains and was given 1"):
            ALGORITHMS[method](setup)
        return
    net = network("mlp")
    algorithm, context = build(method, net, domains=1)
    losses = algorithm.update(context, minibatches("mlp", 0, domains=1))
    assert losses["loss"].isfinite()


@pytest.mark.parametrize("method", ALGORITHMS)
def test_accumulation_is_refused_where_it_has_no_meaning(method):
    algorithm, context = build(method, network("mlp"))
    context = StepContext(context.model, context.optimizer, grad_accum_steps=2)
    if not ALGORITHMS[method].ACCUMULATES:
        with pytest.raises(ArgumentError, match=f"grad_accum_steps=2: {method} needs a whole step"):
            algorithm.update(context, minibatches("mlp", 0))
    else:
        assert algorithm.update(context, minibatches("mlp", 0))["loss"].isfinite()


@pytest.mark.parametrize("method", ["ERM", "SD", "MIRO"])
def test_accumulated_parts_add_up_where_the_objective_is_a_mean_over_images(method):
    nets = network("mlp"), network("mlp")
    for net, parts in zip(nets, (1, 3), strict=True):
        algorithm, context = build(method, net)
        for step in range(2):
            algorithm.update(StepContext(net, context.optimizer, grad_accum_steps=parts), minibatches("mlp", step))
    for one, other in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


@pytest.fixture
def moge():
    torch.manual_seed(0)
    size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "moe_layers": (1,)}
    return timm.create_model("moge_tiny", num_classes=CLASSES, num_experts=3, top_k=2, **size)


def places():
    torch.manual_seed(0)
    return [
        (torch.randn(4, 3, 16, 16), torch.randint(CLASSES, (4,)), torch.rand(4, 2) * 60 + 10 * domain)
        for domain in range(3)
    ]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_metadata_reach_the_model_and_its_own_losses_every_objective(method, moge):
    hparams = {"lr": 1e-3, "n_meta_test": 1}
    network = moge.train()
    algorithm = ALGORITHMS[method](Setup(network, 3, CLASSES, hparams=hparams))
    parameters = [*network.parameters(), *(p for g in algorithm.parameter_groups(1e-3, 0.0) for p in g["params"])]
    context = StepContext(network, torch.optim.Adam(parameters, lr=1e-3))
    if method == "Mixup":
        with pytest.raises(ArgumentError, match="algorithm='Mixup': cannot mix the locations of images"):
            algorithm.update(context, places())
        return
    losses = algorithm.update(context, places())
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


# Details of single methods


def risks_of(net, batches):
    return torch.stack([torch.nn.functional.cross_entropy(net(images), targets) for images, targets in batches])


def test_group_dro_starts_from_equal_weights_that_rise_with_the_risks():
    net, batches = network("mlp"), minibatches("mlp", 0)
    risks = risks_of(net, batches).detach()
    algorithm, context = build("GroupDRO", net, groupdro_eta=0.5)
    losses = algorithm.update(context, batches)
    expected = (0.5 * risks).softmax(0)
    torch.testing.assert_close(algorithm.weights.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(losses["task_loss"], (algorithm.weights * risks).sum())


def test_group_dro_leaves_the_proportions_of_the_domains_that_a_step_has_not_drawn():
    net, batches = network("mlp"), minibatches("mlp", 0, domains=2)
    risks = risks_of(net, batches).detach()
    algorithm, context = build("GroupDRO", net, domains=5, per_step=2, groupdro_eta=0.5)
    losses = algorithm.update(replace(context, domains=[3, 1]), batches)
    factors = torch.ones(5, dtype=torch.float64)
    factors[[3, 1]] = (0.5 * risks).exp()
    torch.testing.assert_close(algorithm.weights, factors / factors.sum(), rtol=1e-6, atol=0)
    # Over all pairs that can be drawn alike, each domain's share of the loss is its weight
    torch.testing.assert_close(losses["task_loss"], 5 / 2 * (algorithm.weights[[3, 1]] * risks).sum())


@pytest.mark.parametrize("anneal", [0, 2])
def test_v_rex_weighs_the_variance_by_1_and_from_its_step_on_by_lambda_with_a_fresh_optimizer(anneal):
    net = network("mlp")
    algorithm, context = build("VREx", net, vrex_lambda=7.0, vrex_penalty_anneal_iters=anneal)
    for step in range(4):
        batches = minibatches("mlp", step)
        risks = risks_of(net, batches).detach()
        weight = 7.0 if step >= anneal else 1.0
        losses = algorithm.update(context, batches)
        torch.testing.assert_close(losses["loss"], risks.mean() + weight * risks.var(correction=0))
        counted = {int(state["step"]) for state in context.optimizer.state.values()}
        assert counted == {step + 1 - (anneal if step >= anneal else 0)}


@pytest.mark.parametrize("name", ["adam", "lamb", "adan"])
def test_a_fresh_optimizer_takes_the_steps_of_a_new_one(name):
    net = network("mlp")
    algorithm, context = build("VREx", net, vrex_penalty_anneal_iters=2)
    optimizer = create_optimizer_v2(net, name, lr=0.1)
    train(algorithm, replace(context, optimizer=optimizer), "mlp", range(2))
    other = deepcopy(net)
    optimizers = [optimizer, create_optimizer_v2(other, name, lr=0.1)]
    for model, its_optimizer in zip((net, other), optimizers, strict=True):
        train(algorithm, replace(context, model=model, optimizer=its_optimizer), "mlp", range(2, 3))
        algorithm.count = 2
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("method", ["Fishr", "CORAL", "MMD", "DANN", "CDANN"])
def test_a_classifier_that_is_not_linear_is_refused(method):
    net = SmallMlp()
    net.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    with pytest.raises(ArgumentError, match=f"SmallMlp.*{method} needs a linear classifier and this is Sequential"):
        ALGORITHMS[method](Setup(net, 3, CLASSES))


def test_a_network_that_is_tapped_can_be_copied_and_its_copy_is_a_network_of_its_own():
    net = network("mlp")
    algorithm, context = build("CORAL", net)
    train(algorithm, context, "mlp", range(1))
    copy = deepcopy(net)
    copy.train()(minibatches("mlp", 0)[0][0])
    assert algorithm._features._stored is None
    net.eval()(minibatches("mlp", 0)[0][0])
    assert algorithm._features._stored is None


def test_adversaries_give_the_run_s_optimizer_their_betas():
    net = network("mlp")
    algorithm, context = build("DANN", net, beta1=0.25)
    algorithm.update(context, minibatches("mlp", 0))
    assert context.optimizer.param_groups[0]["betas"] == (0.25, 0.9)
    sgd = StepContext(net, torch.optim.SGD(net.parameters(), lr=0.1))
    algorithm.update(sgd, minibatches("mlp", 1))
    assert "betas" not in sgd.optimizer.param_groups[0]


def test_as_many_meta_test_domains_as_domains_are_refused():
    with pytest.raises(ProtocolError, match="n_meta_test=2: must be less than the number of training domains, 2"):
        ALGORITHMS["MLDG"](Setup(network("mlp"), 2, CLASSES))


def test_mldg_refuses_scaled_gradients():
    algorithm, context = build("MLDG", network("mlp"))
    context.optimizer.scaler = object()  # as accelerate's optimizer has it with float16
    with pytest.raises(ArgumentError, match="amp_dtype='float16': MLDG"):
        algorithm.update(context, minibatches("mlp", 0))


def test_fish_interpolates_running_statistics_and_keeps_counts():
    class Normalized(SmallMlp):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(10)
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))  # as an attention mask has it

        def embed(self, images):
            return self.out(self.norm(self.hidden(images.flatten(1))))

    torch.manual_seed(0)
    net = Normalized().double()
    algorithm, context = build("Fish", net, meta_lr=0.25)
    before = net.norm.running_mean.clone()
    inner = Normalized().double()
    inner.load_state_dict(net.state_dict())
    _, again = build("ERM", inner)
    for minibatch in minibatches("mlp", 0):
        again.optimizer.zero_grad()
        nn.functional.cross_entropy(inner(minibatch[0]), minibatch[1]).backward()
        again.optimizer.step()
    algorithm.update(context, minibatches("mlp", 0))
    torch.testing.assert_close(net.norm.running_mean, before + 0.25 * (inner.norm.running_mean - before))
    assert net.norm.num_batches_tracked == 3
    assert net.mask.tolist() == [0.0, -torch.inf]


def test_miro_refuses_a_network_that_does_not_list_its_blocks():
    with pytest.raises(ArgumentError, match="feature_info"):
        ALGORITHMS["MIRO"](Setup(nn.Linear(2, 2), 3, CLASSES))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", {"channels": (8, 8, 8, 8), "stem_width": 8}),
        ("densenet121", {"growth_rate": 4, "block_config": (1, 1)}),  # its first tapped module is a BatchNorm
    ],
)
def test_miro_finds_the_channels_of_convolutional_networks_with_frozen_statistics(name, size):
    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=CLASSES, **size).train()
    freeze_batch_norm(net)
    algorithm = ALGORITHMS["MIRO"](Setup(net, 1, CLASSES, hparams={"ld": 0.1}))
    images = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    losses = algorithm.objective(StepContext(net, None), [images])
    assert [len(b) for b in algorithm.b] == [info["num_chs"] for info in net.feature_info]
    assert losses["penalty"].isfinite()
