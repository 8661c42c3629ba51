"""What training does to a model: gradients, checkpointing, copies."""

import copy
import io

import pytest
import timm
import torch
from timm.utils import ModelEmaV3

import timm_moe_dg
from tests.models.cases import BY_NAME, SMALL, Case, mixture_layers, randomize

COEFFICIENT = 0.01


def loss_of(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    targets = torch.arange(len(inputs[0])) % 10
    task = torch.nn.functional.cross_entropy(model(*inputs), targets)
    return task + COEFFICIENT * timm_moe_dg.auxiliary_loss(model)


def gradients(case: Case, inputs: tuple[torch.Tensor, ...], checkpointing: bool, **options) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = randomize(case.small(**options)).train()
    model.set_grad_checkpointing(checkpointing)
    torch.manual_seed(1)
    loss = loss_of(model, inputs)
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad for name, parameter in model.named_parameters()}


def without_gradient(model: torch.nn.Module) -> list[str]:
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def test_every_parameter_gets_a_gradient_from_two_images(case):
    model = case.small().train()
    loss_of(model, case.inputs(2)).backward()
    assert without_gradient(model) == []


# Without metadata, routers and encoders must still have gradients, if only zeros, for distributed training
@pytest.mark.parametrize("with_metadata", [True, False], ids=["metadata", "images alone"])
@pytest.mark.parametrize("name", ["moge_tiny", "moge_small_patch32_384", "erm_le_tiny_patch16", "d3g_tiny_patch16"])
def test_every_parameter_of_networks_that_read_metadata_gets_a_gradient_from_the_task_alone(name, with_metadata):
    case = BY_NAME[name if name.startswith("moge") else "moge_tiny"]
    model = randomize(timm.create_model(name, **SMALL, img_size=case.small_size)).train()
    if name.startswith("d3g"):
        model.set_domains(list(torch.tensor([[[10.0, 20.0]], [[0.0, 0.0]], [[5.0, 5.0]], [[9.0, 9.0]], [[7.0, 1.0]]])))
    logits = model(*case.inputs(2)) if with_metadata else model(case.images(2))
    other = model.other_logits.sum() if name.startswith("d3g") else 0.0
    (logits.sum() + other).backward()
    assert without_gradient(model) == []
    routed = [key for key, parameter in model.named_parameters() if ".experts." in key and parameter.grad.any()]
    assert bool(routed) == (with_metadata and name.startswith("moge"))


@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "sfmoe_small"])
def test_the_router_learns_from_the_task_through_the_combine_weights(name):
    for top_k in (1, 2):
        model = randomize(BY_NAME[name].small(top_k=top_k)).train()
        model(BY_NAME[name].images()).square().sum().backward()
        for layer in mixture_layers(model).values():
            assert all(parameter.grad.any() for parameter in layer.router.parameters() if parameter.ndim == 2)


@pytest.mark.parametrize("options", [{}, {"expert_drop": 0.3, "drop_path_rate": 0.3, "proj_drop_rate": 0.2}])
def test_gradient_checkpointing_changes_no_gradient(family, options):
    if not options and not family.metadata:
        options = {"capacity_factor": 1.0}
    plain, recomputed = (gradients(family, family.inputs(), on, **options) for on in (False, True))
    assert plain.keys() == recomputed.keys()
    for name in plain:
        torch.testing.assert_close(
            recomputed[name], plain[name], rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_gradient_checkpointing_computes_every_block_again_in_the_backward_pass(family, checkpointing):
    model, calls = family.small().train(), []
    model.set_grad_checkpointing(checkpointing)
    for index, block in enumerate(model.blocks):
        block.attn.register_forward_hook(lambda *_, index=index: calls.append(index))
    logits = model(*family.inputs())
    assert calls == [0, 1, 2, 3]
    logits.sum().backward()
    again = sorted(calls[4:])
    assert again == ([0, 1, 2, 3] if checkpointing else [])


TIMMS_RATES = ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")


@torch.no_grad()
@pytest.mark.parametrize(
    "chance", [{"expert_drop": 0.5}, {"router_noise": 5.0}, *({f"{rate}_rate": 0.5} for rate in TIMMS_RATES)], ids=str
)
def test_dropout_and_noise_act_in_training_only(family, chance):
    model, inputs = randomize(family.small(**{**family.without_chance, **chance})), family.inputs()
    assert not torch.equal(model(*inputs), model(*inputs))
    model.eval()
    assert torch.equal(model(*inputs), model(*inputs))


@torch.no_grad()
def test_copies_pickles_and_averages_after_a_training_forward(family):
    model, inputs = randomize(family.small()).train(), family.inputs()
    with torch.enable_grad():
        loss_of(model, inputs)
    assert all(layer.routing.logits.grad_fn is not None for layer in mixture_layers(model).values())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = (copy.deepcopy(model), torch.load(buffer, weights_only=False))
    average, before = ModelEmaV3(model, decay=0.75), copy.deepcopy(model.state_dict())
    expected = model.eval()(*inputs)
    for copied in copies:
        assert all(layer.routing is None for layer in mixture_layers(copied).values())
        assert torch.equal(copied.eval()(*inputs), expected)
    randomize(model, std=0.1, seed=5)
    average.update(model)
    for key, value in average.module.state_dict().items():
        torch.testing.assert_close(value, 0.75 * before[key] + 0.25 * model.state_dict()[key], rtol=0, atol=1e-6)
