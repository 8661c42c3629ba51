"""Operation counts against closed forms, memory of work whose need is known, timing in turns, and dense baselines.

Axes: B images, T tokens, D width, H = 4 D hidden width.
"""

import os
from functools import partial

import pytest
import timm
import torch
from timm.layers import Attention
from torch.utils.flop_counter import FlopCounterMode

import timm_moe_dg  # noqa: F401 (registers the models)
from timm_moe_dg.errors import ArgumentError, ProcessLostError
from timm_moe_dg.layers import set_expert_implementation
from timm_moe_dg.layers.experts import StackedExperts
from timm_moe_dg.networks.cost import (
    EQUIVALENT,
    TWIN,
    count_macs,
    interleaved,
    mixture_and_baselines,
    mixture_layers,
    peak_memory,
    quartiles,
    random_inputs,
    ratios,
)

B, T, D = 3, 7, 32
MIB = 2**20


def attention_macs(batch: int, tokens: int, width: int) -> int:
    """Queries, keys, values and the output are D x D each; scores and their sum over values are T x T x D each."""
    return batch * (4 * tokens * width**2 + 2 * tokens**2 * width)


@pytest.mark.parametrize("fused", [True, False])
def test_attention_costs_its_four_projections_and_two_products_of_tokens(fused):
    layer = Attention(D, num_heads=4)
    layer.fused_attn = fused
    assert count_macs(layer, [torch.randn(B, T, D)]) == attention_macs(B, T, D)


def test_a_vision_transformer_costs_patches_blocks_and_head():
    width, depth, classes, patches = 192, 12, 10, 4
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=classes)
    block = attention_macs(1, patches + 1, width) + (patches + 1) * 8 * width**2
    expected = patches * 3 * 16**2 * width + depth * block + width * classes
    assert count_macs(model, [torch.randn(1, 3, 32, 32)]) == expected


@pytest.mark.parametrize("implementation", ["grouped", "loop"])
def test_experts_cost_what_their_items_visit_by_every_implementation(implementation):
    experts = StackedExperts(4, D, 4 * D)
    set_expert_implementation(experts, implementation)
    indices = torch.tensor([[0, 1], [1, 3], [3, 0]])
    arguments = [torch.randn(3, T, D, requires_grad=True), indices, torch.rand(3, 2)]
    assert count_macs(experts, arguments) == 3 * 2 * T * 8 * D**2
    with FlopCounterMode(display=False) as counter:  # a training step makes three products for each of a forward
        experts(*arguments).sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 3 * 2 * T * 8 * D**2


def hold_and_borrow(held: int, borrowed: int):
    """Keeps `held` MiB for good and takes `borrowed` MiB twice, one after the other, in each step."""
    kept = torch.ones(held * MIB // 4)

    def step() -> None:
        for _ in range(2):
            torch.ones(borrowed * MIB // 4).add_(kept[0])

    return step


@pytest.mark.slow
def test_what_is_held_counts_and_what_is_returned_counts_once():
    # a step that kept what it borrows would come to 64 + 6 * 32; imports of the first step add a few MiB
    assert peak_memory(partial(hold_and_borrow, 64, 32), device="cpu", threads=1) == pytest.approx(96, abs=8)


@pytest.mark.slow
def test_a_measuring_process_that_ends_is_an_error():
    with pytest.raises(ProcessLostError, match=r"^memory=True: "):
        peak_memory(partial(os._exit, 9), device="cpu", threads=1)


def test_rounds_go_in_turn_and_warming_up_does_not_count():
    calls = []
    measures = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}
    values = interleaved(measures, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert values == {"a": [5.0, 7.0, 9.0], "b": [6.0, 8.0, 10.0]}


def test_ratios_are_of_the_same_round_and_quartiles_divide_values_into_four_equal_parts():
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 2.0], [1.0])
    # of 1 ... 7, the second, the fourth and the sixth have as many values on both sides as quarters demand
    assert quartiles([7, 1, 6, 2, 5, 3, 4]) == (2, 4, 6)
    assert quartiles([1.0, 2.0]) == (1.0, 1.5, 2.0)  # between the values


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gmoe_tiny_patch16", {"img_size": 32}),
        ("moge_tiny", {"img_size": 32}),
        ("gmoe", {"backbone": "test_convnext2"}),
    ],
)
def test_inputs_fit_and_the_equivalent_lies_between_the_twin_and_the_mixture(name, options):
    macs = {}
    for label, maker in mixture_and_baselines(name, options).items():
        model = maker().eval()
        macs[label] = count_macs(model, random_inputs(model, 1, "cpu"))
    # The router adds at most as much: its projection is 256 wide, the smallest of these feed-forwards 64
    assert macs[TWIN] < macs[EQUIVALENT] < macs[name] < 2 * macs[EQUIVALENT]


def test_the_dense_twin_has_the_parameters_of_the_source():
    twin = mixture_and_baselines("gmoe_tiny_patch16", {"img_size": 32})[TWIN]()
    dense = timm.create_model("deit_tiny_patch16_224", img_size=32)
    shapes = [{name: value.shape for name, value in model.named_parameters()} for model in (twin, dense)]
    assert shapes[0] == shapes[1]
    with pytest.raises(ArgumentError, match=r"^model="):
        mixture_layers(dense)
