"""Upcycling at full size: the mixture computes what the dense model computes, in experts that own their weights."""

import copy
import math

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_model_data_config

from tests.models.cases import BY_NAME, CASES, Case, mixture_layers, overlay, randomize, upcycled

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def full_size(request):
    """A registered model, its dense twin with weights away from their initial values, and the case."""
    case: Case = request.param
    torch.manual_seed(0)
    dense = randomize(case.build_dense(), std=0.02).eval()
    mixture = case.build(**overlay(dense.state_dict(), num_classes=1000)).eval()
    mixture.pretrained_cfg.pop("state_dict")
    return case, mixture, dense


def photographs(model: torch.nn.Module) -> torch.Tensor:
    """scikit-learn's two photographs, preprocessed as the model asks for."""
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    return torch.stack([transform(Image.fromarray(image)) for image in load_sample_images().images])


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.slow
@torch.no_grad()
def test_logits_equal_the_dense_models_on_random_images_and_photographs(full_size):
    case, mixture, dense = full_size
    noise = torch.randn(2, 3, case.img_size, case.img_size, generator=torch.Generator().manual_seed(0))
    images = torch.cat([photographs(dense), noise])
    expected = dense(images)
    assert expected.std() > 0.1  # and not the near-zero logits of a fresh classifier
    logits = [mixture(images)]
    if case.metadata:
        logits.append(mixture(images, case.locations(4)))
    for one in logits:
        torch.testing.assert_close(one, expected, rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_the_comparison_would_notice_a_wrong_expert(full_size):
    case, mixture, dense = full_size
    images = torch.randn(1, 3, case.img_size, case.img_size, generator=torch.Generator().manual_seed(0))
    locations = case.locations(1)
    inputs = (images,) if locations is None else (images, locations)
    (layer, *_) = mixture_layers(mixture).values()
    kept = layer.experts.fc2.weight.clone()
    layer.experts.fc2.weight.mul_(1.1)
    changed = difference(mixture(*inputs), dense(images))
    layer.experts.fc2.weight.copy_(kept)
    assert changed > 100 * TOLERANCE


@torch.no_grad()
def test_every_expert_is_the_dense_feed_forward_bit_by_bit(full_size):
    _, mixture, dense = full_size
    for name, layer in mixture_layers(mixture).items():
        mlp = dense.get_submodule(name)
        for part in ("fc1", "fc2"):
            for kind in ("weight", "bias"):
                source = getattr(getattr(mlp, part), kind)
                for expert in getattr(getattr(layer.experts, part), kind):
                    assert torch.equal(expert, source), (name, part, kind)
                if hasattr(layer, "shared"):
                    assert torch.equal(getattr(getattr(layer.shared, part), kind), source)


@torch.no_grad()
def test_everything_outside_the_mixture_layers_is_the_dense_model(full_size):
    _, mixture, dense = full_size
    layers = tuple(f"{name}." for name in mixture_layers(mixture))
    ours, theirs = mixture.state_dict(), dense.state_dict()
    kept = {key for key in theirs if not key.startswith(layers)}
    assert kept == {key for key in ours if not key.startswith((*layers, "metadata_encoder."))}
    assert len(kept) > 100
    assert all(torch.equal(ours[key], theirs[key]) for key in kept)


@pytest.fixture
def small_pair(case):
    """The small variant of each model, upcycled, and its dense twin."""
    dense = randomize(case.small_dense()).eval()
    return upcycled(case, dense).eval(), dense


def test_no_parameter_shares_memory_with_another_or_with_the_source(small_pair, tmp_path):
    mixture, dense = small_pair
    storages = [tensor.untyped_storage().data_ptr() for tensor in mixture.state_dict().values()]
    assert len(set(storages)) == len(storages)
    assert not set(storages) & {tensor.untyped_storage().data_ptr() for tensor in dense.state_dict().values()}
    for tensor in mixture.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    safetensors.torch.save_file(mixture.state_dict(), tmp_path / "model.safetensors")  # refuses shared memory
    restored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, mixture.state_dict()[key]) for key, value in restored.items())


@torch.no_grad()
def test_changing_one_expert_changes_no_other(small_pair):
    mixture, dense = small_pair
    name, layer = next(iter(mixture_layers(mixture).items()))
    layer.experts.fc1.weight[2] += 1
    source = dense.get_submodule(name).fc1.weight
    unchanged = [torch.equal(expert, source) for expert in layer.experts.fc1.weight]
    assert unchanged == [True, True, False, True, True, True]


def test_routers_are_drawn_anew_at_each_upcycling(case):
    dense = randomize(case.small_dense())
    first, second = upcycled(case, dense).state_dict(), upcycled(case, dense).state_dict()
    drawn = {key for key in first if ".router." in key and first[key].ndim == 2} | {
        key for key in first if key.startswith("metadata_encoder.") and first[key].ndim == 2
    }
    assert drawn
    assert {key for key in first if not torch.equal(first[key], second[key])} >= drawn
    assert not any("experts" in key for key in first if not torch.equal(first[key], second[key]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "sfmoe_small"])
def test_routers_start_as_the_specification_says(name):
    case = BY_NAME[name]
    model = case.small(embed_dim=256, num_experts=64, **overlay(case.small_dense(embed_dim=256).state_dict()))
    router = next(iter(mixture_layers(model).values())).router
    if name == "sfmoe_small":
        assert router.gate.bias is None
        assert router.gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
        return
    assert router.codes.shape == (64, 256)
    assert router.codes.std().item() == pytest.approx(0.01, rel=0.05)
    assert router.logit_scale.exp().item() == pytest.approx(2.0)


class ProbabilityScaledMlp(torch.nn.Module):
    """The dense feed-forward, scaled by the largest routing probability of each token (top-1 with a raw gate)."""

    def __init__(self, mlp, router):
        super().__init__()
        self.mlp, self.router = mlp, router

    def probability(self, x):
        weights = dict(self.router.named_parameters())
        if "gate.weight" in weights:
            logits = x.double() @ weights["gate.weight"].double().T
        else:
            projected = x.double() @ weights["proj.weight"].double().T + weights["proj.bias"].double()
            codes = weights["codes"].double()
            norms = projected.norm(dim=-1, keepdim=True) * codes.norm(dim=-1)
            logits = projected @ codes.T / norms * weights["logit_scale"].double().clamp(max=math.log(100)).exp()
        return (logits.exp() / logits.exp().sum(-1, keepdim=True)).amax(-1, keepdim=True)

    def forward(self, x):
        hidden = F.gelu(F.linear(x, self.mlp.fc1.weight, self.mlp.fc1.bias))
        return self.probability(x).to(x.dtype) * F.linear(hidden, self.mlp.fc2.weight, self.mlp.fc2.bias)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["gmoe_small_patch16", "sfmoe_small"])
def test_top_1_equals_the_probability_scaled_feed_forward(name):
    case = BY_NAME[name]
    dense = randomize(case.build_dense(num_classes=10), std=0.02).eval()
    mixture = case.build(num_classes=10, top_k=1, **overlay(dense.state_dict())).eval()
    scaled = copy.deepcopy(dense)
    for layer_name, layer in mixture_layers(mixture).items():
        parent = scaled.get_submodule(layer_name.removesuffix(".mlp"))
        parent.mlp = ProbabilityScaledMlp(parent.mlp, layer.router)
    images = torch.cat([photographs(dense), torch.randn(1, 3, 224, 224)])
    torch.testing.assert_close(mixture(images), scaled(images), rtol=0, atol=TOLERANCE)
    assert difference(mixture(images), dense(images)) > 100 * TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{"num_experts": 1, "top_k": 1}, {"num_experts": 3, "top_k": 3}, {"moe_layers": "SSSS"}]
)
def test_upcycled_equals_dense_for_other_options_too(family, options):
    dense = randomize(family.small_dense()).eval()
    mixture = upcycled(family, dense, **options).eval()
    inputs = family.inputs()
    torch.testing.assert_close(mixture(*inputs), dense(inputs[0]), rtol=0, atol=TOLERANCE)


@torch.no_grad()
def test_a_mixture_checkpoint_with_fewer_mixture_layers_is_upcycled_in_the_others():
    case = BY_NAME["gmoe_tiny_patch16"]
    source = randomize(case.small(moe_layers=[2])).eval()
    model = case.small(moe_layers=[0, 2], **overlay(source.state_dict())).eval()
    torch.testing.assert_close(model(case.images()), source(case.images()), rtol=0, atol=TOLERANCE)
    assert torch.equal(model.blocks[2].mlp.router.codes, source.blocks[2].mlp.router.codes)


@torch.no_grad()
def test_upcycling_takes_the_weights_of_a_normalized_feed_forward_along():
    case = BY_NAME["gmoe_tiny_patch16"]
    dense = randomize(case.small_dense(scale_mlp_norm=True)).eval()
    mixture = upcycled(case, dense, scale_mlp_norm=True).eval()
    torch.testing.assert_close(mixture(case.images()), dense(case.images()), rtol=0, atol=TOLERANCE)
