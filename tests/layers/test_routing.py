"""Routers against hand arithmetic, choices of experts against plain Python, and where layers of them run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.references import choices
from tests.references.naive_moe import naive_top_k
from timm_moe_dg.layers import CosineRouter, LinearRouter, LossWeights, MoeMlp, after_step
from timm_moe_dg.layers.router import experts_choice, top_k_indices
from timm_moe_dg.layers.routers import MetadataRouter, RandomRouter, SelfRouter
from timm_moe_dg.losses import reported_losses
from timm_moe_dg.networks.export import load_onnx, record_program, save_onnx


def tokens(number: int = 40, features: int = 12) -> torch.Tensor:
    return torch.randn(number, features, generator=torch.Generator().manual_seed(0))


def test_cosine_logits_are_scaled_cosines():
    router = CosineRouter(12, 4, 2).eval()
    x = tokens()
    logits = router(x).logits
    for row, token in zip(logits, x, strict=True):
        projected = router.proj.weight @ token + router.proj.bias
        cosines = [torch.dot(projected, code) / projected.norm() / code.norm() for code in router.codes]
        torch.testing.assert_close(row, 2.0 * torch.stack(cosines), rtol=1e-5, atol=1e-6)


def test_the_scale_of_cosine_logits_is_at_most_100():
    router = CosineRouter(12, 4, 2).eval()
    small = router(tokens()).logits
    torch.nn.init.constant_(router.logit_scale, math.log(1e4))
    torch.testing.assert_close(router(tokens()).logits, small * 50, rtol=1e-5, atol=1e-5)


def test_linear_logits_have_no_bias():
    router = LinearRouter(12, 4, 2).eval()
    assert [name for name, _ in router.named_parameters()] == ["gate.weight"]
    torch.testing.assert_close(router(tokens()).logits, tokens() @ router.gate.weight.T)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_selection_takes_the_largest_and_the_lowest_index_of_equals(top_k):
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(200, 6, generator=generator) * 3).round() / 3  # four values, so most rows have ties
    expected = [naive_top_k(row, top_k) for row in scores.tolist()]
    assert top_k_indices(scores, top_k).tolist() == expected


def test_noise_is_only_in_training_and_has_the_stated_deviation():
    router = LinearRouter(12, 4, 2)
    x = tokens(20_000)
    torch.manual_seed(0)
    output = router(x)
    noise = output.noisy_logits - output.logits
    assert output.noise_std == 0.25
    # four standard errors of a deviation over 80,000 draws: 0.25 * 4 / sqrt(2 * 80000)
    assert noise.std().item() == pytest.approx(0.25, abs=0.0025)
    assert noise.mean().abs() < 4 * 0.25 / math.sqrt(80_000)
    still = router.eval()(x)
    assert still.noisy_logits is still.logits
    assert still.noise_std == 0


def test_noise_moves_the_selection_but_not_the_balanced_probabilities():
    router = LinearRouter(12, 4, 2)
    torch.manual_seed(0)
    output = router(tokens())
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))
    assert output.expert_indices.tolist() == [naive_top_k(row, 2) for row in output.noisy_logits.tolist()]
    assert output.expert_indices.tolist() != [naive_top_k(row, 2) for row in output.logits.tolist()]


@pytest.mark.parametrize("router_class", [CosineRouter, LinearRouter])
def test_autocast_does_not_change_the_routing(router_class):
    router = router_class(12, 6, 2).eval()
    expected = router(tokens())
    with torch.autocast("cpu", torch.bfloat16):
        actual = router(tokens())
    assert actual.logits.dtype == torch.float32
    assert torch.equal(actual.logits, expected.logits)


def test_metadata_router_mixes_over_the_best_k_alone():
    router = MetadataRouter(12, 5, 3).eval()
    output = router(tokens())
    mass = torch.zeros(40, 5).scatter(1, output.expert_indices, output.combine_weights)
    torch.testing.assert_close(mass.sum(1), torch.ones(40))
    torch.testing.assert_close(output.probabilities, mass)
    chosen = output.logits.gather(1, output.expert_indices)
    torch.testing.assert_close(output.combine_weights, chosen.softmax(1))


KINDS: dict[str, dict[str, Any]] = {
    "sigmoid": {"scores": "sigmoid"},
    "bias": {"scores": "sigmoid", "bias_speed": 0.01},
    "expert": {"choice": "expert"},
    "threshold": {"choice": "threshold", "scores": "sigmoid"},
}
EXACT = {"rtol": 0.0, "atol": 1e-10}


def layer(router: str = "linear", normalize: bool | None = None, top_k: int = 2, **router_kwargs: Any) -> MoeMlp:
    """A layer in float64, without noise, with 6 images of 5 tokens to come."""
    torch.manual_seed(0)
    made = MoeMlp(
        8,
        16,
        num_experts=4,
        top_k=top_k,
        router=router,
        router_kwargs=router_kwargs,
        router_noise=0.0,
        normalize_weights=normalize,
    ).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


def images(number: int = 6) -> Tensor:
    return torch.randn(number, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def expected_choice(moe: MoeMlp, values: list[list[float]]) -> list[set[int]]:
    router = moe.router
    if router.choice == "threshold":
        return choices.by_thresholds(values, router.expert_thresholds.tolist())
    if router.choice == "expert" and moe.training:
        return choices.by_experts(values, router.top_k)
    return choices.by_tokens(
        values, router.top_k, [0.0] * 4 if router.expert_bias is None else router.expert_bias.tolist()
    )


@pytest.mark.parametrize("normalize", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_the_papers_equations(kind, normalize):
    moe = layer(normalize=normalize, **KINDS[kind])
    router, x = moe.router, images()
    bias, thresholds = [0.0] * 4, [math.inf] * 4
    for step in range(3):
        moe.train()
        output = moe(x)
        logits = (x.flatten(0, 1) @ router.gate.weight.T).tolist()
        values = [choices.scores(row, router.scores) for row in logits]
        chosen = expected_choice(moe, values)
        table = [choices.weights(*pair, normalize is None) for pair in zip(values, chosen, strict=True)]
        everything = moe.experts.forward_all(x.flatten(0, 1))
        expected = torch.einsum("te,etd->td", torch.tensor(table, dtype=torch.float64), everything)
        torch.testing.assert_close(output.flatten(0, 1), expected, **EXACT)
        if router.choice == "token":
            weights = LossWeights(z_coef=1.0, image_coef=1.0, domain_coef=1.0)
            losses = {
                name: loss.value for name, loss in reported_losses(moe, torch.zeros(6), weights, [1, 3, 2]).items()
            }
            assert losses["z_loss"].item() == pytest.approx(choices.z_loss(logits), abs=1e-10)
            balance = choices.image_balance(values, chosen, 2, 6)
            assert losses["image_loss"].item() == pytest.approx(balance, abs=1e-10)
            balance = choices.domain_balance(values, [1, 3, 2], 5)
            assert losses["domain_loss"].item() == pytest.approx(balance, abs=1e-10)
        after_step(moe)
        if router.expert_bias is not None:
            counts = [sum(expert in experts for experts in chosen) for expert in range(4)]
            bias = choices.moved_bias(bias, counts, 0.01)
            torch.testing.assert_close(router.expert_bias.tolist(), bias, **EXACT)
        if router.expert_thresholds is not None:
            asked = choices.asked_thresholds(values, 2)
            thresholds = [
                new if step == 0 else 0.99 * old + 0.01 * new for old, new in zip(thresholds, asked, strict=True)
            ]
            torch.testing.assert_close(router.expert_thresholds.tolist(), thresholds, **EXACT)
        x = x + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", KINDS)
def test_in_evaluation_an_image_is_routed_alone_as_in_a_batch(kind):
    moe = layer(**KINDS[kind])
    moe(images())
    after_step(moe)
    together = moe.eval()(images())
    torch.testing.assert_close(torch.cat([moe(image[None]) for image in images()]), together, **EXACT)


def test_routers_that_balance_by_themselves_have_no_loss_and_the_thresholds_do_balance():
    for kind, options in KINDS.items():
        moe = layer(**options)
        moe(images())
        assert (moe.router.loss(moe.routing) == 0) == (kind != "sigmoid")
    after_step(moe)
    moe(images())
    taken = (~moe.routing.dropped).sum(1)
    assert taken.unique().numel() > 1  # the number of experts differs between tokens
    assert abs(taken.double().mean().item() - 2) < 0.3


def test_padding_is_neither_chosen_by_experts_nor_part_of_thresholds():
    valid = torch.tensor([[True, False, True, True, False]]).expand(6, 5)
    for kind in ("expert", "threshold"):
        padded, alone = layer(**KINDS[kind]), layer(**KINDS[kind])
        padded.valid = valid
        output = padded(images())
        expected = alone(images()[valid][None])
        torch.testing.assert_close(output[valid], expected[0], **EXACT)
        assert output[~valid].eq(0).all()
        for moe in (padded, alone):
            after_step(moe)
        if kind == "threshold":
            torch.testing.assert_close(padded.router.expert_thresholds, alone.router.expert_thresholds, **EXACT)


def test_experts_choose_at_least_one_token_and_the_first_of_equals():
    chosen = experts_choice(torch.full((3, 6), 0.5), top_k=1)
    assert chosen.tolist() == [[True] * 6, [False] * 6, [False] * 6]
    assert experts_choice(torch.rand(0, 6), top_k=2).shape == (0, 6)


def test_thresholds_that_nothing_exceeds_leave_the_best_expert():
    moe = layer(**KINDS["threshold"]).eval()
    routing = moe.router(images().flatten(0, 1))
    assert (~routing.dropped).sum(1).eq(1).all()
    assert torch.equal(routing.expert_indices[:, 0], routing.logits.argmax(1))
    assert routing.combine_weights[:, 0].eq(1).all()


def test_the_controls_have_nothing_to_train():
    random, own = RandomRouter(8, 4, 2), SelfRouter(8, 4, 2).eval()
    assert not [*random.parameters(), *own.parameters()]
    x = images().flatten(0, 1)
    assert torch.equal(own(x).logits, x[:, :4])
    torch.testing.assert_close(random(x).logits, x @ random.weight.double().T)
    assert random.weight.std().item() == pytest.approx(0.02, rel=0.5)


@pytest.mark.parametrize("router", ["random", "self"])
def test_through_a_control_the_task_still_trains_the_experts(router):
    moe = layer(router)
    moe(images()).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in moe.experts.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_compiled_in_training_without_a_graph_break(kind):
    moe = layer(**KINDS[kind])
    torch._dynamo.reset()
    for _ in range(2):  # the second with moved thresholds
        torch.testing.assert_close(torch.compile(moe, fullgraph=True, backend="eager")(images()), moe(images()))
        after_step(moe)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_computes_the_same(kind, tmp_path):
    moe = layer(**KINDS[kind])
    moe(images())
    after_step(moe)
    moe = moe.float().eval()
    save_onnx(record_program(moe, (images(3).float(),)), tmp_path / "model.onnx")
    program = load_onnx(tmp_path / "model.onnx")
    for number in (3, 1, 6):
        x = images(number).float() + 0.1  # other tokens: a first threshold is the score of one
        torch.testing.assert_close(program(x), moe(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("shift", [0.0, -30.0, -80.0, -300.0, 200.0])
def test_sigmoid_weights_and_mass_are_exact_at_any_shift(top_k, shift):
    """Far below zero a sigmoid is the exponential, so that weights are the softmax of the chosen logits."""
    router = LinearRouter(5, 5, top_k=top_k, scores="sigmoid", noise_std=0.0)
    logits = torch.randn(7, 5, generator=torch.manual_seed(0))
    routing = router._route((logits + shift).requires_grad_(), None)
    scores = (logits.double() + shift).sigmoid()
    if shift < -40:
        scores = logits.double().exp()
    torch.testing.assert_close(routing.probabilities.double(), scores / scores.sum(-1, keepdim=True), atol=1e-4, rtol=0)
    chosen = scores.gather(-1, routing.expert_indices)
    expected = chosen / chosen.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.combine_weights.double(), expected, atol=1e-4, rtol=0)
    assert routing.combine_weights.sum(-1).allclose(torch.ones(7))
