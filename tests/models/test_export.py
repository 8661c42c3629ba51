"""Traced, symbolically traced, exported, ONNX and compiled models agree with the eager one."""

import pytest
import torch
from timm.layers import create_feature_extractor

import timm_moe_dg
from tests.models.cases import BY_NAME, FAMILIES, MOGE, Case, mixture_layers, randomize
from timm_moe_dg.networks.export import load_onnx, record_program, save_onnx

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
TOLERANCE = 1e-4
SHORT = {"depth": 1, "moe_layers": [0]}
IDS = BY_NAME["moge_small_patch32_384"]


def prepared(case: Case, **options) -> torch.nn.Module:
    """A short model in which routing matters: every expert and code is different."""
    torch.manual_seed(0)
    model = randomize(case.small(**{**SHORT, **options})).eval()
    for layer in mixture_layers(model).values():
        for name, parameter in layer.router.named_parameters():
            if name in ("codes", "gate.weight"):
                torch.nn.init.normal_(parameter)
    return model


def batches(case: Case) -> list[tuple[torch.Tensor, ...]]:
    """The batch size that programs are recorded with (3), one image, and more images than that."""
    inputs = case.inputs(7)
    return [tuple(column[:size] for column in inputs) for size in (3, 1, 7)]


@torch.no_grad()
def assert_agrees(case: Case, model: torch.nn.Module, program, tolerance: float = TOLERANCE) -> None:
    for inputs in batches(case):
        torch.testing.assert_close(program(*inputs), model(*inputs), rtol=0, atol=tolerance)


# The three sizes of GMoE have one small variant, and the hybrid has the router of SF-MoE
@pytest.fixture(
    scope="module",
    params=[case for case in (*FAMILIES, IDS) if case.name != "sfmoe_small"],
    ids=lambda case: case.name,
)
def short(request):
    """A case and its short model."""
    return request.param, prepared(request.param)


# tests/tools/test_export.py has the programs of GMoE, and of MoGE with coordinates
@pytest.fixture(scope="module", params=["hybrid_sfmoe_r26_s16", IDS.name])
def recorded(request):
    """A case, its short model and its exported program with a dynamic batch."""
    case = BY_NAME[request.param]
    model = prepared(case)
    return case, model, record_program(model, case.inputs(3))


def test_exported_programs_and_onnx_with_a_dynamic_batch(recorded, tmp_path):
    case, model, program = recorded
    assert_agrees(case, model, program.module())
    save_onnx(program, tmp_path / "model.onnx")
    assert_agrees(case, model, load_onnx(tmp_path / "model.onnx"))


@torch.no_grad()
def test_symbolic_tracing_for_feature_extraction(short):
    # mixture layers and the metadata encoder are leaves in this graph
    case, model = short
    nodes = ["blocks.0", "head"]
    graph = create_feature_extractor(model, nodes)
    for inputs in batches(case):
        features = graph(*inputs)
        keywords = {"metadata": inputs[1]} if case.metadata else {}
        final, blocks = model.forward_intermediates(inputs[0], norm=False, output_fmt="NLC", **keywords)
        assert list(features) == nodes
        for node, expected in zip(nodes, [*blocks, model.forward_head(final)], strict=True):
            got = features[node][:, 1:] if node != "head" else features[node]
            torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", MOGE, ids=lambda case: case.name)
def test_the_image_alone_is_exported_without_the_metadata_path(case):
    model = prepared(case)
    program = record_program(model, (case.images(),)).module()
    for size in (3, 1, 5):
        torch.testing.assert_close(program(case.images(size)), model(case.images(size)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny"])
def test_compiled_without_graph_break_forward_and_backward(name):
    # aot_eager takes the same two graphs as inductor, without generating code
    case = BY_NAME[name]
    model = prepared(case, num_experts=3, top_k=2, **case.without_chance).train()
    torch._dynamo.reset()
    results = []
    for program in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        model.zero_grad()
        logits = program(*case.inputs(3))
        (logits.square().sum() + timm_moe_dg.auxiliary_loss(model)).backward()
        results.append(
            {"logits": logits.detach()} | {key: value.grad.clone() for key, value in model.named_parameters()}
        )
    torch.testing.assert_close(*results, rtol=1e-4, atol=TOLERANCE)
