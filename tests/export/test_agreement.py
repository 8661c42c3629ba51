"""Rounding is told from faults, and a token between two experts from both."""

import pytest
import torch
from torch import nn

from tests.models.cases import BY_NAME, randomize
from timm_moe_dg.errors import ExportError
from timm_moe_dg.export.agreement import CHECKED, TIE, check_agreement, near_ties
from timm_moe_dg.losses import record_routing, router_outputs

CASE = BY_NAME["gmoe_tiny_patch16"]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return randomize(CASE.small(depth=1, moe_layers=[0]), std=0.15).eval()


def tie(network, images):
    """Makes the second and third expert of one token of each image equal, by making the router's codes so."""
    codes = network.blocks[0].mlp.router.codes
    with torch.no_grad(), record_routing(network):
        network(images)
        routing = next(iter(router_outputs(network).values()))
        order = routing.logits[0].argsort(descending=True)
        codes[order[routing.expert_indices.shape[1]]] = codes[order[routing.expert_indices.shape[1] - 1]]


def moved(network, images, rows, by):
    with torch.no_grad():
        logits = network(images)
    logits[rows] += by
    return (logits,)


def test_rounding_is_agreement_whatever_the_size_of_the_logits(network):
    images = CASE.images(4)
    check_agreement(network, moved(network, images, [0], 5e-5), (images,))
    with torch.no_grad():
        network.head.weight.mul_(1000)
    largest = network(images).abs().max().item()
    assert largest > 100
    check_agreement(network, moved(network, images, [0], largest * 5e-5), (images,))


def test_one_image_that_differs_is_a_fault(network):
    images = CASE.images(4)
    with torch.no_grad(), record_routing(network):
        network(images)
    assert not near_ties(network, 4).any()
    with pytest.raises(ExportError, match=r"about 1 of 4 images differ .* 1\.0e-02"):
        check_agreement(network, moved(network, images, [2], 1e-2), (images,))


def test_an_image_may_differ_where_its_routing_was_a_tie_but_not_most_of_them(network, caplog):
    images = CASE.images(4)
    tie(network, images)
    with torch.no_grad(), record_routing(network):
        network(images)
    near = near_ties(network, 4)
    logits = next(iter(router_outputs(network).values())).logits
    best = logits.sort(descending=True).values.view(4, -1, logits.shape[1])
    top_k = network.blocks[0].mlp.router.top_k
    assert near.tolist() == (best[..., top_k - 1] - best[..., top_k] <= TIE).any(1).tolist()
    assert near[0]
    check_agreement(network, moved(network, images, [0], 1e-2), (images,))
    assert "1 of 4 images" in caplog.text
    with pytest.raises(ExportError, match="3 of 4 images"):
        check_agreement(network, moved(network, images, [0, 1, 2], 1e-2), (images,))


def test_only_the_first_images_are_looked_at_and_other_outputs_count_too(network):
    images = CASE.images(CHECKED + 2)
    check_agreement(network, moved(network, images, [CHECKED], 1.0), (images,))

    class Pair(nn.Module):
        def forward(self, x):
            return network(x), x.flatten(1)[:, :3]

    (logits,) = moved(network, images, [0], 0.0)
    check_agreement(Pair(), (logits, images.flatten(1)[:, :3]), (images,))
    with pytest.raises(ExportError, match=r"logits by up to 0\.0e"):
        check_agreement(Pair(), (logits, images.flatten(1)[:, :3] + 1), (images,))


def test_what_is_not_finite_has_to_be_the_same(network):
    images = CASE.images(2)
    with torch.no_grad():
        network.head.bias[0], network.head.bias[1] = float("nan"), float("inf")
    (logits,) = moved(network, images, [0], 0.0)
    check_agreement(network, (logits,), (images,))
    with pytest.raises(ExportError):
        check_agreement(network, (logits.nan_to_num(),), (images,))
