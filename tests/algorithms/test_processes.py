"""A step in parts and on processes: equal to a whole step where its loss is a mean over images or domains."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.algorithms.networks import CLASSES, DOMAINS, HPARAMS, SmallMlp, build, minibatches, network
from tests.quick_python import run_ranks
from timm_moe_dg.algorithms import ALGORITHMS, ERM, Setup, StepContext
from timm_moe_dg.layers import LossWeights
from timm_moe_dg.losses import force_tokens, set_auxiliary_form

STEPS, SIZE, PARTS, LR = 8, 8, 4, 0.05
# Of the rare classes, many parts have no image
SHARES, WEIGHTS = torch.tensor([0.7, 0.2, 0.05, 0.05]), torch.tensor([0.4, 1.2, 5.0, 5.0], dtype=torch.float64)
TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": CLASSES}
QUIET = {"router_noise": 0.0, "expert_drop": 0.0, "num_experts": 3, "moe_layers": (1,)}
PLACES = {"metadata_drop": 0.0}


@dataclass(frozen=True)
class Case:
    """A method, a network, and its losses."""

    method: str = "ERM"
    model: str = "mlp"
    options: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)
    form: str = "vmoe"
    unknown: float = 0.4  # share of images without a place

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model in NETWORKS:
            return NETWORKS[self.model]().double().train()
        net = timm.create_model(self.model, **TINY, **self.options).double().train()
        if self.model.startswith("d3g"):
            net.set_domains([places(domain, 20, torch.Generator().manual_seed(domain)) for domain in range(DOMAINS)])
        set_auxiliary_form(net, self.form)
        force_tokens(net, 10**6 if self.weights.get("cka_coef") else 0)
        return net

    def minibatches(self, step: int) -> list[tuple[Tensor, ...]]:
        random, with_places = torch.Generator().manual_seed(step), not self.model.startswith(("mlp", "norm", "gmoe"))
        batches = []
        for domain in range(DOMAINS):
            images = torch.randn(SIZE, 3, 8, 8, generator=random, dtype=torch.float64) + 0.5 * domain
            targets = torch.multinomial(SHARES, SIZE, True, generator=random)
            lonlat = places(domain, SIZE, random)
            lonlat[torch.rand(SIZE, generator=random) < self.unknown] = torch.nan
            batches.append((images, targets, lonlat) if with_places else (images, targets))
        return batches


class Features(SmallMlp):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(192, 10)


class Normalized(Features):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def embed(self, images: Tensor) -> Tensor:
        return self.out(self.norm(self.hidden(images.flatten(1)))).tanh()


NETWORKS = {"mlp": Features, "norm": Normalized}


def places(domain: int, number: int, random: torch.Generator) -> Tensor:
    return 3 * torch.randn(number, 2, generator=random) + torch.tensor([50.0, 10.0]) * domain


gmoe = partial(Case, model="gmoe_tiny_patch16")
moge = partial(Case, model="moge_tiny", options=QUIET | PLACES)
SMOOTH, WEIGHTED = {"label_smoothing": 0.3}, {"class_weights": WEIGHTS}
# Whose losses are means over images, or over domains
EXACT = {
    **{name: Case(name) for name in ("ERM", "SD", "MIRO")},
    "label smoothing": Case(task=SMOOTH),
    "class weights": Case(task=WEIGHTED),
    "class weights and smoothing": Case(task=SMOOTH | WEIGHTED),
    **{f"router {name}": gmoe(options=QUIET | {"router": name}) for name in ("cosine", "linear", "random", "self")},
    "sigmoid scores": gmoe(options=QUIET | {"router_kwargs": {"scores": "sigmoid"}}),
    "bias": gmoe(options=QUIET | {"router_kwargs": {"bias_speed": 0.01}}),
    "shared expert": gmoe(options=QUIET | {"shared_expert": True}),
    "z-loss": gmoe(options=QUIET, weights={"z_coef": 0.01}),
    "balance within images": gmoe(options=QUIET, weights={"image_coef": 0.01}),
    "MoGE": moge(),
    "MoGE, z-loss": moge(weights={"z_coef": 0.01}, unknown=0.0),
    "ERM+LE": Case(model="erm_le_tiny_patch16", options=PLACES),
    **{
        f"D3G {query}": Case(model="d3g_tiny_patch16", options={"num_domains": DOMAINS, "relation_query": query})
        for query in ("domain", "wrap")
    },
}
# Whose statistics are also means over processes; of the two that draw random numbers, the processes draw the same here
ON_PROCESSES = EXACT | {name: Case(name) for name in ("VREx", "GroupDRO", "DANN", "CDANN", "Fish", "MLDG", "Mixup")}
ON_PROCESSES |= {f"{name}, class weights": Case(name, task=WEIGHTED) for name in ("Fish", "MLDG")}
COMPARING = {
    **{name: Case(name) for name in ("IRM", "CORAL", "MMD", "Fishr", "RDM")},
    "BatchNorm": Case(model="norm"),
    "expert choice": gmoe(options=QUIET | {"router_kwargs": {"choice": "expert"}}),
    "thresholds": gmoe(options=QUIET | {"router_kwargs": {"choice": "threshold"}}),
    "capacity": gmoe(options=QUIET | {"capacity_factor": 1.0}),
    "auxiliary loss": gmoe(options=QUIET, weights={"aux_coef": 0.01}),
    "auxiliary loss, tutel": gmoe(options=QUIET, weights={"aux_coef": 0.01}, form="tutel"),
    "balance within domains": gmoe(options=QUIET, weights={"domain_coef": 0.01}),
    "MoGE, auxiliary loss": moge(weights={"aux_coef": 0.01}),
    "MoGE, z-loss, unknown places": moge(weights={"z_coef": 0.01}),
    "MoGE, diversity": moge(weights={"cka_coef": 0.01}),
    "MoGE, invariance": moge(weights={"supcon_coef": 0.1}),
}


def mean(value: Tensor) -> Tensor:
    value = value.clone()
    distributed.all_reduce(value)
    return value / distributed.get_world_size()


def train(case: Case, parts: int = 1, rank: int | None = None) -> dict[str, Tensor]:
    """The state after steps of SGD, each in parts, or on two processes."""
    net = case.build()
    weights = LossWeights(**{"aux_coef": 0.0, "cka_coef": 0.0, "supcon_coef": 0.0, **case.weights})
    loss = partial(F.cross_entropy, weight=case.task.get("class_weights"), label_smoothing=case.task.get(*SMOOTH, 0.0))
    setup = Setup(
        net,
        DOMAINS,
        CLASSES,
        hparams={"lr": 1e-3, "weight_decay": 1e-3, **HPARAMS.get(case.method, {})},
        loss_weights=weights,
        task_loss=loss,
        class_weights=case.task.get("class_weights"),
    )
    torch.manual_seed(7)  # discriminators
    algorithm = ALGORITHMS[case.method](setup).double()
    groups = [{"params": list(net.parameters())}, *algorithm.parameter_groups(LR, 0.0)]
    context = StepContext(net, torch.optim.SGD(groups, lr=LR), grad_accum_steps=parts)
    if rank is not None:
        context = StepContext(DistributedDataParallel(net), context.optimizer, reduce=mean)
    for step in range(STEPS):
        torch.manual_seed(step)
        share = slice(rank, None, 1 if rank is None else 2)
        algorithm.take_step(context, [tuple(column[share] for column in batch) for batch in case.minibatches(step)])
    return net.state_dict() | own_state(algorithm)


def own_state(algorithm: nn.Module) -> dict[str, Tensor]:
    return {f"own.{name}": value for name, value in algorithm.state_dict().items() if isinstance(value, Tensor)}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of weights, relative to the largest weight of their tensor."""
    pairs = [(value, other[name]) for name, value in one.items() if value.is_floating_point()]
    return max(((a - b).abs().max() / a.abs().max().clamp(min=1e-9)).item() for a, b in pairs)


def table() -> Iterator[tuple[str, float]]:
    """Yields how far each case in parts is from the whole, for the page of the methods."""
    for name, case in (ON_PROCESSES | COMPARING).items():
        if ALGORITHMS[case.method].ACCUMULATES:
            yield name, difference(train(case), train(case, PARTS))


@pytest.mark.parametrize("name", EXACT)
def test_parts_of_a_step_are_the_whole(name):
    assert difference(train(EXACT[name]), train(EXACT[name], PARTS)) < 1e-9


def work(rank: int, folder: str) -> None:
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = {name: train(case, rank=rank) for name, case in (ON_PROCESSES | COMPARING).items()}
    for method in ALGORITHMS:
        net = network("mlp")
        algorithm, context = build(method, net)
        context = StepContext(DistributedDataParallel(net), context.optimizer, reduce=mean)
        for step in range(3):
            torch.manual_seed(100 * step + rank)  # each process draws for itself
            halves = [(x[rank::2], y[rank::2]) for x, y in minibatches("mlp", step, size=8)]
            algorithm.update(context, halves)
        results[f"{method}, random"] = net.state_dict() | own_state(algorithm)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory, fresh_python):
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(fresh_python, work, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ALGORITHMS)
def test_processes_stay_together(results, method):
    one, other = (result[f"{method}, random"] for result in results)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12, msg=f"{method}: {name}")


@pytest.mark.slow
def test_processes_are_the_whole_where_no_loss_compares_images(results):
    far = {name: difference(train(case), results[0][name]) for name, case in ON_PROCESSES.items()}
    assert {name for name, value in far.items() if not value < 1e-9} == set()
    comparing = {name for name, case in COMPARING.items() if difference(train(case), results[0][name]) > 1e-5}
    assert comparing == set(COMPARING)
    named = {name for name, method in ALGORITHMS.items() if method.COMPARES_IMAGES}
    assert named == {case.method for case in COMPARING.values()} - {ERM.__name__}
