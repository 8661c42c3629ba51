"""MoGE models: what metadata does to a prediction, what its absence does, and which metadata are refused.

The reference recomputes the mixture layers image by image, straight from the weights, in float64.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import timm_moe_dg
from tests.models.cases import BY_NAME, Case, mixture_layers, randomize
from timm_moe_dg.errors import MetadataError, RouterError

COORDINATES, IDS = BY_NAME["moge_tiny"], BY_NAME["moge_small_patch32_384"]


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


@pytest.mark.parametrize("mode", ["sparse", 6, -1, True, 1.0, None])
def test_an_unknown_expert_mode_is_refused_and_changes_nothing(mode):
    model, inputs = COORDINATES.small().eval(), COORDINATES.inputs()
    before = model(*inputs)
    with pytest.raises(RouterError, match=r"expert mode=.*'routed', 'shared' or an index 0\.\.5"):
        model.set_expert_mode(mode)
    assert torch.equal(model(*inputs), before)


@torch.no_grad()
def test_missing_metadata_give_the_shared_logits_bit_by_bit(moge):
    model = randomize(moge.small()).eval()
    images, metadata = moge.inputs(6)
    absent = unknown(metadata)
    alone, mixed = model(images), model(images, metadata)
    assert torch.equal(mixed[absent], alone[absent])
    assert not torch.isclose(mixed[~absent], alone[~absent]).all(dim=1).any()


@torch.no_grad()
@pytest.mark.parametrize("place", [(float("nan"), 1.0), (1.0, float("nan")), (float("nan"), float("nan"))])
def test_one_missing_coordinate_is_enough(place):
    model, images = randomize(COORDINATES.small()).eval(), COORDINATES.images(1)
    assert torch.equal(model(images, torch.tensor([place])), model(images))


@torch.no_grad()
def test_a_prediction_depends_on_the_place(moge):
    model, image = randomize(moge.small()).eval(), moge.images(1)
    places = (
        [torch.tensor([[10.0, 20.0]]), torch.tensor([[-120.0, -33.0]])]
        if moge is COORDINATES
        else [
            torch.tensor([3]),
            torch.tensor([4]),
        ]
    )
    assert not torch.equal(model(image, places[0]), model(image, places[1]))


@torch.no_grad()
def test_longitudes_180_degrees_either_way_are_the_same_place():
    model, image = randomize(COORDINATES.small(dtype=torch.float64)).eval(), COORDINATES.images(1).double()
    west, east = (model(image, torch.tensor([[longitude, 10.0]], dtype=torch.float64)) for longitude in (-180.0, 180.0))
    torch.testing.assert_close(west, east, rtol=0, atol=1e-10)


def test_a_routing_record_marks_which_images_were_routed(moge):
    model, (images, metadata) = moge.small().eval(), moge.inputs(3)
    with timm_moe_dg.record_routing(model):
        model(images, metadata)
    for output in timm_moe_dg.router_outputs(model).values():
        assert output.routed.tolist() == [True, False, True]
        assert output.expert_indices.shape == (3, 3)
        torch.testing.assert_close(output.combine_weights.sum(1), torch.ones(3))


def test_training_without_metadata_has_no_auxiliary_loss_and_finite_gradients(moge):
    model = moge.small().train()
    logits = model(moge.images())
    auxiliary = timm_moe_dg.auxiliary_loss(model)
    assert auxiliary.item() == 0
    (logits.sum() + auxiliary).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_head_alone_can_be_trained_on_the_frozen_shared_backbone(moge):
    model = moge.small()
    model.requires_grad_(False).get_classifier().requires_grad_(True)
    model.set_expert_mode("shared")
    model(*moge.inputs()).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {
        "head.weight",
        "head.bias",
    }


def test_an_encoder_of_ones_own_takes_other_metadata():
    encoder = torch.nn.Linear(3, 16)
    model = randomize(COORDINATES.small(metadata_encoder=encoder, metadata_features=16)).eval()
    images, sensors = COORDINATES.images(), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [float("nan"), 0.0, 0.0]])
    logits = model(images, sensors)
    assert torch.equal(logits[2], model(images)[2])
    assert not torch.equal(logits[1], model(images)[1])
    encoder.out_features = 16
    assert torch.equal(model(images, sensors), logits)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (torch.tensor([[10.0, 90.5]] * 3), r"latitude=90\.5.*-90\.\.90 degrees"),
        (torch.tensor([[10.0, -90.5]] * 3), r"latitude=90\.5"),
        (torch.tensor([[45.0, 120.0]] * 3), r"latitude=120\.0.*are longitude and latitude swapped\?"),
        (torch.tensor([[181.0, 10.0]] * 3), r"longitude=181\.0.*subtract 360"),
        (torch.tensor([[1000.0, 10.0]] * 3), r"longitude=1000\.0.*-180\.\.180"),
        (torch.tensor([[float("inf"), 10.0]] * 3), r"longitude=.*-180\.\.180"),
        (torch.zeros(3), r"metadata shape=\(3,\).*\(batch, 2\)"),
        (torch.zeros(3, 3), r"metadata shape=\(3, 3\)"),
        (torch.zeros(2, 2), r"metadata shape=\(2, 2\).*one row per image, 3"),
        (torch.tensor(1.0), r"metadata shape=\(\)"),
        (torch.zeros(3, 2, dtype=torch.int64), r"metadata dtype=torch\.int64.*floats"),
        (torch.zeros(3, 2, dtype=torch.bool), r"metadata dtype=torch\.bool"),
    ],
)
def test_wrong_coordinates_are_refused(metadata, message):
    with pytest.raises(MetadataError, match=message):
        COORDINATES.small().eval()(COORDINATES.images(), metadata)


def test_one_wrong_row_among_good_and_missing_ones_is_refused():
    with pytest.raises(MetadataError, match=r"latitude=95"):
        COORDINATES.small().eval()(COORDINATES.images(), torch.tensor([[0.0, 1.0], [float("nan"), 2.0], [3.0, 95.0]]))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (torch.tensor([0, 1, 323]), r"location id=323.*0 to 322.*-1 for an unknown location.*num_locations"),
        (torch.tensor([0.0, 1.0, 2.0]), r"metadata dtype=torch\.float32.*int64 location ids"),
        (torch.tensor([True, False, True]), r"metadata dtype=torch\.bool"),
        (torch.tensor([[0], [1], [2]]), r"metadata shape=\(3, 1\).*one location id per image"),
        (torch.tensor([0, 1]), r"metadata shape=\(2,\).*one row per image, 3"),
    ],
)
def test_wrong_location_ids_are_refused(metadata, message):
    with pytest.raises(MetadataError, match=message):
        IDS.small().eval()(IDS.images(), metadata)


@pytest.mark.parametrize("method", ["forward_features", "forward_intermediates"])
def test_features_check_metadata_too(method):
    with pytest.raises(MetadataError, match="latitude"):
        getattr(COORDINATES.small(), method)(COORDINATES.images(), metadata=torch.tensor([[0.0, 91.0]] * 3))


@pytest.mark.parametrize(
    ("encoder", "message"),
    [("zip_code", r"metadata_encoder='zip_code': choose one of"), (torch.nn.ReLU(), r"metadata_features=None: give")],
)
def test_an_unknown_encoder_and_one_of_unknown_width_are_refused(encoder, message):
    with pytest.raises(MetadataError, match=message):
        COORDINATES.small(metadata_encoder=encoder)


@torch.no_grad()
def test_the_bounds_themselves_are_places():
    model = COORDINATES.small().eval()
    corners = torch.tensor([[180.0, 90.0], [-180.0, -90.0], [0.0, 0.0]])
    assert model(COORDINATES.images(), corners).isfinite().all()


@torch.no_grad()
def test_ids_may_be_of_any_integer_type_and_every_negative_one_is_unknown():
    model, images = randomize(IDS.small()).eval(), IDS.images()
    ids = torch.tensor([3, -1, 7])
    assert torch.equal(model(images, ids.int()), model(images, ids))
    assert torch.equal(model(images, torch.tensor([3, -100, 7])), model(images, ids))


@torch.no_grad()
def test_an_empty_batch_is_an_empty_prediction(moge):
    model, (images, metadata) = moge.small().eval(), moge.inputs(3)
    assert model(images[:0], metadata[:0]).shape == (0, 10)
