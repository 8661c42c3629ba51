"""A new router is registered from outside the package, and registered models use it without an edit there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

import timm_moe_dg
from tests.models.cases import overlay
from timm_moe_dg.algorithms import ALGORITHMS, Setup, StepContext
from timm_moe_dg.errors import ArgumentError, RouterError
from timm_moe_dg.layers import LinearRouter, MoeMlp, Router, RouterOutput, register_router
from timm_moe_dg.layers.routers import ROUTERS
from timm_moe_dg.losses import auxiliary_loss, reported_losses

SIZES = {"img_size": 32, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 4}


class DistanceRouter(Router):
    """Logits are negative squared distances between the token and one center per expert, scaled for each of them.

    A bias, moved after each step toward experts with few tokens, balances them beside a loss of their mean mass.
    """

    undecayed = ("scales",)

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        top_k: int,
        normalize_weights: bool = True,
        noise_std: float | None = None,
        scale: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_experts, top_k, normalize_weights, noise_std)
        self.scale = scale
        self.centers = nn.Parameter(torch.empty(num_experts, in_features, device=device, dtype=dtype))
        self.scales = nn.Parameter(torch.empty(num_experts, 1, device=device, dtype=dtype))  # two axes would decay
        self.register_buffer("bias", torch.empty(num_experts, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Centers from N(0, 1), all scales as given."""
        nn.init.normal_(self.centers)
        nn.init.constant_(self.scales, self.scale)
        nn.init.zeros_(self.bias)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        distances = (x[:, None] - self.centers.to(x.dtype)).square().sum(-1)
        return self.bias - distances * self.scales.to(x.dtype).squeeze(-1)

    def loss(self, routing: RouterOutput) -> Tensor:
        """Squared distance of the mean mass from an equal one."""
        return (routing.probabilities.mean(0) - 1 / self.num_experts).square().sum()

    def after_step(self) -> None:
        """Moves the bias by a thousandth of each expert's missing tokens."""
        counts = self.expert_counts.to(self.bias.dtype)
        self.bias += 0.001 * (counts.mean() - counts)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    """The router under its name, in this test alone."""
    torch.manual_seed(0)
    register_router("toy")(DistanceRouter)
    yield
    del ROUTERS["toy"]


def make(**kwargs: object) -> nn.Module:
    return timm.create_model("gmoe_tiny_patch16", router="toy", router_kwargs={"scale": 0.5}, **SIZES, **kwargs)


def images() -> Tensor:
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_its_options_reach_every_mixture_layer_and_tokens_go_where_it_says() -> None:
    model = make().train()
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert [type(router) for router in routers] == [DistanceRouter] * 2
    assert {router.scales.unique().item() for router in routers} == {0.5}
    model(images())
    routings = timm_moe_dg.router_outputs(model).values()
    expected = sum((routing.probabilities.mean(0) - 1 / 6).square().sum().item() for routing in routings)
    assert timm_moe_dg.auxiliary_loss(model).item() == pytest.approx(expected)  # of its own
    with timm_moe_dg.record_routing(model.eval()):
        model(images())
    for routing in timm_moe_dg.router_outputs(model).values():
        assert torch.equal(routing.expert_indices, routing.logits.topk(2).indices)


def test_one_training_step_moves_all_of_its_parameters() -> None:
    model = make().train()
    before = {name: value.clone() for name, value in model.state_dict().items() if ".router." in name}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = nn.functional.cross_entropy(model(images()), torch.arange(6) % 4)
    (loss + 0.01 * timm_moe_dg.auxiliary_loss(model)).backward()
    optimizer.step()
    timm_moe_dg.after_step(model)
    assert len(before) == 6
    assert not [name for name, value in before.items() if torch.equal(value, model.state_dict()[name])]


@torch.no_grad()
def test_a_dense_checkpoint_is_upcycled_around_it_and_a_saved_model_comes_back_with_it(tmp_path: Path) -> None:
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES).eval()
    model = make(**overlay(dense.state_dict(), 4)).eval()
    torch.testing.assert_close(model(images()), dense(images()), rtol=0, atol=1e-5)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert again.blocks[0].mlp.router.scale == 0.5
    assert torch.equal(again(images()), model(images()))


def still() -> nn.Module:
    """A model whose forwards in training are those of evaluation."""
    torch.manual_seed(0)
    return make(router_noise=0.0, expert_drop=0.0).train()


def domains() -> list[tuple[Tensor, Tensor]]:
    return [(part, torch.arange(len(part)) % 4) for part in torch.cat([images(), -images()]).split(4)]


def take_steps(model: nn.Module, number: int, method: str = "ERM", lr: float = 0.0, **context: Any) -> None:
    algorithm = ALGORITHMS[method](Setup(model, 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(number):
        algorithm.take_step(StepContext(model, optimizer, **context), domains())


def biases(model: nn.Module) -> Tensor:
    return torch.stack([module.bias for module in model.modules() if isinstance(module, DistanceRouter)])


def test_its_bias_moves_once_in_a_step_by_the_tokens_of_the_whole_step() -> None:
    model, images_of_step = still(), torch.cat([part for part, _ in domains()])
    with torch.no_grad(), timm_moe_dg.record_routing(still().eval()) as reference:
        reference(images_of_step)
    routings = timm_moe_dg.router_outputs(reference).values()
    counts = torch.stack([routing.expert_indices.flatten().bincount(minlength=6) for routing in routings]).float()
    take_steps(model, 1, grad_accum_steps=2)
    moved = biases(model).clone()
    torch.testing.assert_close(moved, 0.001 * (counts.mean(1, keepdim=True) - counts))
    with torch.no_grad(), timm_moe_dg.record_routing(model.eval()):
        model(images())
    timm_moe_dg.after_step(model)
    assert torch.equal(biases(model), moved)  # evaluation routes no token of a step


@pytest.mark.parametrize("method", ["Fish", "MLDG"])
def test_inner_steps_are_no_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(DistanceRouter, "after_step", lambda router: calls.append(router.expert_counts.sum().item()))
    take_steps(still(), 2, method)
    passes = {"Fish": 12, "MLDG": 8}[method]  # images in all forwards of a step; MLDG pairs 1 of 3 domains with others
    assert calls == [passes * 5 * 2] * 4  # tokens and experts per token; two layers, two steps


class Faulty(LinearRouter):
    def __init__(self, in_features: int, num_experts: int, top_k: int) -> None:
        super().__init__(in_features, num_experts, top_k)

    def loss(self, routing: RouterOutput) -> Tensor:
        return routing.logits


def test_unknown_options_a_constructor_that_lacks_arguments_and_a_loss_that_is_no_scalar_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_router("toy")(DistanceRouter)  # the same class again, as when a notebook's cell is run twice
    with pytest.raises(RouterError, match=r"^router_kwargs=\{'tempo': 1\}: router='toy'"):
        timm.create_model("gmoe_tiny_patch16", router="toy", router_kwargs={"tempo": 1}, **SIZES)
    monkeypatch.setitem(ROUTERS, "faulty", Faulty)
    with pytest.raises(RouterError, match=r"^router_kwargs=\{\}: router='faulty' .*normalize_weights"):
        timm.create_model("gmoe_tiny_patch16", router="faulty", **SIZES)
    layer = MoeMlp(8, num_experts=2)
    layer.router = Faulty(8, 2, 1)
    layer(torch.randn(3, 8))
    for collect in (auxiliary_loss, lambda model: reported_losses(model, torch.zeros(3, dtype=torch.int64))):
        with pytest.raises(ArgumentError, match=r"^loss=\(3, 2\)"):
            collect(layer)
