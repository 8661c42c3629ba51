"""A rehearsal on a pretended GPU: everything computes what it does on the CPU, and waits only where it must."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import timm_moe_dg
from tests.algorithms.networks import build, network
from tests.algorithms.networks import minibatches as minibatches_of
from tests.gpu.device import MixedDevicesError, PretendedTensor, backward, pretended_cuda, to_host
from tests.layers.test_routing import KINDS
from tests.layers.test_routing import images as tokens_of_images
from tests.layers.test_routing import layer as choosing_layer
from tests.models.cases import CASES
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, get_averaging
from timm_moe_dg.finetuning.model import build_task_loss
from timm_moe_dg.layers import Coverage, GeoMoeMlp, LossWeights, expert_implementation_info, set_expert_implementation
from timm_moe_dg.losses import force_tokens, moge_losses, reported_losses
from timm_moe_dg.protocols.evaluation import predict

CUDA = "cuda:0"
WAYS = ("grouped", "loop")
TYPES = (None, torch.bfloat16, torch.float16)
SHORT = {"depth": 2, "moe_layers": [1]}
MODELS = [case for case in CASES if case.name not in ("gmoe_small_patch16", "gmoe_base_patch16")]  # one size of GMoE
# The half types meet every way of the experts in one model, and every model in one way
STEPS = [
    (case, way, dtype)
    for case, way, dtype in product(MODELS, WAYS, TYPES)
    if dtype is None or way == "grouped" or case is MODELS[0]
]
# What a GPU waits for in one forward with one mixture layer
COUNTS = "layers/assignments.py copy to the host"
WAITS = {"grouped": {COUNTS: 1}, "loop": {"layers/experts.py nonzero": 6}}


def training_step(model, inputs, dtype, device):
    """Logits, loss and gradients of one step with all losses of the model."""
    target = torch.tensor([0, 1, 0], device=device)
    with torch.autocast(device.partition(":")[0], dtype) if dtype else nullcontext():
        logits = model(*inputs)
    loss = F.cross_entropy(logits.float(), target) + 0.1 * timm_moe_dg.auxiliary_loss(model)
    loss = loss + sum(moge_losses(model, target).values())
    loss.backward()
    return logits, loss, [parameter.grad for parameter in model.parameters()]


def difference(mine, theirs):
    """Largest difference, relative to the largest value."""
    pairs = [(to_host(a), b) for a, b in zip(mine, theirs, strict=True) if a is not None or b is not None]
    ratios = [(a - b).abs().max() / b.abs().max().clamp(min=1e-6) for a, b in pairs if b.numel()]
    return torch.stack([ratio.detach().double() for ratio in ratios]).max().item()  # unlike Python's max, keeps NaN


@pytest.mark.parametrize(("case", "way", "dtype"), STEPS, ids=lambda value: getattr(value, "name", str(value)))
@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
def test_a_training_step_equals_that_of_the_cpu_and_waits_for_the_counts_alone(case, way, dtype):
    torch.manual_seed(0)
    model = case.small(**{**SHORT, **case.without_chance})
    set_expert_implementation(model, way)
    twin, inputs = deepcopy(model), case.inputs()
    expected = training_step(twin, inputs, dtype, "cpu")
    with pretended_cuda() as waits:
        model.to(CUDA)
        inputs = [column.to(CUDA) for column in inputs]
        waits.clear()
        results = training_step(model, inputs, dtype, CUDA)
    assert set(expert_implementation_info(model).values()) == {way}
    layers = len(expert_implementation_info(model))
    assert dict(waits) == {place: count * layers for place, count in WAITS[way].items()}
    # Attention is one fused operation on the CPU alone, and autocast has other lists of operations there
    tolerance = {None: 2e-5, torch.bfloat16: 0.2, torch.float16: 0.02}[dtype]
    assert difference(results[:2], expected[:2]) <= (1e-6 if dtype is None else tolerance)
    assert difference(results[2], expected[2]) <= tolerance


@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_method_trains_as_on_the_cpu_without_waiting(method):
    steps = range(4)
    net, twin = network("mixture"), network("mixture")
    algorithm, context = build(method, twin)
    for step in steps:
        torch.manual_seed(step)
        expected = algorithm.update(context, minibatches_of("mixture", step))
    with pretended_cuda() as waits:
        net.to(CUDA)
        algorithm, context = build(method, net)
        algorithm, context = algorithm.to(CUDA), replace(context, backward=backward)
        batches = [[tuple(x.to(CUDA) for x in batch) for batch in minibatches_of("mixture", step)] for step in steps]
        waits.clear()
        for step in steps:
            torch.manual_seed(step)
            losses = algorithm.update(context, batches[step])
    assert waits.pop(COUNTS) >= len(steps)  # of the mixture layer
    # MLDG draws on the device which domains are its test, so that all processes agree
    assert dict(waits) == ({"algorithms/meta.py tolist": len(steps)} if method == "MLDG" else {})
    assert losses.keys() == expected.keys()
    assert difference(losses.values(), expected.values()) <= 1e-6
    # Adam makes steps of any gradient, also of those of the keys' biases, which are 0 but for rounding
    names = [name for name, _ in net.named_parameters() if not name.endswith("qkv.bias")]
    assert difference(map(net.get_parameter, names), map(twin.get_parameter, names)) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_choices_of_experts_and_their_balance_do_not_wait(kind):
    layers = [deepcopy(moe) for moe in [choosing_layer(**KINDS[kind]).float()] * 2]
    weights = LossWeights(z_coef=1.0, image_coef=1.0, domain_coef=1.0)

    def steps(moe, x, target):
        results = []
        for _ in range(2):
            losses = [moe(x).square().sum(), *(loss.value for loss in reported_losses(moe, target, weights).values())]
            sum(losses).backward()
            timm_moe_dg.after_step(moe)
            results += losses
        buffers = [buffer for buffer in moe.buffers() if buffer is not None]
        return results + buffers, [parameter.grad for parameter in moe.parameters()]

    x, target = tokens_of_images().float(), torch.zeros(6, dtype=torch.long)
    expected = steps(layers[0], x, target)
    with pretended_cuda() as waits:
        moe, x, target = layers[1].to(CUDA), x.to(CUDA), target.to(CUDA)
        waits.clear()
        results = steps(moe, x, target)
    assert dict(waits) == {COUNTS: 2}  # in two forwards
    for mine, theirs in zip(results, expected, strict=True):
        assert difference(mine, theirs) <= 1e-5


def test_the_invariance_and_diversity_losses_do_not_wait():
    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == "moge_tiny")
    model = case.small(**{**SHORT, **case.without_chance})
    force_tokens(model, 4)
    with pretended_cuda() as waits:
        model.to(CUDA)
        inputs, target = [x.to(CUDA) for x in case.inputs()], torch.tensor([0, 1, 0]).to(CUDA)
        waits.clear()
        model(*inputs)
        losses = moge_losses(model, target)
    assert losses.keys() == {"cka_loss", "supcon_loss"}
    assert dict(waits) == {COUNTS: 1}


@pytest.mark.parametrize("name", AVERAGING)
def test_averages_move_on_the_device(name):
    net, twin = network("mixture"), network("mixture")
    hparams = {**get_averaging(name).HPARAMS, "sma_start_iter": 1, "swad_n_converge": 1}

    def run(model):
        average = get_averaging(name)(model, hparams)
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1)
            average.update(model, step)
            average.evaluated(step, 1.0)
        state = average.state_dict()
        again = get_averaging(name)(model, hparams)
        again.load_state_dict(state)
        return again.during() or again.final()

    expected = run(twin)
    with pretended_cuda() as waits:
        net.to(CUDA)
        waits.clear()
        average = run(net)
    assert not waits
    assert all(isinstance(parameter, PretendedTensor) for parameter in average.parameters())
    assert difference(average.parameters(), expected.parameters()) <= 1e-12


def test_an_evaluation_waits_once_for_each_column():
    net = network("mixture").float()
    batches = [(x.float(), y, torch.zeros(len(y)).long()) for x, y in minibatches_of("mixture", 0)]
    expected = predict(net, batches)
    with pretended_cuda() as waits:
        net.to(CUDA)
        batches = [tuple(column.to(CUDA) for column in batch) for batch in batches]
        waits.clear()
        predictions = predict(net, batches)
    assert dict(waits) == {"protocols/evaluation.py copy to the host": 5, COUNTS: len(batches)}
    assert not any(isinstance(column, PretendedTensor) for column in predictions)
    assert all(torch.allclose(mine, theirs, equal_nan=True) for mine, theirs in zip(predictions, expected, strict=True))


def test_class_weights_and_smoothed_labels_are_on_the_device():
    options = SimpleNamespace(class_weights="balanced", label_smoothing=0.1, num_classes=2)
    plan = SimpleNamespace(options=options, training_rows=lambda column: [np.array([0, 0, 1])])
    logits, target = torch.randn(3, 2), torch.tensor([0, 0, 1])
    expected = build_task_loss(plan, torch.device("cpu"))(logits, target)
    with pretended_cuda() as waits:
        loss = build_task_loss(plan, torch.device(CUDA))
        logits, target = logits.to(CUDA), target.to(CUDA)
        waits.clear()
        assert difference([loss(logits, target)], [expected]) <= 1e-6
    assert not waits


# Memory, compiled kernels, graphs and a second device need a real GPU
def test_the_tests_for_a_real_gpu_run_on_the_pretended_one(monkeypatch):
    from tests.gpu import test_cuda  # it imports this file

    with pretended_cuda():
        for way, dtype in product(("auto", *WAYS), TYPES):
            test_cuda.test_a_training_step_equals_that_of_the_cpu(MODELS[0], way, dtype)
        test_cuda.test_a_step_is_repeated_bit_for_bit(monkeypatch)


def test_coverage_is_decided_on_the_device():
    coverage = Coverage(2, radius=100.0).hold(torch.tensor([[0.0, 0.0], [10.0, 10.0]]))
    places = torch.tensor([[0.0, 0.1], [5.0, 5.0], [10.0, 10.5]])
    expected = coverage(places)
    with pretended_cuda() as waits:
        inside = coverage.to(CUDA)(places.to(CUDA))
    assert not waits
    assert to_host(inside).tolist() == expected.tolist() == [True, False, True]


def test_checkpoints_of_one_device_go_on_with_the_other():
    net = network("mixture")
    algorithm, context = build("VREx", net)
    algorithm.update(context, minibatches_of("mixture", 0))
    state = algorithm.state_dict()
    with pretended_cuda() as waits:
        net.to(CUDA)
        resumed, _ = build("VREx", net)
        resumed.to(CUDA).load_state_dict(state)
        assert isinstance(resumed.step, PretendedTensor)
        waits.clear()
        assert resumed.annealed
    assert not waits


class Mistake(nn.Module):
    """A layer with one deliberate mistake."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.ones(4)  # no buffer, so `.to` leaves it

    def buffer(self, x):
        return x + self.kept

    def arange(self, x):
        return x * torch.arange(x.shape[1])

    def new_tensor(self, x):
        return x @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])

    def mask(self, x):
        return x.masked_fill(torch.zeros(x.shape, dtype=torch.bool), 0)

    def numpy(self, x):
        return torch.from_numpy(x.detach().numpy())

    def indices(self, x):
        return x.index_select(0, torch.tensor([0, 1]))

    def back_and_forth(self, x):
        return x.cpu().to(x.device)

    def selection(self, x):
        return x[x > 0]

    def scalar(self, x):
        return x * x.max().item()

    def condition(self, x):
        return x if x.any() else -x

    def counting(self, x):
        return torch.bincount((x > 0).long().flatten())

    def listing(self, x):
        return x[: len(x.tolist())]


@pytest.mark.parametrize("mistake", ["buffer", "arange", "new_tensor", "mask", "numpy", "indices"])
def test_a_tensor_on_the_wrong_device_is_noticed(mistake):
    layer = Mistake()
    with pretended_cuda(), pytest.raises((MixedDevicesError, RuntimeError), match=r"cuda|numpy"):
        getattr(layer.to(CUDA), mistake)(torch.ones(3, 4).to(CUDA))


@pytest.mark.parametrize("mistake", ["back_and_forth", "selection", "scalar", "condition", "counting", "listing"])
def test_a_wait_is_noticed(mistake):
    with pretended_cuda() as waits:
        getattr(Mistake().to(CUDA), mistake)(torch.ones(3, 4).to(CUDA))
    assert sum(waits.values()) == 1


def test_images_without_metadata_and_without_a_shared_expert_are_refused_without_a_wait():
    layer = GeoMoeMlp(8, 16, context_features=4, num_experts=2, top_k=1, shared_expert=False)
    with pretended_cuda() as waits:
        layer.to(CUDA)
        inputs = [x.to(CUDA) for x in (torch.randn(2, 3, 8), torch.randn(2, 4), torch.tensor([True, False]))]
        waits.clear()
        with pytest.raises(RuntimeError, match="images without metadata"):
            layer(*inputs)
    assert not waits


@pytest.mark.parametrize(
    ("capability", "dtype", "waiting"), [((9, 0), torch.bfloat16, 0), ((9, 0), None, 1), ((8, 6), torch.bfloat16, 1)]
)
def test_nothing_waits_where_a_gpu_has_a_kernel_for_all_experts(capability, dtype, waiting):
    model = CASES[0].small(**SHORT)
    with pretended_cuda(capability) as waits:
        model.to(CUDA)
        images, target = CASES[0].images().to(CUDA), torch.tensor([0, 1, 0]).to(CUDA)
        waits.clear()
        with torch.autocast("cuda", dtype) if dtype else nullcontext():
            loss = F.cross_entropy(model(images).float(), target)
        loss.backward()
    assert dict(waits) == ({COUNTS: waiting} if waiting else {})
    assert set(expert_implementation_info(model).values()) == {"grouped"}
