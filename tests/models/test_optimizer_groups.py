"""Optimizers of mixtures: weight decay, layer-wise learning rates, and updates of experts as of dense layers."""

from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from timm.optim import list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from tests.models.cases import BY_NAME, Case
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.optimization import build_optimizer, check_optimizer
from timm_moe_dg.layers import layer_parameters
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.layers.parameters import undecayed_parameters
from timm_moe_dg.models.d3g import DomainHeads

DECAY = 0.05


def settings(case: Case, make_groups, key: str, **kwargs) -> dict[str, float]:
    """Parameter name -> what its group says under `key`."""
    model = case.small(init_values=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_groups(model, weight_decay=DECAY, no_weight_decay_list=model.no_weight_decay(), **kwargs)
    found = {names[id(parameter)]: group[key] for group in groups for parameter in group["params"]}
    assert found.keys() == set(names.values())
    return found


@pytest.mark.parametrize("make_groups", [param_groups_weight_decay, param_groups_layer_decay])
def test_expert_biases_codes_and_scales_are_not_decayed_and_expert_matrices_are(case, make_groups):
    decay = settings(case, make_groups, "weight_decay")
    matrices = {name for name in decay if ".mlp." in name and name.endswith(("fc1.weight", "fc2.weight"))}
    routers = {name for name in decay if name.endswith(("gate.weight", "router.proj.weight"))}
    undecayed = {name for name in decay if name.endswith((".bias", "codes", "logit_scale", "gamma", "norm1.weight"))}
    assert any(".experts." in name for name in matrices)
    assert sum(".experts." in name for name in undecayed) == 4
    assert {decay[name] for name in matrices | routers} == {DECAY}
    assert {decay[name] for name in undecayed} == {0.0}
    assert {decay[name] for name in ("pos_embed", "cls_token")} == {0.0}


def test_experts_and_routers_learn_at_the_rate_of_their_block_and_metadata_encoders_at_the_full_rate(case):
    scales = settings(case, param_groups_layer_decay, "lr_scale", layer_decay=0.5)
    blocks = [{scale for name, scale in scales.items() if name.startswith(f"blocks.{index}.")} for index in range(4)]
    # one level for the stem, one per block, one for the final norm and the head
    assert blocks == [{0.5**4}, {0.5**3}, {0.5**2}, {0.5**1}]
    assert {scales["pos_embed"], scales["cls_token"]} == {0.5**5}
    assert {scales[name] for name in scales if name.startswith(("metadata_encoder.", "head."))} == {1.0}


def test_absent_biases_are_not_named() -> None:
    model = BY_NAME["gmoe_tiny_patch16"].small(proj_bias=False)
    assert undecayed_parameters(model) <= dict(model.named_parameters()).keys()


OFFERED = [name for name in list_optimizers() if not name.startswith(("bnb", "fused")) and name != "adahessian"]


@pytest.fixture
def without_compiler() -> Iterator[None]:
    """Kron compiles its step for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@torch.no_grad()
def stacks_and_layers(name: str, **options: float) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Two mixtures of equal experts, and beside them the dense layers that each of their experts equals."""
    mixture = nn.ModuleList([StackedExperts(num_experts=3, in_features=12, hidden_features=24), DomainHeads(12, 3, 5)])
    for module in mixture.modules():
        for stack, axis in getattr(module, "stacked", {}).items():
            parameter = getattr(module, stack).normal_()
            parameter.copy_(parameter.select(axis, 0).unsqueeze(axis).expand_as(parameter))
    layers = nn.ParameterList([part.detach().clone() for part in layer_parameters(mixture)])
    rates = {"lr": 0.01, "weight_decay": 0.1, **options}
    return [(module, build_optimizer(module, name, **rates)) for module in (mixture, layers)]


def take_steps(module: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[torch.Tensor]:
    """Steps on gradients that are the same for all experts, and the parameters of each dense layer after them."""
    parts = layer_parameters(module)
    for number in numbers:
        for part in parts:
            part.grad = torch.randn(part.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
    return [part.detach().clone() for part in parts]


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", OFFERED)
def test_each_expert_gets_the_update_of_its_dense_layer(name):
    check_optimizer(name)
    (mixture, ours), (layers, theirs) = stacks_and_layers(name)
    before = [part.detach().clone() for part in layer_parameters(mixture)]
    after = take_steps(mixture, ours, range(3))
    for start, part, expected in zip(before, after, take_steps(layers, theirs, range(3)), strict=True):
        assert not torch.equal(part, start)
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("name", ["adamw", "muon", "lamb", "adafactorbv", "kron", "cadamw"])
def test_a_resumed_optimizer_of_stacks_goes_on_bit_by_bit(name):
    (mixture, optimizer), _ = stacks_and_layers(name)
    take_steps(mixture, optimizer, range(2))
    (resumed, its_optimizer), _ = stacks_and_layers(name)
    resumed.load_state_dict(mixture.state_dict())
    its_optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    for part, expected in zip(
        take_steps(resumed, its_optimizer, range(2, 4)), take_steps(mixture, optimizer, range(2, 4)), strict=True
    ):
        assert torch.equal(part, expected)


def test_parts_of_a_model_that_was_moved_since_are_refused():
    model = BY_NAME["gmoe_tiny_patch16"].small()
    parts = layer_parameters(model)
    model.double()
    with pytest.raises(ArgumentError, match="the model was moved to another device or type"):
        torch.optim.SGD(parts, lr=0.1).step()


@pytest.mark.parametrize("name", ["adahessian", "bnbadam", "fusedlamb"])
def test_an_optimizer_that_cannot_take_a_step_here_is_refused(name):
    with pytest.raises(ArgumentError, match=f"^opt='{name}'"):
        check_optimizer(name)


def test_layer_decay_and_weight_decay_reach_the_experts_of_an_optimizer_of_matrices():
    model = BY_NAME["gmoe_tiny_patch16"].small()
    optimizer = build_optimizer(model, "muon", lr=1.0, weight_decay=DECAY, layer_decay=0.5)
    stack = model.blocks[0].mlp.experts.fc1
    found = {
        (group["weight_decay"], group["lr_scale"], tuple(part.shape))
        for group in optimizer.param_groups
        for part in group["params"]
        if any(getattr(part, "stack", None) is parameter for parameter in (stack.weight, stack.bias))
    }
    assert found == {(DECAY, 0.5**4, stack.weight.shape[1:]), (0.0, 0.5**4, stack.bias.shape[1:])}
