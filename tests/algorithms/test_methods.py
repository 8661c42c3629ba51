"""What methods share, and what they refuse: metadata, precision, accumulation, classifiers, numbers of domains."""

import pytest
import timm
import torch

from tests.algorithms.networks import CLASSES, minibatches, network
from tests.algorithms.test_updates import build
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError, ProtocolError


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
    algorithm = ALGORITHMS[method](Setup(network, 3, CLASSES, hparams, aux_coef=0.01, supcon_coef=0.1))
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
