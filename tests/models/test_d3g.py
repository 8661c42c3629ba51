"""D3G: losses, updates and predictions beside a reference from its formulas, and weights."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf
from torch import nn

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.references import d3g
from timm_moe_dg.algorithms import ERM, Setup, StepContext
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.finetuning.training_data import build_loaders, step_sampler
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.options import run_parser

SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 4}
CORNERS = torch.tensor([[-100.0, 40.0], [20.0, 5.0], [140.0, -30.0]])  # one region each


def places(domain: int, count: int, seed: int) -> torch.Tensor:
    """Coordinates around a region's corner."""
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return CORNERS[domain] + 3 * noise


def model(query: str = "domain", **more: Any) -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {**SIZES, "num_domains": 3, "relation_query": query, **more}
    network: Any = timm.create_model("d3g_tiny_patch16", **options).double()
    network.set_domains([places(domain, 20, domain) for domain in range(3)])
    return network


def reference(network: Any, query: str) -> tuple[Any, ...]:
    """Arguments of the reference's relations, with the network's own parameters."""
    parts = network.metadata_encoder.encoder
    return 3, 0.8, parts.scale, parts.keys, parts.queries if query == "wrap" else None


def minibatches(seed: int) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64),
            torch.randint(4, (4,), generator=generator),
            places(domain, 4, 10 * seed + domain),
        )
        for domain in range(3)
    ]


@pytest.mark.parametrize("query", ["domain", "wrap"])
def test_losses_and_updates_are_those_of_the_reference(query: str) -> None:
    network, slow = model(query).train(), model(query).train()
    slow.load_state_dict(network.state_dict())
    algorithm = ERM(Setup(network, 3, 4))
    steps = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (network, slow)]
    for seed in range(3):
        data = minibatches(seed)
        losses = algorithm.update(StepContext(network, steps[0]), data)
        own, others = [], []
        for domain, (images, targets, lonlat) in enumerate(data):
            features = slow.forward_head(slow.forward_features(images), pre_logits=True)
            for feature, target, place in zip(features, targets.tolist(), lonlat.tolist(), strict=True):
                heads = [slow.head.weight[:, head] @ feature + slow.head.bias[:, head] for head in range(3)]
                weights = d3g.relations(domain, place, *reference(slow, query))
                own.append(d3g.cross_entropy(heads[domain], target))
                others.append(d3g.cross_entropy(d3g.mean_logits(heads, weights, without=domain), target))
        task, consistency = torch.stack(own).mean(), torch.stack(others).mean()
        steps[1].zero_grad()
        (task + 0.5 * consistency).backward()
        steps[1].step()
        torch.testing.assert_close(losses["task_loss"], task.detach(), rtol=0, atol=1e-9)
        torch.testing.assert_close(losses["consistency_loss"], consistency.detach(), rtol=0, atol=1e-9)
        for (name, value), expected in zip(network.named_parameters(), slow.parameters(), strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("query", ["domain", "wrap"])
@torch.no_grad()
def test_predictions_weight_all_heads_by_relations_and_alike_without_a_place(query: str) -> None:
    network = model(query).eval()
    images, _, lonlat = minibatches(1)[2]
    lonlat[3] = float("nan")
    logits, features = network(images, lonlat), network.forward_head(network.forward_features(images), pre_logits=True)
    for row, feature in enumerate(features):
        heads = [network.head.weight[:, head] @ feature + network.head.bias[:, head] for head in range(3)]
        weights = (
            [torch.tensor(1.0)] * 3 if row == 3 else d3g.relations(2, lonlat[row].tolist(), *reference(network, query))
        )
        torch.testing.assert_close(logits[row], d3g.mean_logits(heads, weights))
    assert torch.equal(network(images)[3], logits[3])
    assert not torch.allclose(network(images)[0], logits[0])
    assert network.other_logits is None


def test_it_starts_from_dense_logits_and_comes_back_with_its_index(tmp_path: Path) -> None:
    dense: Any = timm.create_model("deit_tiny_patch16_224", **SIZES).eval()
    weights = {"state_dict": deepcopy(dense.state_dict()), "num_classes": 4}
    network: Any = timm.create_model(
        "d3g_tiny_patch16", True, weights, num_domains=3, relation_query="wrap", **SIZES
    ).eval()
    network.set_domains([places(domain, 20, domain) for domain in range(3)])
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(network(images, CORNERS), dense(images))
        nn.init.normal_(network.head.weight)
        save_for_hf(network, str(tmp_path), safe_serialization=True)
        again: Any = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
        assert torch.equal(again(images, CORNERS), network(images, CORNERS))
    network.reset_classifier(7)
    assert not network.head.training
    assert network(images, CORNERS).shape == (3, 7)
    assert "head.bias" in network.no_weight_decay()


def test_a_copy_in_training_has_no_logits_of_the_graph() -> None:
    network = model().train()
    images, _, lonlat = minibatches(0)[0]
    logits = network(images, lonlat)
    other = deepcopy(network)
    assert (other.other_logits, network.other_logits is None) == (None, False)
    assert torch.equal(other(images, lonlat), logits)


def test_the_stated_domain_finds_the_head_of_a_training_place() -> None:
    network = model()
    shared = torch.tensor([[10.01, 50.01], [10.02, 50.02]])  # one cell of the index, in two domains
    network.set_domains([shared[:1], shared[1:], CORNERS[:1]])
    for domain in range(3):
        network.zero_grad()
        stated = torch.tensor([[10.02, 50.02, domain]])
        network.train()(minibatches(0)[0][0][:1], stated).sum().backward()
        assert (network.head.weight.grad != 0).any(2).any(0).tolist() == [head == domain for head in range(3)]
    images, lonlat = minibatches(0)[2][0], places(2, 4, 1)
    unknown = torch.cat([lonlat, torch.full((4, 1), float("nan"))], dim=1)
    with torch.no_grad():
        assert torch.equal(network.eval()(images, unknown), network(images, lonlat))


def test_a_run_states_the_domain_of_each_training_image(tmp_path: Path) -> None:
    words = ["--dataset", "geo_digits", "--batch-size", "2", "--output", str(tmp_path)]
    plan = make_plan(parse_resumable(run_parser(), words))
    config = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    loaders = build_loaders(plan, config, step_sampler(plan), with_metadata=True, with_domains=True)
    (minibatches, *_), (_, _, _, evaluated) = next(iter(loaders[0])), next(iter(loaders[1]))
    for number, (_, _, metadata) in enumerate(next(iter(loaders[0]))):
        assert metadata[:, 2].tolist() == [number] * 2
        assert metadata[:, :2].isfinite().all()
    assert len(minibatches) == 3
    assert evaluated.shape[1] == 2


@pytest.mark.parametrize("query", ["domain", "wrap"])
def test_a_file_of_weights_brings_the_size_of_its_index(query: str, tmp_path: Path) -> None:
    first = model(query).float().eval()
    first.renew_domains(["a", "b", "c"], ["c", "d", "a"])
    first.set_domains([places(domain, 20 + domain, domain) for domain in range(3)], ["c", "d", "a"])
    save_file(first.state_dict(), tmp_path / "weights.safetensors")
    options = {key: value for key, value in SIZES.items() if key != "num_classes"} | {"relation_query": query}
    again = load_trained(
        "d3g_tiny_patch16",
        initial_checkpoint=str(tmp_path / "weights.safetensors"),
        model_kwargs={**options, "num_domains": 3},
    )
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(images, CORNERS), first(images, CORNERS))
        save_for_hf(again, str(tmp_path), safe_serialization=True)
        saved = timm.create_model(f"local-dir:{tmp_path}").eval()
        assert len(saved.metadata_encoder.encoder.owners) == len(first.metadata_encoder.encoder.owners)


def test_feature_maps_of_timms_wrapper_are_those_of_the_blocks() -> None:
    network = timm.create_model("d3g_tiny_patch16", **SIZES, features_only=True, out_indices=(0,)).eval()
    with torch.no_grad():
        (features,) = network(torch.randn(2, 3, 16, 16))
    assert features.shape == (2, 24, 2, 2)
