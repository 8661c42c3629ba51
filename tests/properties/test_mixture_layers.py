"""The mixture layers as wholes: layouts, capacity, missing metadata, and what may not reach another image."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.mixtures import SEEDS, random_parameters
from tests.references.naive_moe import naive_drops, naive_top_k
from tests.references.weighted_experts import weighted_experts
from timm_moe_dg.layers import GeoMoeMlp, MoeMlp

FEATURES, CONTEXT = 4, 3
# A logit that differs by a rounding unit moves a weight by as much; float64, after some hundred operations
EXACT = {"rtol": 1e-8, "atol": 1e-8}


@st.composite
def token_layers(draw, **changes):
    """A MoeMlp with parameters drawn, in evaluation, and a seed for its input."""
    num_experts = draw(st.integers(1, 5))
    options = {
        "num_experts": num_experts,
        "top_k": draw(st.integers(1, num_experts)),
        "router": draw(st.sampled_from(["cosine", "linear"])),
        "gated": draw(st.booleans()),
        "bias": draw(st.tuples(st.booleans(), st.booleans())),
        "router_noise": 0.0,
    }
    layer = MoeMlp(FEATURES, 5, dtype=torch.float64, **(options | changes))
    seed = draw(SEEDS)
    random_parameters(layer, seed)
    return layer.eval(), seed


@st.composite
def geo_layers(draw):
    """A GeoMoeMlp likewise."""
    num_experts, shared = draw(st.integers(1, 5)), draw(st.booleans())
    top_k = draw(st.integers(1, num_experts))
    sizes = {"num_experts": num_experts, "top_k": top_k, "context_features": CONTEXT, "shared_expert": shared}
    layer = GeoMoeMlp(FEATURES, 5, router_noise=0.0, dtype=torch.float64, **sizes)
    seed = draw(SEEDS)
    random_parameters(layer, seed)
    return layer.eval(), seed


def normal(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def routed(layer, tokens, drops=None):
    """The layer's equation for (T, D) tokens: softmax over the logits, the K best, their sum set to 1 if K > 1."""
    probabilities = layer.router.compute_logits(tokens).softmax(-1)
    top_k = layer.router.top_k
    best = torch.tensor([naive_top_k(row, top_k) for row in probabilities.tolist()], dtype=torch.int64).view(-1, top_k)
    weights = probabilities.gather(1, best)
    weights = weights / weights.sum(1, keepdim=True) if top_k > 1 else weights
    if drops is not None:
        best = best.masked_fill(drops(best, probabilities.amax(1)), layer.experts.num_experts)
    gate = "first" if layer.experts.fc1.weight.shape[1] > layer.experts.fc2.weight.shape[2] else None
    return weighted_experts(layer.experts, "gelu", gate, tokens, best, weights)


@given(token_layers(), st.lists(st.integers(0, 3), max_size=3))
def test_every_layout_of_tokens_gives_the_equation(drawn, leading):
    layer, seed = drawn
    x = normal(seed, *leading, FEATURES)
    expected = routed(layer, x.reshape(-1, FEATURES)).view(x.shape)
    torch.testing.assert_close(layer(x), expected, **EXACT)
    if len(leading) == 3:
        layer.channels_first = True
        first = x.permute(0, 3, 1, 2)
        for given_as in (first, first.contiguous(), first.contiguous(memory_format=torch.channels_last)):
            torch.testing.assert_close(layer(given_as), expected.permute(0, 3, 1, 2), **EXACT)


@given(token_layers(capacity_factor=0.75), st.integers(0, 12))
def test_over_capacity_is_dropped_in_training_and_never_in_evaluation(drawn, tokens):
    layer, seed = drawn
    x, router = normal(seed, tokens, FEATURES), layer.router
    capacity = router.top_k * int(0.75 * -(-tokens // router.num_experts))

    def drops(best, priority):
        table = naive_drops(best.tolist(), priority.tolist(), capacity) if tokens else []
        return torch.tensor(table, dtype=torch.bool).view(best.shape)

    torch.testing.assert_close(layer(x), routed(layer, x), **EXACT)
    torch.testing.assert_close(layer.train()(x), routed(layer, x, drops), **EXACT)


@given(token_layers(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_an_image_that_is_not_finite_leaves_the_others_as_they_are(drawn, images, length, data):
    layer, seed = drawn
    x = normal(seed, images, length, FEATURES)
    spoiled = data.draw(st.integers(0, images - 1))
    others = [image for image in range(images) if image != spoiled]
    expected = layer(x)[others]
    broken = x.clone()
    broken[spoiled] = data.draw(st.sampled_from([float("nan"), float("inf")]))
    broken.requires_grad_()
    output = layer(broken)
    torch.testing.assert_close(output[others], expected, **EXACT)
    assert not output[spoiled].isfinite().any()  # nor is it hidden
    (gradient,) = torch.autograd.grad(output[others].sum(), broken)
    assert gradient[others].isfinite().all()


@given(token_layers(), st.integers(0, 8), SEEDS)
def test_permuted_tokens_give_permuted_outputs(drawn, tokens, order_seed):
    layer, seed = drawn
    x = normal(seed, tokens, FEATURES)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(order_seed))
    torch.testing.assert_close(layer(x[order]), layer(x)[order], **EXACT)


@given(st.one_of(token_layers(), geo_layers()), SEEDS)
def test_renamed_experts_give_the_same_output(drawn, order_seed):
    layer, seed = drawn
    order = torch.randperm(layer.experts.num_experts, generator=torch.Generator().manual_seed(order_seed))
    renamed = copy.deepcopy(layer)
    columns = renamed.router.gate.weight if hasattr(renamed.router, "gate") else renamed.router.codes
    for parameter in (*renamed.experts.parameters(), columns):
        parameter.data = parameter.data[order]
    asked = (normal(seed, 3, 2, FEATURES), normal(seed + 1, 3, CONTEXT), torch.ones(3, dtype=torch.bool))
    asked = asked if isinstance(layer, GeoMoeMlp) else asked[:1]
    torch.testing.assert_close(renamed(*asked), layer(*asked), **EXACT)


def mixed(layer, x, context, present):
    """MoGE, equation 1, image by image: g f_0 + (1 - g) sum of alpha f, alpha the softmax over the K best cosines."""
    outputs = []
    for image, embedding, has_metadata in zip(x, context, present.tolist(), strict=True):
        gate = 0.0 if layer.gamma is None else layer.gamma.sigmoid().item() if has_metadata else 1.0
        output = torch.zeros_like(image) if layer.shared is None else gate * layer.shared(image)
        if has_metadata:
            codes = layer.router.codes / layer.router.codes.norm(dim=1, keepdim=True)
            logits = (codes @ embedding / embedding.norm()) * layer.router.logit_scale.exp().clamp(max=100)
            best = torch.tensor([naive_top_k(logits.tolist(), layer.router.top_k)])
            weights = logits[best].softmax(1)
            output = output + (1 - gate) * weighted_experts(layer.experts, "gelu", None, image[None], best, weights)[0]
        outputs.append(output)
    return torch.stack(outputs) if outputs else x


@st.composite
def located_images(draw, layer, seed):
    """Tokens, embeddings of their metadata, and which images have some; all have, without a shared expert."""
    images, length = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    present = [layer.shared is None or draw(st.booleans()) for _ in range(images)]
    tokens, context = normal(seed, images, length, FEATURES), normal(seed + 1, images, CONTEXT)
    return tokens, context, torch.tensor(present, dtype=torch.bool)


@given(geo_layers(), st.data())
def test_routing_by_metadata_gives_the_equation(drawn, data):
    layer, seed = drawn
    asked = data.draw(located_images(layer, seed))
    torch.testing.assert_close(layer(*asked), mixed(layer, *asked), **EXACT)
    if layer.shared is not None:
        layer.set_expert_mode("shared")
        torch.testing.assert_close(layer(*asked), layer.shared(asked[0]), **EXACT)
    forced = data.draw(st.integers(0, layer.experts.num_experts - 1))
    layer.set_expert_mode(forced)
    gate = torch.zeros(1).double() if layer.gamma is None else layer.gamma.sigmoid()
    alone = weighted_experts(layer.experts, "gelu", None, asked[0].flatten(0, 1), *only(forced, asked[0]))
    shared = 0.0 if layer.shared is None else layer.shared(asked[0])
    torch.testing.assert_close(layer(*asked), gate * shared + (1 - gate) * alone.view(asked[0].shape), **EXACT)


def only(expert, x):
    """A routing table that sends every token to one expert."""
    tokens = x.shape[0] * x.shape[1]
    return torch.full((tokens, 1), expert), torch.ones(tokens, 1)


@given(geo_layers(), st.data())
def test_metadata_that_are_not_finite_stay_with_their_image(drawn, data):
    layer, seed = drawn
    tokens, context, present = data.draw(located_images(layer, seed))
    expected = layer(tokens, context, present)
    spoiled = data.draw(st.integers(0, max(len(tokens) - 1, 0)))
    others = [image for image in range(len(tokens)) if image != spoiled]
    tokens, context = tokens.clone(), context.clone()
    context[spoiled : spoiled + 1] = float("nan")
    output = layer(tokens, context, present)
    torch.testing.assert_close(output[others], expected[others], **EXACT)
    if spoiled < len(tokens) and not present[spoiled]:  # what it has no metadata for does not matter
        torch.testing.assert_close(output[spoiled], expected[spoiled], **EXACT)
    tokens[spoiled : spoiled + 1] = float("nan")
    torch.testing.assert_close(layer(tokens, context, present)[others], expected[others], **EXACT)
