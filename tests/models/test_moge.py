"""MoGE models: predictions with metadata, without, and in each expert mode; refused metadata.

The reference recomputes the mixture layers image by image from the weights, in float64.
"""

import json
import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import timm_moe_dg
from tests.models.cases import BY_NAME, Case, mixture_layers, randomize
from timm_moe_dg.errors import CheckpointError, MetadataError
from timm_moe_dg.losses import moge_losses
from timm_moe_dg.models.building import upcycle_filter_fn
from timm_moe_dg.networks.build import save_network

COORDINATES, IDS = BY_NAME["moge_tiny"], BY_NAME["moge_small_patch32_384"]
SIZES = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 4, "num_heads": 3, "num_classes": 5}
PLACES = torch.tensor([[10.0, 50.0], [-120.0, 30.0], [100.0, -20.0], [0.0, 0.0], [179.0, 80.0]])


def built(encoder: str) -> nn.Module:
    """A model whose experts differ enough to matter."""
    torch.manual_seed(0)
    model = timm.create_model("moge_tiny", metadata_encoder=encoder, num_locations=9, **SIZES).eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.mul_(20)
    return model


def feed_forward(x, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
    return F.linear(F.gelu(F.linear(x, fc1_weight, fc1_bias)), fc2_weight, fc2_bias)


def expert(layer, index, x):
    experts = layer.experts
    return feed_forward(
        x, experts.fc1.weight[index], experts.fc1.bias[index], experts.fc2.weight[index], experts.fc2.bias[index]
    )


def shared(layer, x):
    return feed_forward(
        x, layer.shared.fc1.weight, layer.shared.fc1.bias, layer.shared.fc2.weight, layer.shared.fc2.bias
    )


def mixture_of_one_image(layer, x, embedding):
    """The layer by its equation, g f0(x) + (1 - g) sum_k alpha_k f_k(x), alpha the softmax of the K best s_k / tau."""
    scores = [
        (embedding @ code / embedding.norm() / code.norm() * min(layer.logit_scale_exp, 100.0)).item()
        for code in layer.router.codes
    ]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: layer.router.top_k]
    total = sum(math.exp(scores[index]) for index in best)
    routed = sum(math.exp(scores[index]) / total * expert(layer, index, x) for index in best)
    gate = 1 / (1 + math.exp(-layer.gamma.item()))
    return gate * shared(layer, x) + (1 - gate) * routed


@torch.no_grad()
def reference_logits(model, images, feed_forward_of):
    """The network written out: `feed_forward_of(layer, image index, tokens)` stands for a mixture layer."""
    rows = []
    for index, image in enumerate(images):
        x = model.patch_embed(image.unsqueeze(0))
        x = torch.cat([model.cls_token, x], dim=1) + model.pos_embed
        for block in model.blocks:
            x = x + block.attn(block.norm1(x))
            normalized = block.norm2(x)
            is_mixture = hasattr(block.mlp, "router")
            x = x + (feed_forward_of(block.mlp, index, normalized) if is_mixture else block.mlp(normalized))
        rows.append(model.head(model.norm(x)[:, 0]))
    return torch.cat(rows)


@pytest.fixture
def model(moge):
    """A small model in float64 with weights away from their initial values: gates off 0.5, experts all different."""
    model = randomize(moge.small(dtype=torch.float64)).eval()
    for layer in mixture_layers(model).values():
        torch.nn.init.normal_(layer.router.codes)
        layer.logit_scale_exp = layer.router.logit_scale.exp().item()
    return model


def double_inputs(case: Case, batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    images, metadata = case.inputs(batch)
    return images.double(), metadata


def unknown(metadata: torch.Tensor) -> torch.Tensor:
    return metadata.isnan().any(1) if metadata.is_floating_point() else metadata < 0


@torch.no_grad()
def test_known_places_are_routed_and_unknown_ones_use_the_shared_expert(moge, model):
    images, metadata = double_inputs(moge)
    absent = unknown(metadata)
    assert absent.tolist() == [False, True, False] * 2
    embeddings = model.metadata_encoder.encoder(metadata.masked_fill(absent.view([-1] + [1] * (metadata.ndim - 1)), 0))

    def layer_output(layer, index, x):
        return shared(layer, x) if absent[index] else mixture_of_one_image(layer, x, embeddings[index].double())

    torch.testing.assert_close(
        model(images, metadata), reference_logits(model, images, layer_output), rtol=0, atol=1e-10
    )


@torch.no_grad()
def test_without_metadata_every_image_uses_the_shared_expert(moge, model):
    images, _ = double_inputs(moge)
    expected = reference_logits(model, images, lambda layer, _, x: shared(layer, x))
    torch.testing.assert_close(model(images), expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 5])
def test_a_forced_expert_answers_for_every_image_with_or_without_metadata(moge, model, index):
    images, metadata = double_inputs(moge)

    def layer_output(layer, _, x):
        gate = layer.gamma.sigmoid()
        return gate * shared(layer, x) + (1 - gate) * expert(layer, index, x)

    model.set_expert_mode(index)
    expected = reference_logits(model, images, layer_output)
    torch.testing.assert_close(model(images, metadata), expected, rtol=0, atol=1e-10)
    assert torch.equal(model(images), model(images, metadata))


@torch.no_grad()
def test_shared_mode_ignores_metadata_and_routed_mode_restores_it(moge, model):
    images, metadata = double_inputs(moge)
    routed = model(images, metadata)
    model.set_expert_mode("shared")
    assert torch.equal(model(images, metadata), model(images))
    assert not torch.equal(model(images), routed)
    model.set_expert_mode("routed")
    assert torch.equal(model(images, metadata), routed)


def test_training_without_metadata_has_no_auxiliary_loss_and_finite_gradients(moge):
    model = moge.small().train()
    logits = model(moge.images())
    auxiliary = timm_moe_dg.auxiliary_loss(model)
    assert auxiliary.item() == 0
    (logits.sum() + auxiliary).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_a_given_encoder_takes_other_metadata():
    encoder = torch.nn.Linear(3, 16)
    model = randomize(COORDINATES.small(metadata_encoder=encoder, metadata_features=16)).eval()
    images, sensors = COORDINATES.images(), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [math.nan, 0.0, 0.0]])
    logits = model(images, sensors)
    assert torch.equal(logits[2], model(images)[2])
    assert not torch.equal(logits[1], model(images)[1])


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        (COORDINATES, torch.tensor([[45.0, 120.0]] * 3), r"latitude=120\.0.*are longitude and latitude swapped\?"),
        (COORDINATES, torch.tensor([[0.0, 1.0], [math.nan, 2.0], [3.0, 95.0]]), r"latitude=95"),
        (COORDINATES, torch.tensor([[math.inf, 10.0]] * 3), r"longitude=.*-180\.\.180"),
        (COORDINATES, torch.zeros(2, 2), r"metadata shape=\(2, 2\).*one row per image, 3"),
        (COORDINATES, torch.tensor(1.0), r"metadata shape=\(\)"),
        (IDS, torch.tensor([0, 1, 323]), r"location id=323.*0 to 322.*-1 for an unknown location.*num_locations"),
        (IDS, torch.tensor([0, 1]), r"metadata shape=\(2,\).*one row per image, 3"),
    ],
)
def test_wrong_metadata_is_refused(case, metadata, message):
    model = case.small().eval()
    for method in (model.forward, model.forward_features, model.forward_intermediates):
        with pytest.raises(MetadataError, match=message):
            method(case.images(), metadata=metadata)


def test_encoders_by_name_and_their_errors():
    with pytest.raises(MetadataError, match=r"metadata_encoder='gps'.*sincos.*satclip"):
        timm.create_model("moge_tiny", metadata_encoder="gps", **SIZES)
    with pytest.raises(MetadataError, match=r"metadata_features=None: give"):
        timm.create_model("moge_tiny", metadata_encoder=nn.ReLU(), **SIZES)
    model = timm.create_model("moge_tiny", metadata_drop=0.25, metadata_features=32, **SIZES)
    assert model.metadata_encoder.encoder.drop.p == 0.25
    assert model.metadata_encoder.out_features == 32


@torch.no_grad()
def test_the_bounds_of_coordinates_and_an_empty_batch_are_valid():
    model, images = COORDINATES.small().eval(), COORDINATES.images()
    corners = torch.tensor([[180.0, 90.0], [-180.0, -90.0], [0.0, 0.0]])
    assert model(images, corners).isfinite().all()
    assert model(images[:0], corners[:0]).shape == (0, 10)


def test_a_model_without_shared_experts_is_saved_trained_and_upcycled_as_such(tmp_path):
    model = timm.create_model("moge_tiny", shared_expert=False, router_noise=0.0, metadata_drop=0.0, **SIZES)
    save_network(model, tmp_path, "abcde", {"input_size": (3, 16, 16)})
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["shared_expert"] is False
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(5, 3, 16, 16)
    expected = model.eval()(images, PLACES)
    torch.testing.assert_close(again(images, PLACES), expected)
    with pytest.raises(MetadataError, match=r"metadata of samples=\[2\]"):
        model(images, PLACES.index_fill(0, torch.tensor([2]), math.nan))

    model.train()(images, PLACES).sum().backward()
    assert "supcon_loss" not in moge_losses(model, torch.arange(5))  # a loss of the shared expert

    dense = timm.create_model("deit_tiny_patch16_224", **SIZES)
    upcycle_filter_fn(dense.state_dict(), model)  # would name missing weights
    with pytest.raises(CheckpointError, match="not in the model"):
        upcycle_filter_fn(timm.create_model("moge_tiny", **SIZES).state_dict(), model)
