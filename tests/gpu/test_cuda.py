"""What only a real GPU can show: `python -m pytest -m gpu -n 0`. Nobody has run it yet (docs/results/speed.md)."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch.nn import functional as F

import timm_moe_dg
from tests.models.cases import CASES
from timm_moe_dg.layers import expert_implementation_info, set_expert_implementation

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = "cuda:0"
WAYS = ("grouped", "loop")
SHORT = {"depth": 2, "moe_layers": [1]}
MODELS = [case for case in CASES if case.name not in ("gmoe_small_patch16", "gmoe_base_patch16")]  # one size of GMoE
GMOE = MODELS[0]
# Sums are in another order than on the CPU; half types have 8 and 11 bits
TOLERANCES = {None: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


def training_step(model, inputs, dtype, device):
    """Logits, loss and gradients of one step with all losses of the model."""
    target = torch.tensor([0, 1, 0], device=device)
    with torch.autocast(device.partition(":")[0], dtype) if dtype else nullcontext():
        logits = model(*inputs)
    losses = timm_moe_dg.losses.reported_losses(model, target).values()
    loss = F.cross_entropy(logits.float(), target) + 0.1 * sum(one.value for one in losses)
    loss.backward()
    return logits, loss, [parameter.grad for parameter in model.parameters()]


def difference(mine, theirs):
    """Largest difference, relative to the largest value."""
    ratios = [(a - b).abs().max() / b.abs().max().clamp(min=1e-6) for a, b in zip(mine, theirs, strict=True)]
    return torch.stack(ratios).max().item()  # unlike Python's max, keeps NaN


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def prepared(case, way="auto", device=CUDA):
    """A model, its twin on the CPU, and inputs for both."""
    torch.manual_seed(0)
    model = case.small(**{**SHORT, **case.without_chance})
    set_expert_implementation(model, way)
    inputs = case.inputs()
    return deepcopy(model).to(device), model, [column.to(device) for column in inputs], inputs


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("way", ["auto", *WAYS])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_training_step_equals_that_of_the_cpu(case, way, dtype):
    model, twin, inputs, same = prepared(case, way)
    mine = [value.cpu() for value in flat(training_step(model, inputs, dtype, CUDA))]
    assert difference(mine, flat(training_step(twin, same, None, "cpu"))) <= TOLERANCES[dtype]


def flat(step):
    logits, loss, gradients = step
    return [logits.detach().float(), loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def test_a_step_is_repeated_bit_for_bit(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        steps = []
        for _ in range(2):
            model, _, inputs, _ = prepared(GMOE)
            steps.append(flat(training_step(model, inputs, None, CUDA)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *steps))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_programs_compute_the_same(mode):
    model, twin, inputs, same = prepared(GMOE)
    mine = flat(training_step(torch.compile(model, mode=mode), inputs, None, CUDA))
    assert difference([value.cpu() for value in mine], flat(training_step(twin, same, None, "cpu"))) <= 1e-4


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs compute capability 9.0"
)
def test_the_grouped_way_waits_for_nothing_and_fits_into_a_cuda_graph():
    model, _, inputs, _ = prepared(GMOE)
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        expected = model(*inputs)  # also warms up
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = model(*inputs)
        graph.replay()
    assert set(expert_implementation_info(model).values()) == {"grouped"}
    assert torch.equal(replayed, expected)


def test_experts_need_no_more_memory_than_a_loop_over_them():
    peaks = {}
    for way in WAYS:
        model, _, inputs, _ = prepared(GMOE, way)
        torch.cuda.reset_peak_memory_stats()
        training_step(model, inputs, None, CUDA)
        peaks[way] = torch.cuda.max_memory_allocated()
    assert peaks["grouped"] <= 1.2 * peaks["loop"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_second_device_computes_what_the_first_does():
    results = []
    for device in ("cuda:0", "cuda:1"):
        model, _, inputs, _ = prepared(GMOE, device=device)
        results.append([value.cpu() for value in flat(training_step(model, inputs, None, device))])
    assert difference(*results) <= 1e-6
