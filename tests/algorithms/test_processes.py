"""Two processes with half of every minibatch each: equal to one another, and to one process where nothing is local."""

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.algorithms.networks import build, minibatches, network
from tests.quick_python import run_ranks
from timm_moe_dg.algorithms import ALGORITHMS, StepContext

pytestmark = pytest.mark.slow

# Whose statistics are means over images, or means over processes of such
EXACT = {"ERM", "VREx", "GroupDRO", "SD", "MIRO", "Fish", "DANN"}
STEPS = 3


def mean(value):
    value = value.clone()
    distributed.all_reduce(value)
    return value / distributed.get_world_size()


def work(rank, folder):
    store = distributed.FileStore(f"{folder}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    results = {}
    for method in ALGORITHMS:
        net = network("mlp")
        algorithm, context = build(method, net)
        context = StepContext(DistributedDataParallel(net), context.optimizer, reduce=mean)
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)  # each process draws for itself
            halves = [(x[rank::2], y[rank::2]) for x, y in minibatches("mlp", step, size=8)]
            algorithm.update(context, halves)
        results[method] = {**net.state_dict(), **{f"own.{k}": v for k, v in own_state(algorithm).items()}}
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def own_state(algorithm):
    return {name: value for name, value in algorithm.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.fixture(scope="module")
def results(tmp_path_factory, fresh_python):
    folder = tmp_path_factory.mktemp("processes")
    run_ranks(fresh_python, work, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("method", ALGORITHMS)
def test_processes_stay_together(results, method):
    one, other = (result[method] for result in results)
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-12, msg=f"{method}: {name}")


@pytest.mark.parametrize("method", sorted(EXACT))
def test_two_halves_are_the_whole(results, method):
    net = network("mlp")
    algorithm, context = build(method, net)
    for step in range(STEPS):
        algorithm.update(context, minibatches("mlp", step, size=8))
    for name, value in {**net.state_dict(), **{f"own.{k}": v for k, v in own_state(algorithm).items()}}.items():
        torch.testing.assert_close(results[0][method][name], value, rtol=0, atol=1e-8, msg=f"{method}: {name}")
