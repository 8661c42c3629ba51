"""Losses of whole models: the auxiliary loss where others doubled or scaled it, and MoGE's through its layers."""

import copy
from functools import partial

import pytest
import timm
import torch
from torch import Tensor, nn

import timm_moe_dg
from tests.models.cases import overlay
from tests.quick_python import run_ranks
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import GeoMoeMlp, LossWeights, ReportedLoss
from timm_moe_dg.layers.reports import cka_diversity_loss, discovered_domains, supcon_invariance_loss, vmoe_loss
from timm_moe_dg.losses import check_loss_weights, force_tokens, reported_losses, set_auxiliary_form


def tiny_model(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    size = {"img_size": 32, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 5, "moe_layers": (0, 2)}
    model = timm.create_model("gmoe_tiny_patch16", **size, **kwargs)
    for name, parameter in model.named_parameters():
        if "router.codes" in name or "router.proj" in name:
            nn.init.normal_(parameter, std=0.5)  # far from balance, so that the loss has a gradient
    return model


def image_batch(seed: int = 0, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def objective(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(images).logsumexp(1).mean() + timm_moe_dg.auxiliary_loss(model)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_auxiliary_loss_is_the_sum_over_layers_of_the_last_forward():
    model = tiny_model()
    model(image_batch(0))
    model(image_batch(1))
    outputs = timm_moe_dg.router_outputs(model)
    assert list(outputs) == ["blocks.0.mlp", "blocks.2.mlp"]
    assert all(output.logits.shape == (4 * 5, 6) for output in outputs.values())
    expected = sum(vmoe_loss(output).item() for output in outputs.values())
    assert timm_moe_dg.auxiliary_loss(model).item() == pytest.approx(expected, rel=1e-6)


def test_accumulated_gradients_are_the_sum_of_those_of_the_parts():
    model = tiny_model()
    parts = []
    for seed in (0, 1):
        model.zero_grad()
        objective(model, image_batch(seed)).backward()
        parts.append(gradients(model))
    model.zero_grad()
    for seed in (0, 1):
        objective(model, image_batch(seed)).backward()
    assert_same_gradients(gradients(model), {name: parts[0][name] + parts[1][name] for name in parts[0]})


def _distributed_worker(rank: int, store: str, results: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(tiny_model())  # without find_unused_parameters
    objective(model, image_batch(rank)).backward()
    if rank == 0:
        torch.save(gradients(model.module), results)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_average_the_auxiliary_gradients_of_their_local_batches(tmp_path, fresh_python):
    results = str(tmp_path / "gradients.pt")
    run_ranks(fresh_python, _distributed_worker, str(tmp_path / "store"), results)
    model = tiny_model()
    for rank in (0, 1):
        (objective(model, image_batch(rank)) / 2).backward()
    assert_same_gradients(torch.load(results, weights_only=True), gradients(model))


def test_routing_is_recorded_in_evaluation_inside_the_context_only():
    model = tiny_model().eval()
    model(image_batch())
    assert timm_moe_dg.router_outputs(model) == {}
    with timm_moe_dg.record_routing(model):
        model(image_batch())
    first = timm_moe_dg.router_outputs(model)["blocks.0.mlp"]
    assert first.noise_std == 0
    model(image_batch(1))
    assert timm_moe_dg.router_outputs(model)["blocks.0.mlp"] is first


def test_a_dense_model_has_no_auxiliary_loss_and_an_untrained_mixture_says_so():
    assert timm_moe_dg.auxiliary_loss(nn.Linear(2, 2)).item() == 0
    with pytest.raises(ArgumentError, match=r"^model='MoeVisionTransformer'"):
        timm_moe_dg.auxiliary_loss(tiny_model())
    with pytest.raises(ArgumentError, match=r"^form='mean'"):
        set_auxiliary_form(nn.Linear(2, 2), "mean")


# MoGE


SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}


def small_moge(**kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("moge_tiny", **{**SIZES, "moe_layers": (1, 3), "router_noise": 0.0, **kwargs}).train()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lonlat = torch.rand(12, 2, generator=generator) * 120 - 60
    lonlat[0] = float("nan")
    return torch.randn(12, 3, 16, 16, generator=generator), lonlat, torch.arange(12) % 3


def moge_losses(model: nn.Module, targets: Tensor, temperature: float = 0.1) -> dict[str, Tensor]:
    losses = reported_losses(model, targets, LossWeights(supcon_temperature=temperature))
    return {name: loss.value for name, loss in losses.items() if name != "aux_loss"}


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
        tokens, first, second = inputs[layer].flatten(0, 1), layer.experts.fc1, layer.experts.fc2
        hidden = nn.functional.gelu(torch.einsum("td,ehd->eth", tokens, first.weight) + first.bias[:, None])
        by_hand = torch.einsum("eth,edh->etd", hidden, second.weight) + second.bias[:, None]
        assert layer.report.forced.shape == by_hand.shape == (6, 12 * 5, 24)
        # a permutation of the tokens: sums over tokens agree, and so does CKA
        torch.testing.assert_close(layer.report.forced.sum(1), by_hand.sum(1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cka_diversity_loss(layer.report.forced), cka_diversity_loss(by_hand))
    mean = torch.stack([cka_diversity_loss(layer.report.forced) for layer in geo_layers(model)]).mean()
    torch.testing.assert_close(moge_losses(model, targets)["cka_loss"], mean)


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


def test_forced_tokens_change_from_forward_to_forward_and_evaluation_reports_none(
    batch: tuple[Tensor, Tensor, Tensor],
) -> None:
    model, (images, lonlat, targets) = small_moge(), batch
    force_tokens(model, 7)
    first = [model(images, lonlat) is not None and layer.report.forced for layer in geo_layers(model)]
    model(images, lonlat)
    for old, layer in zip(first, geo_layers(model), strict=True):
        assert layer.report.forced.shape == (6, 7, 24)
        assert not torch.equal(old, layer.report.forced)
    assert all(layer.report is None for layer in geo_layers(copy.deepcopy(model)))
    force_tokens(model, 0)
    model(images, lonlat)
    assert all(layer.report.forced is None for layer in geo_layers(model))
    still = copy.deepcopy(model).eval()
    still(images, lonlat)
    assert moge_losses(still, targets) == {}
    for number in (-1, 1):
        with pytest.raises(ArgumentError, match=f"^num_tokens={number}"):
            force_tokens(model, number)


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


def upcycled(perturbation: float) -> nn.Module:
    torch.manual_seed(1)
    dense = timm.create_model("vit_tiny_patch16_224", **SIZES).state_dict()
    return small_moge(expert_perturbation=perturbation, **overlay(dense, 5))


def test_upcycled_experts_have_no_gradient_toward_diversity_until_they_are_perturbed(
    batch: tuple[Tensor, Tensor, Tensor],
) -> None:
    images, lonlat, targets = batch
    gradients = {}
    for perturbation in (0.0, 0.1):
        model = upcycled(perturbation).double()
        force_tokens(model, 40)
        model(images.double(), lonlat.double())
        loss = moge_losses(model, targets)["cka_loss"]
        loss.backward()
        gradients[perturbation] = max(layer.experts.fc1.weight.grad.abs().max() for layer in geo_layers(model))
        assert (loss.item() == pytest.approx(1.0, abs=1e-9)) == (perturbation == 0.0)
    assert gradients[0.0] < 1e-9
    assert gradients[0.1] > 1e-5


def test_the_perturbation_is_relative_to_each_matrix_and_differs_between_experts() -> None:
    plain, noisy = (geo_layers(upcycled(value))[0].experts for value in (0.0, 0.05))
    for name in ("fc1", "fc2"):
        dense, perturbed = getattr(plain, name).weight, getattr(noisy, name).weight
        noise = perturbed - dense
        relative = noise.detach().std(dim=(1, 2)) / dense.detach()[0].std()
        torch.testing.assert_close(relative, torch.full((6,), 0.05), rtol=0.1, atol=0.0)
        assert not torch.equal(noise[0], noise[1])
        torch.testing.assert_close(getattr(noisy, name).bias, getattr(plain, name).bias)


@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_losses_of_an_evaluation_are_refused_until_the_next_training_forward(name):
    model = timm.create_model(name, num_classes=3, img_size=32, depth=4, embed_dim=24, num_heads=2)
    images, targets = torch.randn(2, 3, 32, 32), torch.tensor([0, 2])
    given = [torch.tensor([[13.4, 52.5], [2.3, 48.9]])] if name == "moge_tiny" else []
    model.train()(images, *given)
    before = timm_moe_dg.auxiliary_loss(model)
    with timm_moe_dg.record_routing(model.eval()):
        model(images, *given)
    for loss in (partial(timm_moe_dg.auxiliary_loss, model), partial(reported_losses, model, targets)):
        with pytest.raises(ArgumentError, match="evaluation"):
            loss()
    model.train()(images, *given)
    assert timm_moe_dg.auxiliary_loss(model).requires_grad == before.requires_grad


class Reporting(nn.Identity):
    """A user's module with losses of the names and weights of a run."""

    def training_losses(self, targets: Tensor, weights: LossWeights) -> dict[str, ReportedLoss]:
        return {
            f"{name}_loss": ReportedLoss(torch.tensor(2.0), getattr(weights, f"{name}_coef")) for name in COEFFICIENTS
        }


COEFFICIENTS = ("aux", "z", "image", "domain", "cka", "supcon")


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_users_module_may_report_each_loss_that_has_a_coefficient(name):
    weights = LossWeights(**{f"{name}_coef": 0.25})
    model = nn.Sequential(nn.Linear(2, 2), Reporting())
    check_loss_weights(model, weights)
    loss = reported_losses(model, torch.tensor([0, 1]), weights)[f"{name}_loss"]
    assert (loss.value.item(), loss.weight) == (2.0, 0.25)


@pytest.mark.parametrize("model", ["d3g_tiny_patch16", "deit_tiny_patch16_224"])
@pytest.mark.parametrize("name", ["z", "image", "domain"])
def test_a_coefficient_without_a_loss_is_refused(name, model):
    model = timm.create_model(model, depth=1, embed_dim=24, num_heads=2)
    with pytest.raises(ArgumentError, match=f"^{name}_coef=0.25"):
        check_loss_weights(model, LossWeights(**{f"{name}_coef": 0.25}))
