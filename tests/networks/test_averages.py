"""Merged experts: means by hand, equal experts, scales of the output, places, and networks that cannot be merged."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models import get_model_input_config

from tests.models.cases import randomize
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import RoutedMlp
from timm_moe_dg.networks.averages import merge_experts

SMALL = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3, "num_experts": 4}
BERLIN = (13.4, 52.5)
PARTS = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]


def mixture(name, **options):
    options = (SMALL if "backbone" not in options else {"num_experts": 3, "num_classes": 3}) | options
    return randomize(timm.create_model(name, **options), std=0.15).eval()


@torch.no_grad()
def with_equal_experts(network):
    """Gives all experts of a layer, the shared one too, the weights of the first."""
    for layer in (module for module in network.modules() if isinstance(module, RoutedMlp)):
        first = {name: value[0].clone() for name, value in layer.experts.state_dict().items() if name[:2] == "fc"}
        for name, value in first.items():
            layer.experts.get_parameter(name).copy_(value)
        if layer.shared is not None:
            layer.shared.load_state_dict(first)
    return network


def images_of(network, count=2):
    return torch.randn(count, *get_model_input_config(network)["input_size"])


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 1}, {"shared_expert": True}], ids=str)
def test_a_merged_network_is_the_dense_one_with_weights_averaged_by_hand(options, alpha):
    network = mixture("gmoe_tiny_patch16", moe_layers=(1,), **options)
    layer, images = network.blocks[1].mlp, images_of(network, 6)
    tokens = []
    with layer.router.register_forward_hook(lambda _, inputs, routing: tokens.append((inputs[0], routing))):
        network(images)
    ((_, routing),) = tokens
    use = torch.zeros(4)
    for experts, weights in zip(routing.expert_indices.tolist(), routing.combine_weights.tolist(), strict=True):
        for expert, weight in zip(experts, weights, strict=True):
            use[expert] += weight / len(routing.expert_indices)
    weights = alpha * use + (1 - alpha) * use.sum() / 4
    gate = layer.gamma.sigmoid() if "shared_expert" in options else 0.0
    scale = gate + (1 - gate) * weights.sum()
    dense = timm.create_model("deit_tiny_patch16_224", **{key: SMALL[key] for key in SMALL if key != "num_experts"})
    state = {name: value for name, value in network.state_dict().items() if ".1.mlp." not in name}
    for part in PARTS:
        rows = layer.state_dict()[f"experts.{part}"]
        mean = (1 - gate) * sum(weights[expert] * rows[expert] for expert in range(4))
        mean = mean + gate * layer.state_dict()[f"shared.{part}"] if gate else mean
        state[f"blocks.1.mlp.{part}"] = mean if part.startswith("fc2") else mean / scale
    dense.load_state_dict(state)
    merged = merge_experts(network, images.split(2), alpha=alpha)
    assert type(merged) is type(dense)
    assert torch.allclose(merged(images), dense.eval()(images), atol=1e-5)
    assert torch.allclose(scale if torch.is_tensor(scale) else torch.tensor(scale), torch.tensor(1.0)) == (
        options != {"top_k": 1}
    )
    assert (merged.pretrained_cfg["architecture"], merged.num_classes) == ("deit_tiny_patch16_224", 3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gmoe_tiny_patch16", {"shared_expert": True}),
        ("sfmoe_small", {"scale_mlp_norm": True}),
        ("gmoe", {"backbone": "convnext_atto"}),
        ("gmoe", {"backbone": "eva02_tiny_patch14_224", "depth": 2, "img_size": 56}),  # gated, in two matrices
        ("gmoe", {"backbone": "vit_giant_patch14_dinov2", "depth": 1, "embed_dim": 48, "num_heads": 2, "img_size": 28}),
        pytest.param("gmoe", {"backbone": "tiny_vit_5m_224"}, marks=pytest.mark.slow),  # normalizes its input
        ("moge", {"backbone": "vit_tiny_patch16_224", "depth": 2}),
        ("hybrid_sfmoe_r26_s16", {"depth": 1, "embed_dim": 384, "img_size": 64}),
    ],
    ids=str,
)
def test_equal_experts_give_the_logits_of_the_mixture(name, options):
    network = mixture(name, **options)
    network = network if name == "moge" else with_equal_experts(network)  # without a place, the shared expert alone
    images = images_of(network)
    logits = network(images)
    merged = merge_experts(network, [])
    assert torch.allclose(merged(images), logits, atol=1e-4 * logits.abs().max().item())
    assert not any(isinstance(module, RoutedMlp) for module in merged.modules())


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_k": 2, "normalize_weights": False}], ids=str)
def test_the_output_is_scaled_where_combine_weights_do_not_sum_to_1(options):
    network = with_equal_experts(mixture("gmoe_tiny_patch16", router="linear", **options))
    for block in network.blocks:
        if isinstance(block.mlp, RoutedMlp):
            torch.nn.init.zeros_(block.mlp.router.gate.weight)  # all weights are 1 / E
    images = images_of(network)
    merged = merge_experts(network, [images])
    assert torch.allclose(merged(images), network(images), atol=1e-5)
    dense = network.blocks[0].mlp.experts.fc2.weight[0] * options["top_k"] / 4
    assert torch.allclose(merged.blocks[0].mlp.fc2.weight, dense)


def test_moge_becomes_its_shared_expert_or_the_experts_of_a_place():
    network = mixture("moge_tiny")
    images = images_of(network)
    place = torch.tensor([BERLIN] * 2)
    assert torch.equal(merge_experts(network, [])(images), network(images))
    single = mixture("moge_tiny", top_k=1, shared_expert=False)
    assert torch.allclose(merge_experts(single, [], lonlat=BERLIN)(images), single(images, place), atol=1e-5)
    several = mixture("moge_tiny", top_k=3, shared_expert=False, moe_layers=(1,))
    layer = several.blocks[1].mlp
    context, _ = several.metadata_encoder(images[:1], place[:1])
    similarity = F.cosine_similarity(context, layer.router.codes) * layer.router.logit_scale.exp()
    best = similarity.topk(3).indices
    mean = torch.einsum("k,kij->ij", similarity[best].softmax(0), layer.experts.fc1.weight[best])
    assert torch.allclose(merge_experts(several, [], lonlat=BERLIN).blocks[1].mlp.fc1.weight, mean, atol=1e-6)


def far_away():
    network = mixture("moge_tiny")
    network.set_coverage(torch.tensor([BERLIN]))
    network.set_coverage_radius(100.0)
    return network


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (
            lambda: mixture("deit_tiny_patch16_224", **{"num_experts": None}),
            {},
            "model='deit_tiny_patch16_224': has no",
        ),
        (lambda: mixture("erm_le_tiny_patch16", **{"num_experts": None}), {}, "no experts.*classifier reads places"),
        (lambda: mixture("d3g_tiny_patch16", **{"num_experts": None}), {}, "no experts.*classifier reads places"),
        (lambda: mixture("gmoe_tiny_patch16", expert_width=0.5), {}, "expert_width=0.5: .*train with expert_width=1"),
        (lambda: mixture("gmoe_tiny_patch16"), {"lonlat": BERLIN}, r"at=\(13.4, 52.5\): the model does not route by"),
        (lambda: mixture("moge_tiny"), {"alpha": 0.5}, "alpha=0.5: MoGE's experts are weighted by the place"),
        (lambda: mixture("moge_tiny", shared_expert=False), {}, "at=None: .*no shared expert; give the place"),
        (lambda: mixture("moge_tiny"), {"lonlat": (52.5, 120.4)}, r"at=\(52.5, 120.4\): latitude=120.*swapped"),
        (lambda: mixture("moge_tiny", metadata_encoder="location_id"), {"lonlat": BERLIN}, "at=.*location id"),
        (far_away, {"lonlat": (-60.0, -30.0)}, "uses its shared expert alone there; leave it out"),
        (
            lambda: mixture("hybrid_sfmoe_r26_s16", depth=1, embed_dim=384, img_size=64, output_stride=16),
            {},
            "timm's network has other weights .*pos_embed.*merge a model with default options",
        ),
    ],
)
def test_networks_that_cannot_be_merged_are_refused_in_one_line(build, options, message):
    with pytest.raises(ArgumentError, match=message) as caught:
        merge_experts(build(), [], **options)
    assert "\n" not in str(caught.value)
