"""Averages: exact cases, a selection by hand, experts in another order or merged, and ensembles of unlike members."""

from statistics import fmean

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.models import get_model_input_config

from tests.models.cases import randomize
from timm_moe_dg.data import evaluation_transform
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import LinearRouter, RoutedMlp, register_router
from timm_moe_dg.networks.averages import (
    Ensemble,
    evaluation_view,
    load_predictor,
    match_experts,
    mean_weights,
    merge_experts,
    restricted_selection,
)
from timm_moe_dg.networks.build import build_network, data_config, save_network
from timm_moe_dg.networks.trained import WithFeatures, load_trained

SMALL = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3, "num_experts": 4}
BERLIN = (13.4, 52.5)
PARTS = [f"{layer}.{kind}" for layer in ("fc1", "fc2") for kind in ("weight", "bias")]
CLASSES = ("cat", "dog", "owl")
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))


def mixture(name, **options):
    options = (SMALL if "backbone" not in options else {"num_experts": 3, "num_classes": 3}) | options
    return randomize(timm.create_model(name, **options), std=0.15).eval()


@pytest.mark.parametrize("count", [2, 3, 7])
def test_the_mean_of_equal_weights_is_bitwise_one_of_them(count):
    weights = {"a": torch.randn(50), "half": torch.randn(50).half(), "steps": torch.tensor(7)}
    mean = mean_weights([weights] * count)
    assert all(torch.equal(mean[name], weights[name]) and mean[name].dtype == weights[name].dtype for name in weights)


def test_shares_of_0_and_1_are_bitwise_the_ends():
    start, end = {"a": torch.randn(50)}, {"a": torch.randn(50)}
    for share, expected in ((0.0, start), (1.0, end)):
        assert torch.equal(mean_weights([start, end], [1 - share, share])["a"], expected["a"])
    between = mean_weights([start, end], [0.75, 0.25])["a"]
    assert torch.allclose(between, 0.75 * start["a"] + 0.25 * end["a"])


@pytest.mark.parametrize(
    "other", [{"a": torch.zeros(3)}, {"b": torch.zeros(2)}, {"a": torch.zeros(2), "b": torch.zeros(2)}]
)
def test_weights_of_other_networks_are_refused(other):
    with pytest.raises(ArgumentError, match=r"^weights='[ab]'"):
        mean_weights([{"a": torch.zeros(2)}, other])


def released_selection(outcomes, average):
    """DiWA's released rule, as it reads: `outcomes[candidate][domain]` and `average(members)` are lists of 0 and 1."""
    mean_over_domains = [np.mean([np.mean(domain) for domain in domains]) for domains in outcomes]
    selected, best = [], -np.inf
    for candidate in np.argsort(-np.array(mean_over_domains), kind="stable"):
        pooled = np.concatenate(average([*selected, candidate])).mean()
        if pooled >= best:
            selected, best = [*selected, candidate], pooled
    return selected


def test_restricted_selection_pools_the_images_of_all_domains_as_the_release_does():
    random = np.random.default_rng(0)
    sizes, selections = (10, 100), []
    for _ in range(50):
        outcomes = [[random.integers(2, size=size) for size in sizes] for _ in range(4)]

        def majority(members, outcomes=outcomes):
            return [np.mean([outcomes[member][domain] for member in members], 0) > 0.4 for domain in range(2)]

        scores = [fmean(float(domain.mean()) for domain in domains) for domains in outcomes]
        selected = restricted_selection(scores, lambda m, of=majority: sum(int(d.sum()) for d in of(m)))
        assert selected == released_selection(outcomes, majority)
        selections.append(len(selected))
    assert 1 < fmean(selections) < 4  # some are accepted and some refused


def test_a_tie_is_accepted_where_means_of_domains_differ_in_the_last_bit():
    assert fmean([20 / 60, 24 / 60]) > fmean([22 / 60, 22 / 60])  # both are 44 of 120
    assert restricted_selection([fmean([20 / 60, 24 / 60]), fmean([22 / 60, 22 / 60])], lambda _: 44) == [0, 1]
    assert restricted_selection([fmean([22 / 60, 22 / 60]), fmean([20 / 60, 24 / 60])], lambda _: 44) == [0, 1]


def reordered(weights, orders):
    """Gives the experts of each layer another order, by the names of its weights."""
    rows = (".experts.fc1.", ".experts.fc2.", ".router.codes", ".router.gate.weight")
    layers = {name: order for name in weights for layer, order in orders.items() if name.startswith(layer)}
    return {
        name: value[layers[name]] if name in layers and any(row in name for row in rows) else value
        for name, value in weights.items()
    }


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gmoe_tiny_patch16", {"router": "cosine", "moe_layers": (0, 1)}),
        ("gmoe_tiny_patch16", {"router": "linear"}),
        ("moge_tiny", {}),
    ],
)
def test_experts_in_another_order_are_matched_exactly(name, options):
    network = mixture(name, **{"moe_layers": (1,), **options})
    weights = network.state_dict()
    orders = {f"blocks.{layer}.": [2, 0, 3, 1] if layer else [3, 2, 1, 0] for layer in options.get("moe_layers", (1,))}
    other = reordered(weights, orders)
    assert any(not torch.equal(weights[key], other[key]) for key in weights)
    images = torch.randn(2, 3, 32, 32)
    inputs = (images, torch.tensor([[10.0, 50.0], [-70.0, -10.0]])) if name == "moge_tiny" else (images,)
    with torch.no_grad():
        expected = network(*inputs)
        network.load_state_dict(other)
        assert torch.allclose(network(*inputs), expected, atol=1e-5)  # the same function
    matched = match_experts(network, weights, other)
    assert all(torch.equal(matched[key], weights[key]) for key in weights)
    # Training moves experts, by less than they differ from each other
    moved = {key: value + 0.03 * torch.randn_like(value) for key, value in weights.items()}
    back = match_experts(network, weights, reordered(moved, orders))
    assert all(torch.equal(back[key], moved[key]) for key in weights)


def test_a_router_that_does_not_name_its_rows_is_refused(monkeypatch):
    @register_router("nameless")
    class Nameless(LinearRouter):
        expert_rows = ()

    network = mixture("gmoe_tiny_patch16", router="nameless")
    with pytest.raises(ArgumentError, match=r"^router='Nameless'"):
        match_experts(network, network.state_dict(), network.state_dict())


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


@pytest.mark.parametrize(
    ("name", "options", "given", "argument"),
    [
        ("deit_tiny_patch16_224", {"num_experts": None}, {}, "model='deit_tiny_patch16_224'"),
        ("erm_le_tiny_patch16", {"num_experts": None}, {}, "model='erm_le_tiny_patch16'.*classifier reads places"),
        ("d3g_tiny_patch16", {"num_experts": None}, {}, "model='d3g_tiny_patch16'.*classifier reads places"),
        ("gmoe_tiny_patch16", {"expert_width": 0.5}, {}, "expert_width=0.5"),
        ("gmoe_tiny_patch16", {}, {"lonlat": BERLIN}, r"at=\(13.4, 52.5\)"),
        ("moge_tiny", {}, {"alpha": 0.5}, "alpha=0.5"),
        ("moge_tiny", {"shared_expert": False}, {}, "at=None"),
        ("moge_tiny", {}, {"lonlat": (52.5, 120.4)}, r"at=\(52.5, 120.4\): latitude=120.*swapped"),
        ("moge_tiny", {"metadata_encoder": "location_id"}, {"lonlat": BERLIN}, "at=.*location id"),
        ("moge_tiny", {}, {"lonlat": (-60.0, -30.0)}, "at=.*uses its shared expert alone there"),
        (
            "hybrid_sfmoe_r26_s16",
            {"depth": 1, "embed_dim": 384, "img_size": 64, "output_stride": 16},
            {},
            "model='hybrid.*pos_embed",
        ),
    ],
)
def test_networks_that_cannot_be_merged_are_refused_in_one_line(name, options, given, argument):
    network = mixture(name, **options)
    if "lonlat" in given and hasattr(network, "set_coverage") and not options:
        network.set_coverage(torch.tensor([BERLIN]))
        network.set_coverage_radius(100.0)
    with pytest.raises(ArgumentError, match=f"^{argument}") as caught:
        merge_experts(network, [], **given)
    assert "\n" not in str(caught.value)


def member(names=CLASSES, seed=0, **preprocessing):
    """A network and its preprocessing; sizes, means and deviations may be given."""
    torch.manual_seed(seed)
    network = timm.create_model("test_vit", num_classes=len(names), dynamic_img_size=True).eval()
    network.pretrained_cfg["label_names"] = list(names)
    return network, data_config(network, **preprocessing)


def expected(members, image=IMAGE):
    """The mean of probabilities by class name, each from the member's own transform."""
    total = dict.fromkeys(CLASSES, 0.0)
    for network, config in members:
        view = evaluation_transform(config["input_size"][1:], config["mean"], config["std"])
        with torch.no_grad():
            probabilities = network(view(image)[None]).softmax(1)[0].tolist()
        for name, value in zip(network.pretrained_cfg["label_names"], probabilities, strict=True):
            total[name] += value / len(members)
    return torch.tensor([total[name] for name in CLASSES])


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"mean": [0.1, 0.2, 0.3]},
        {"std": [2.0, 2.0, 2.0]},
        {"img_size": 96},
        {"names": ("owl", "cat", "dog"), "mean": [0.1, 0.2, 0.3], "img_size": 192},
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_each_member_has_its_own_preprocessing_and_classes_in_any_order_of_members(second, swapped, tmp_path):
    members = [member(), member(seed=1, **second)]
    members = members[::-1] if swapped else members
    for number, (network, config) in enumerate(members):
        save_network(network, tmp_path / str(number), network.pretrained_cfg["label_names"], config)
    ensemble = load_predictor(f"local-dir:{tmp_path}")
    with torch.no_grad():
        probabilities = ensemble(evaluation_view(ensemble)(IMAGE)[None]).softmax(1)[0]
    names = ensemble.pretrained_cfg["label_names"]
    by_name = torch.stack([probabilities[list(names).index(name)] for name in CLASSES])
    torch.testing.assert_close(by_name, expected(members), rtol=0, atol=1e-6)


def test_features_lie_side_by_side():
    networks = [member()[0], member(seed=1)[0]]
    images = torch.randn(2, 3, 160, 160)
    logits, features = WithFeatures(Ensemble(networks))(images)
    assert features.shape == (2, 2 * networks[0].num_features)
    torch.testing.assert_close(logits, Ensemble(networks)(images))


@pytest.mark.parametrize("names", [("cat", "dog", "yak"), ("cat", "dog"), ("cat", "dog", "owl", "yak")])
def test_members_of_other_classes_are_refused(names):
    with pytest.raises(ArgumentError, match=r"^classes=\['cat', "):
        Ensemble([member()[0], member(names)[0]])


def test_where_one_network_is_needed_the_message_names_a_member(tmp_path):
    for number in range(2):
        save_network(member()[0], tmp_path / str(number), CLASSES, member()[1])
    for load in (load_trained, lambda name: build_network(name, None, pretrained=True)):
        with pytest.raises(ArgumentError, match=rf"is an ensemble of 2 networks, .* give one: .*{tmp_path.name}.0"):
            load(f"local-dir:{tmp_path}")
