"""A CUDA device without values: tensors of the CPU must not meet it, and nothing may wait for its values.

Fake tensors have shapes and devices alone, and refuse whatever asks for a value. The experts take their kernel.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.algorithms.networks import build, minibatches, network
from tests.gpu.test_cuda import CUDA, MODELS, SHORT
from tests.layers.test_routing import KINDS, images, layer
from timm_moe_dg import after_step
from timm_moe_dg.finetuning.model import build_task_loss
from timm_moe_dg.layers import LossWeights
from timm_moe_dg.layers.encoders.coverage import Coverage
from timm_moe_dg.losses import force_tokens, reported_losses


@pytest.fixture
def fake(monkeypatch):
    """A mode in which the experts take their kernel; modules and tensors are made before it is entered."""
    monkeypatch.setattr("timm_moe_dg.layers.experts.has_grouped_kernel", lambda weight: True)
    # Weights of another class than a parameter's count as quantized
    monkeypatch.setattr("timm_moe_dg.layers.experts.StackedExperts._is_quantized", lambda experts: False)
    torch._C._ensureCUDADeviceGuardSet()  # without a GPU: one that does nothing
    return FakeTensorMode(allow_non_fake_inputs=True)


def moved(fake, value):
    """A tensor, or a module changed in place, on the fake device."""
    if isinstance(value, torch.Tensor):
        with fake:
            return fake.from_tensor(value.detach()).to(CUDA)
    for module in value.modules():
        for name, parameter in module.named_parameters(recurse=False):
            module._parameters[name] = nn.Parameter(moved(fake, parameter), parameter.requires_grad)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = moved(fake, buffer)
    return value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_forward_in_training_and_its_losses(case, dtype, fake):
    model, inputs = moved(fake, case.small(**SHORT)), [moved(fake, column) for column in case.inputs()]
    force_tokens(model, 4)
    with fake, torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        logits = model(*inputs)
        losses = reported_losses(model, torch.zeros(3, dtype=torch.long, device=CUDA))
    assert {value.device.type for value in (logits, *(loss.value for loss in losses.values()))} == {"cuda"}


# Backward passes need a real device
@pytest.mark.parametrize("method", ["VREx", "GroupDRO", "CORAL", "MMD", "Fishr", "RDM", "SD"])
def test_the_objective_of_a_method(method, fake):
    algorithm, context = build(method, moved(fake, network("mixture")))
    batches = [tuple(moved(fake, column) for column in batch) for batch in minibatches("mixture", 0)]
    with fake:
        losses = moved(fake, algorithm).objective(context, batches)
    assert all(value.device.type == "cuda" for value in losses.values())


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_experts_and_their_balance(kind, fake):
    moe, x = moved(fake, layer(**KINDS[kind])), moved(fake, images())
    with fake:
        moe(x)
        target = torch.zeros(6, dtype=torch.long, device=CUDA)
        losses = reported_losses(moe, target, LossWeights(z_coef=1.0, image_coef=1.0, domain_coef=1.0))
        after_step(moe)
    values = [*moe.buffers(), *(loss.value for loss in losses.values())]
    assert all(value.device.type == "cuda" for value in values)


def test_class_weights_and_coverage(fake):
    options = SimpleNamespace(class_weights="balanced", label_smoothing=0.1, num_classes=2)
    plan = SimpleNamespace(options=options, training_rows=lambda column: [np.array([0, 0, 1])])
    coverage = moved(fake, Coverage(2, radius=100.0))
    with fake:
        target = torch.zeros(3, dtype=torch.long, device=CUDA)
        loss = build_task_loss(plan, torch.device(CUDA))(torch.randn(3, 2, device=CUDA), target)
        inside = coverage(torch.zeros(3, 2, device=CUDA))
    assert (loss.device.type, inside.device.type) == ("cuda", "cuda")


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        (lambda x: x + torch.ones(4), RuntimeError),
        (lambda x: x * x.max().item(), DataDependentOutputException),
        (lambda x: x if x.any() else -x, DataDependentOutputException),
    ],
)
def test_mistakes_are_noticed(mistake, error, fake):
    x = moved(fake, torch.ones(3, 4))
    with fake, pytest.raises(error):
        mistake(x)
