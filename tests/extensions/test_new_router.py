"""A new router is registered from outside the package, and registered models use it without an edit there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

import timm_moe_dg
from timm_moe_dg.errors import RouterError
from timm_moe_dg.layers import Router, register_router
from timm_moe_dg.layers.router import ROUTERS

SIZES = {"img_size": 32, "depth": 4, "embed_dim": 32, "num_heads": 2, "num_classes": 4}


class DistanceRouter(Router):
    """Logits are negative squared distances between the token and one center per expert, scaled for each of them."""

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
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Centers from N(0, 1), all scales as given."""
        nn.init.normal_(self.centers)
        nn.init.constant_(self.scales, self.scale)

    def compute_logits(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        return -(x[:, None] - self.centers.to(x.dtype)).square().sum(-1) * self.scales.to(x.dtype).squeeze(-1)


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


def test_its_name_and_options_reach_every_mixture_layer() -> None:
    routers = [module for module in make().modules() if isinstance(module, Router)]
    assert [type(router) for router in routers] == [DistanceRouter] * 2
    assert {router.scales.unique().item() for router in routers} == {0.5}


def test_tokens_go_where_it_says() -> None:
    model = make().eval()
    with timm_moe_dg.record_routing(model):
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
    assert len(before) == 4
    assert not [name for name, value in before.items() if torch.equal(value, model.state_dict()[name])]


@pytest.mark.parametrize("groups", [param_groups_weight_decay, param_groups_layer_decay])
def test_what_it_exempts_from_weight_decay_is_exempt(groups) -> None:
    model = make()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = groups(model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay())
    decay = {names[id(parameter)]: group["weight_decay"] for group in made for parameter in group["params"]}
    assert {decay[f"blocks.{block}.mlp.router.scales"] for block in (0, 2)} == {0.0}
    assert {decay[f"blocks.{block}.mlp.router.centers"] for block in (0, 2)} == {0.05}


def test_a_saved_model_comes_back_with_it(tmp_path: Path) -> None:
    model = make().eval()
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert again.blocks[0].mlp.router.scale == 0.5
    with torch.no_grad():
        assert torch.equal(again(images()), model(images()))


def test_a_dense_checkpoint_is_upcycled_around_it() -> None:
    dense = timm.create_model("deit_tiny_patch16_224", **SIZES).eval()
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dense.state_dict(), "num_classes": 4}}
    with torch.no_grad():
        torch.testing.assert_close(make(**overlay).eval()(images()), dense(images()), rtol=0, atol=1e-5)


def test_an_option_that_it_does_not_have_and_a_taken_name_are_refused() -> None:
    with pytest.raises(RouterError, match=r"router_kwargs=\{'tempo': 1\}: router='toy' takes \['scale'\]"):
        timm.create_model("gmoe_tiny_patch16", router="toy", router_kwargs={"tempo": 1}, **SIZES)
    with pytest.raises(RouterError, match=r"router='linear': .*LinearRouter has this name; choose another"):
        register_router("linear")(DistanceRouter)
    register_router("toy")(DistanceRouter)  # the same class again, as when a notebook's cell is run twice
