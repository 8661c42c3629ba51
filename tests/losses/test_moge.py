"""MoGE's losses: against their equations written out as loops, and through whole models."""

import copy
import math

import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg  # registers the models
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import GeoMoeMlp
from timm_moe_dg.losses import (
    cka_diversity_loss,
    discovered_domains,
    force_tokens,
    moge_losses,
    supcon_invariance_loss,
)


def small_moge(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}
    return timm.create_model("moge_tiny", **{**sizes, "moe_layers": (1, 3), "router_noise": 0.0, **kwargs}).train()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lonlat = torch.rand(12, 2, generator=generator) * 120 - 60
    lonlat[0] = float("nan")
    return torch.randn(12, 3, 16, 16, generator=generator), lonlat, torch.arange(12) % 3


def geo_layers(model: nn.Module) -> list[GeoMoeMlp]:
    return [module for module in model.modules() if isinstance(module, GeoMoeMlp)]


def test_forced_tokens_are_the_layers_inputs_through_each_expert(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model, (images, lonlat, targets) = small_moge(), batch
    force_tokens(model, 1000)  # more than there are: all of them, in some order
    inputs = {}
    for layer in geo_layers(model):
        layer.register_forward_pre_hook(lambda layer, args: inputs.__setitem__(layer, args[0]))
    model(images, lonlat)
    for layer in geo_layers(model):
        tokens = inputs[layer].flatten(0, 1)
        experts = layer.experts
        by_hand = torch.stack(
            [
                torch.nn.functional.gelu(tokens @ w1.T + b1) @ w2.T + b2
                for w1, b1, w2, b2 in zip(
                    experts.fc1.weight, experts.fc1.bias, experts.fc2.weight, experts.fc2.bias, strict=True
                )
            ]
        )
        assert layer.report.forced.shape == by_hand.shape == (6, 12 * 5, 24)
        # a permutation of the tokens: sums over tokens agree, and so does CKA
        torch.testing.assert_close(layer.report.forced.sum(1), by_hand.sum(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cka_diversity_loss(layer.report.forced), cka_diversity_loss(by_hand))
    losses = moge_losses(model, targets)
    mean = torch.stack([cka_diversity_loss(layer.report.forced) for layer in geo_layers(model)]).mean()
    torch.testing.assert_close(losses["cka_loss"], mean)


def test_the_invariance_loss_sees_the_last_shared_experts_class_token(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model, (images, lonlat, targets) = small_moge(), batch
    last, seen = geo_layers(model)[-1], {}
    last.shared.register_forward_hook(lambda module, args, output: seen.update(token=output[:, 0]))
    model(images, lonlat)
    losses = moge_losses(model, targets, temperature=0.2)
    assert set(losses) == {"supcon_loss"}  # nobody asked for forced tokens

    domains = discovered_domains(last.routing)
    assert domains[0] == -1  # no coordinates, no domain
    assert domains[1:].tolist() == last.routing.logits[1:].argmax(1).tolist()
    torch.testing.assert_close(losses["supcon_loss"], supcon_invariance_loss(seen["token"], targets, domains, 0.2))
    assert losses["supcon_loss"] > 0


def test_the_number_of_forced_tokens_and_that_they_change(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model, (images, lonlat, _) = small_moge(), batch
    force_tokens(model, 7)
    first = [model(images, lonlat) is not None and layer.report.forced for layer in geo_layers(model)]
    model(images, lonlat)
    for old, layer in zip(first, geo_layers(model), strict=True):
        assert layer.report.forced.shape == (6, 7, 24)
        assert not torch.equal(old, layer.report.forced)
    force_tokens(model, 0)
    model(images, lonlat)
    assert all(layer.report.forced is None for layer in geo_layers(model))


def total_gradient(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], checkpointing: bool) -> Tensor:
    images, lonlat, targets = batch
    model.set_grad_checkpointing(checkpointing)
    model.zero_grad()
    torch.manual_seed(5)
    losses = moge_losses(model, targets) if model(images, lonlat) is not None else {}
    (losses["cka_loss"] + losses["supcon_loss"]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_gradient_checkpointing_gives_the_same_gradients(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model = small_moge()
    force_tokens(model, 16)
    plain = total_gradient(model, batch, checkpointing=False)
    torch.testing.assert_close(total_gradient(model, batch, checkpointing=True), plain)
    assert plain.abs().max() > 0


def test_every_parameter_gets_a_gradient_also_without_any_coordinates(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    images, lonlat, targets = batch
    for metadata in (lonlat, None, torch.full_like(lonlat, float("nan"))):
        model = small_moge()
        force_tokens(model, 16)
        logits = model(images, metadata)
        losses = moge_losses(model, targets)
        loss = logits.sum() + losses["cka_loss"] + losses["supcon_loss"] + timm_moe_dg.auxiliary_loss(model)
        loss.backward()
        missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert missing == []
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_report_replaces_the_one_before_and_is_not_copied(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model, (images, lonlat, targets) = small_moge(), batch
    force_tokens(model, 1000)
    losses = []
    for _ in range(2):
        torch.manual_seed(9)  # the location encoder's dropout
        model(images, lonlat)
        losses.append(moge_losses(model, targets))
    torch.testing.assert_close(losses[1], losses[0])  # not summed
    assert all(layer.report is None for layer in geo_layers(copy.deepcopy(model)))


def test_evaluation_reports_nothing_and_other_models_have_no_such_losses(batch: tuple[Tensor, Tensor, Tensor]) -> None:
    model, (images, lonlat, targets) = small_moge().eval(), batch
    force_tokens(model, 8)
    model(images, lonlat)
    with pytest.raises(ArgumentError, match="training mode"):
        moge_losses(model, targets)
    assert moge_losses(nn.Linear(2, 2), targets) == {}


@pytest.mark.parametrize("num_tokens", [-1, 1])
def test_a_number_of_tokens_without_a_meaning_is_refused(num_tokens: int) -> None:
    with pytest.raises(ArgumentError, match="num_tokens"):
        force_tokens(small_moge(), num_tokens)


def upcycled(expert_perturbation: float) -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}
    torch.manual_seed(1)
    dense = timm.create_model("vit_tiny_patch16_224", **sizes)
    return small_moge(
        expert_perturbation=expert_perturbation,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": dense.state_dict(), "num_classes": 5},
    )


def test_upcycled_experts_have_no_gradient_toward_diversity_until_they_are_perturbed(
    batch: tuple[Tensor, Tensor, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    images, lonlat, targets = batch
    gradients = {}
    for perturbation in (0.0, 0.1):
        with caplog.at_level("INFO"):
            model = upcycled(perturbation).double()
        force_tokens(model, 40)
        model(images.double(), lonlat.double())
        loss = moge_losses(model, targets)["cka_loss"]
        loss.backward()
        gradients[perturbation] = max(layer.experts.fc1.weight.grad.abs().max() for layer in geo_layers(model))
        assert (loss.item() == pytest.approx(1.0, abs=1e-9)) == (perturbation == 0.0)
    assert gradients[0.0] < 1e-9
    assert gradients[0.1] > 1e-5
    notes = [record.message for record in caplog.records if record.message.startswith("Upcycled")]
    assert ["perturbed by 0.1" in note for note in notes] == [False, True]


def test_the_perturbation_is_relative_to_each_matrix_and_differs_between_experts() -> None:
    plain, noisy = (geo_layers(upcycled(value))[0].experts for value in (0.0, 0.05))
    for name in ("fc1", "fc2"):
        dense, perturbed = getattr(plain, name).weight, getattr(noisy, name).weight
        noise = perturbed - dense
        relative = noise.detach().std(dim=(1, 2)) / dense.detach()[0].std()
        torch.testing.assert_close(relative, torch.full((6,), 0.05), rtol=0.1, atol=0.0)
        assert not torch.equal(noise[0], noise[1])
        torch.testing.assert_close(getattr(noisy, name).bias, getattr(plain, name).bias)


# The equations


def looped_cka(outputs: Tensor) -> float:
    """MoGE, equation 2, pair by pair with explicit feature covariances."""
    experts = len(outputs)
    total = 0.0
    for i in range(experts):
        for j in range(i + 1, experts):
            hi = outputs[i] - outputs[i].mean(0)
            hj = outputs[j] - outputs[j].mean(0)
            cross = (hi.T @ hj).square().sum()
            total += (cross / ((hi.T @ hi).square().sum().sqrt() * (hj.T @ hj).square().sum().sqrt())).item()
    return 2 * total / (experts * (experts - 1))


def looped_supcon(features: Tensor, targets: list[int], domains: list[int], temperature: float) -> float:
    """MoGE, equation 3, anchor by anchor; a domain of -1 takes no part."""
    q = [feature / feature.norm() for feature in features]
    terms = []
    for i in range(len(q)):
        positives, negatives = [], []
        for j in range(len(q)):
            if domains[i] < 0 or domains[j] < 0:
                continue
            similarity = math.exp(float(q[i] @ q[j]) / temperature)
            if targets[i] == targets[j] and domains[i] != domains[j]:
                positives.append(similarity)
            if targets[i] != targets[j] and domains[i] == domains[j]:
                negatives.append(similarity)
        if positives and negatives:
            terms.append(math.log(sum(positives)) - math.log(sum(positives) + sum(negatives)))
    return -sum(terms) / len(terms)


@pytest.mark.parametrize("shape", [(2, 5, 3), (4, 7, 7), (6, 40, 8)])
def test_cka_equals_the_loop_over_pairs(shape: tuple[int, int, int]) -> None:
    outputs = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3.0
    assert cka_diversity_loss(outputs).item() == pytest.approx(looped_cka(outputs), abs=1e-12)


def test_equal_experts_are_at_the_maximum_where_the_gradient_is_zero() -> None:
    tokens = torch.randn(32, 8, dtype=torch.float64)
    outputs = tokens.expand(3, -1, -1).clone().requires_grad_()
    loss = cka_diversity_loss(outputs)
    loss.backward()
    assert loss.item() == pytest.approx(1.0, abs=1e-12)
    assert outputs.grad.abs().max() < 1e-12

    moved = (outputs.detach() + 0.1 * torch.randn_like(outputs)).requires_grad_()
    loss = cka_diversity_loss(moved)
    loss.backward()
    assert loss.item() < 1.0 - 1e-4
    assert moved.grad.abs().max() > 1e-5  # the perturbation has lifted the zero gradient


def test_a_single_expert_and_constant_outputs_stay_finite_with_a_graph() -> None:
    for outputs in (torch.randn(1, 4, 3), torch.ones(2, 4, 3)):
        outputs.requires_grad_()
        loss = cka_diversity_loss(outputs)
        loss.backward()
        assert loss.item() == 0.0
        assert outputs.grad.isfinite().all()


def test_cka_is_computed_in_float32_under_autocast_and_from_bfloat16() -> None:
    outputs = torch.randn(3, 64, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert cka_diversity_loss(outputs).item() == pytest.approx(looped_cka(outputs.double()), abs=1e-5)
    assert cka_diversity_loss(outputs.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_supcon_equals_the_loop_over_anchors(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(24, 6, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 4, (24,), generator=generator)
    domains = torch.randint(-1, 3, (24,), generator=generator)
    expected = looped_supcon(features, targets.tolist(), domains.tolist(), temperature)
    assert supcon_invariance_loss(features, targets, domains, temperature).item() == pytest.approx(expected, abs=1e-12)


def test_supcon_in_closed_form() -> None:
    # Anchor 0: class 0, domain 0. Its positive (1) lies at cosine 0, its negative (2) at cosine 1; no other has both.
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])
    loss = supcon_invariance_loss(features, torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0]), temperature=0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(2.0)), abs=1e-6)


@pytest.mark.parametrize(
    ("targets", "domains"),
    [
        ([0, 1, 2, 3], [0, 0, 0, 0]),  # negatives only
        ([0, 0, 0, 0], [0, 1, 2, 3]),  # positives only
        ([0, 0, 1, 1], [-1, -1, -1, -1]),  # no sample has a domain
    ],
)
def test_without_an_anchor_that_has_both_sets_the_loss_is_zero_with_a_graph(
    targets: list[int], domains: list[int]
) -> None:
    features = torch.randn(4, 3, requires_grad=True)
    loss = supcon_invariance_loss(features, torch.tensor(targets), torch.tensor(domains))
    loss.backward()
    assert loss.item() == 0.0
    assert features.grad.abs().max() == 0.0


def test_wrong_shapes_and_temperatures_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="outputs"):
        cka_diversity_loss(torch.ones(3, 4))
    with pytest.raises(ArgumentError, match="features, targets, domains"):
        supcon_invariance_loss(torch.ones(3, 4), torch.zeros(3), torch.zeros(2))
    with pytest.raises(ArgumentError, match="temperature"):
        supcon_invariance_loss(torch.ones(3, 4), torch.zeros(3), torch.zeros(3), temperature=0.0)
