"""Choices of experts against references in plain Python, and where their layers run."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.references import choices
from timm_moe_dg.errors import RouterError
from timm_moe_dg.layers import LinearRouter, LossWeights, MoeMlp, RandomRouter, SelfRouter, after_step
from timm_moe_dg.layers.router import experts_choice
from timm_moe_dg.losses import reported_losses
from timm_moe_dg.networks.export import load_onnx, record_program, save_onnx

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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scores": "tanh"}, r"scores='tanh': choose from softmax, sigmoid"),
        ({"choice": "image"}, r"choice='image': choose from token, expert, threshold"),
        ({"bias_speed": -0.1}, r"bias_speed=-0.1: give 0 or more"),
        ({"bias_speed": 0.1, "choice": "expert"}, r"bias_speed=0.1: choice='expert' balances experts without"),
        ({"threshold_decay": 1.0}, r"threshold_decay=1.0: give a share from 0 to below 1"),
    ],
)
def test_options_that_contradict_each_other_are_named(kwargs, message):
    with pytest.raises(RouterError, match=message):
        LinearRouter(8, 4, 2, **kwargs)


def test_options_of_a_layer_that_contradict_each_other_are_named():
    with pytest.raises(RouterError, match=r"capacity_factor=1.5: choice='threshold' limits experts by itself"):
        MoeMlp(8, capacity_factor=1.5, router_kwargs={"choice": "threshold"})
    with pytest.raises(RouterError, match=r"router='self' takes \['scores', 'choice', 'bias_speed', 'threshold_decay'"):
        MoeMlp(8, router="self", router_kwargs={"choise": "expert"})
    with pytest.raises(RouterError, match=r"num_experts=9: router='self' takes in_features=8 at most"):
        MoeMlp(8, router="self", num_experts=9)
