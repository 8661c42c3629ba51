"""Balancing losses against their definitions, and the auxiliary loss where others doubled or scaled it."""

import pytest
import scipy.stats
import timm
import torch
from torch import nn

import timm_moe_dg
from tests.quick_python import run_ranks
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import LinearRouter
from timm_moe_dg.losses import importance_loss, load_loss, tutel_loss, vmoe_loss


def squared_cv(values: list[float], correction: int = 0) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / (len(values) - correction) / mean**2


def routed(tokens: int = 30, **kwargs):
    torch.manual_seed(0)
    router = LinearRouter(12, 4, 2, **kwargs)
    nn.init.normal_(router.gate.weight, std=0.5)
    return router(torch.randn(tokens, 12))


def expected_load(clean: list[list[float]], noisy: list[list[float]], top_k: int, std: float) -> list[float]:
    load = [0.0] * len(clean[0])
    for clean_row, noisy_row in zip(clean, noisy, strict=True):
        threshold = sorted(noisy_row)[-top_k]
        for expert, logit in enumerate(clean_row):
            load[expert] += 1 - scipy.stats.norm.cdf((threshold - logit) / std)
    return load


def test_importance_of_a_worked_example():
    # sums 1.5, 0.5: mean 1, variance 0.25
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    assert importance_loss(probabilities).item() == pytest.approx(0.25)
    assert importance_loss(probabilities, unbiased=True).item() == pytest.approx(0.5)
    assert importance_loss(probabilities, torch.tensor([False, True])).item() == pytest.approx(0.04)


def test_losses_are_zero_when_balanced_and_largest_when_one_expert_has_all():
    assert importance_loss(torch.full((6, 4), 0.25)).item() == 0
    assert importance_loss(torch.eye(4)[[2, 2, 2]]).item() == pytest.approx(3)  # E - 1
    equal = torch.zeros(6, 4)
    assert load_loss(equal, equal, 2, 0.25).item() == pytest.approx(0, abs=1e-6)


def test_load_equals_its_definition():
    output = routed()
    load = expected_load(output.logits.tolist(), output.noisy_logits.tolist(), 2, 0.25)
    actual = load_loss(output.logits, output.noisy_logits, 2, output.noise_std)
    assert actual.item() == pytest.approx(squared_cv(load), rel=1e-4)


def test_layer_loss_is_the_mean_of_both_or_importance_alone_without_noise():
    output = routed()
    importance = squared_cv(output.logits.softmax(-1).sum(0).tolist())
    load = squared_cv(expected_load(output.logits.tolist(), output.noisy_logits.tolist(), 2, 0.25))
    assert vmoe_loss(output).item() == pytest.approx((importance + load) / 2, rel=1e-4)
    quiet = routed(noise_std=0.0)
    assert vmoe_loss(quiet).item() == pytest.approx(squared_cv(quiet.probabilities.sum(0).tolist()), rel=1e-4)


def test_the_tutel_form_compares_noisy_logits_with_probabilities_and_is_unbiased():
    output = routed()
    probabilities = output.logits.softmax(-1)
    importance = squared_cv(probabilities.sum(0).tolist(), correction=1)
    load = expected_load(probabilities.tolist(), output.noisy_logits.tolist(), 2, 0.25)
    expected = (importance + squared_cv(load, correction=1)) / 2
    assert tutel_loss(output).item() == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ArgumentError, match="form='mean': choose one of vmoe, tutel"):
        timm_moe_dg.auxiliary_loss(nn.Linear(2, 2), form="mean")


@pytest.mark.parametrize("loss", [vmoe_loss, tutel_loss])
def test_degenerate_batches_give_a_finite_zero(loss):
    one_expert = LinearRouter(12, 1, 1, normalize_weights=False)(torch.randn(5, 12))
    assert loss(one_expert).item() == 0
    nobody = loss(routed()._replace(routed=torch.zeros(30, dtype=torch.bool)))
    assert nobody.item() == 0
    nobody.backward()


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


def test_gradient_checkpointing_neither_doubles_nor_loses_the_auxiliary_loss():
    plain, saving = tiny_model(), tiny_model()
    saving.set_grad_checkpointing()
    losses = []
    for model in (plain, saving):
        loss = objective(model, image_batch())
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert_same_gradients(gradients(saving), gradients(plain))


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
    with pytest.raises(ArgumentError, match="run a forward in training mode"):
        timm_moe_dg.auxiliary_loss(tiny_model())
