"""Steps of every method against its published update rule, parts of a step, and the names of methods."""

import sys
from copy import deepcopy
from dataclasses import replace
from inspect import signature

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import timm_moe_dg
from tests.algorithms.networks import DOMAINS, NETWORKS, build, minibatches, network, train
from tests.references.domain_algorithms import REFERENCES
from timm_moe_dg import algorithms
from timm_moe_dg.algorithms import (
    ALGORITHMS,
    ERM,
    Algorithm,
    Setup,
    StepContext,
    get_algorithm,
    get_averaging,
    register_algorithm,
)
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import LossWeights
from timm_moe_dg.losses import set_auxiliary_form

BY_DOMAIN = ("GroupDRO", "Fishr", "DANN", "CDANN")  # keep something for each training domain
DRAWN = [[4, 1], [0, 1], [1, 3], [3, 4], [1, 4]]  # of five domains; 2 in no step, 1 in nearly all
UNEQUAL = [(x[:size], y[:size]) for (x, y), size in zip(minibatches("mlp", 0, size=9), (9, 4, 6), strict=True)]
FIVE = [minibatches("mlp", step, domains=5) for step in range(3)]
CASES = [
    *((method, name, [minibatches(name, step) for step in range(5)], {}) for method in ALGORITHMS for name in NETWORKS),
    # What is kept by domain follows the domains that a step draws
    *(
        (
            method,
            name,
            [[minibatches(name, step, domains=5)[d] for d in drawn] for step, drawn in enumerate(DRAWN)],
            {"drawn": DRAWN},
        )
        for method in BY_DOMAIN
        for name in NETWORKS
    ),
    ("MLDG", "mlp", FIVE, {"n_meta_test": 2}),  # three pairs, so that a test domain comes twice
    # The larger minibatch of a pair is cut to the smaller
    *((method, "mlp", [UNEQUAL], {}) for method in ("MLDG", "Mixup")),
]


@pytest.mark.parametrize(("method", "name", "steps", "options"), CASES)
def test_steps_end_where_the_published_rule_ends(method, name, steps, options):
    drawn, hparams = options.get("drawn"), {key: value for key, value in options.items() if key != "drawn"}
    net, twin = network(name), network(name)
    domains = {"domains": 5, "per_step": 2} if drawn else {"domains": len(steps[0])}
    algorithm, context = build(method, net, **domains, **hparams)
    further = {"drawn": drawn} if drawn else {}
    parameters = signature(REFERENCES[method]).parameters
    # The reference starts from the same discriminators, and their moments matter from the second step on
    further |= {"algorithm": deepcopy(algorithm)} if "algorithm" in parameters else {}
    further |= {"total": 5} if drawn and "total" in parameters else {}
    steps = steps if "algorithm" in parameters or drawn else steps[:3]
    for number, step in enumerate(steps):
        torch.manual_seed(number)
        losses = algorithm.update(replace(context, domains=drawn[number] if drawn else None), step)
    opponent = further["algorithm"].parameters() if "algorithm" in further else ()
    own = REFERENCES[method](twin, steps, algorithm.hparams, **further)
    columns = (net.named_parameters(), twin.parameters(), network(name).parameters())
    for (key, value), expected, first in zip(*columns, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")
        assert (value - first).abs().max() > 1e-5  # steps of Adam leave nothing where it was
    for value, expected in zip(algorithm.parameters(), own or opponent, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert {"loss", "task_loss", "aux_loss"} <= losses.keys()
    assert not any(value.requires_grad for value in losses.values())


@pytest.mark.parametrize("method", BY_DOMAIN)
def test_a_step_of_all_domains_is_bit_for_bit_what_it_is_without_a_list_of_them(method):
    ends = []
    for domains in (None, range(DOMAINS)):
        net = network("mlp")
        algorithm, context = build(method, net)
        train(algorithm, replace(context, domains=domains), "mlp", range(4))
        ends.append([*net.state_dict().values(), *algorithm.parameters(), *algorithm.buffers()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("form", ["vmoe", "tutel"])
def test_the_auxiliary_loss_is_added_once_in_the_form_that_is_asked_for(form):
    size = {"img_size": 32, "embed_dim": 48, "depth": 3, "num_heads": 3, "moe_layers": (0, 2)}
    net = timm.create_model("gmoe_tiny_patch16", num_classes=4, **size)
    set_auxiliary_form(net, form)
    batches = [(torch.randn(3, 3, 32, 32), torch.tensor([0, 1, domain])) for domain in (2, 3)]
    method = ERM(Setup(net, 2, 4, loss_weights=LossWeights(aux_coef=2.0)))
    context = StepContext(net, torch.optim.SGD(net.parameters(), lr=0.0))
    values = []
    for _ in range(2):
        torch.manual_seed(5)
        losses = method.update(context, batches)
        values.append(losses["aux_loss"].item())
        assert losses["aux_loss"].item() == pytest.approx(timm_moe_dg.auxiliary_loss(net).item())
        assert losses["loss"].item() == pytest.approx((losses["task_loss"] + 2.0 * losses["aux_loss"]).item())
    assert values[0] == values[1] > 0  # it does not grow over steps
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
    set_auxiliary_form(net, {"vmoe": "tutel", "tutel": "vmoe"}[form])
    assert abs(timm_moe_dg.auxiliary_loss(net).item() - values[0]) > 0.01 * values[0]


class Distance(Algorithm):
    """Pulls the parameter of a `Scalar` toward 3."""

    def objective(self, context, minibatches):
        return {"loss": (context.model.value - 3).square()}


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("backward", "values"),
    # 1 -> 1 - 0.1 * 2 * (1 - 3) = 1.4 -> 1.4 + 0.32 = 1.72; left-over gradients would give 2.12
    [(torch.Tensor.backward, [1.4, 1.72]), (lambda loss: (loss * 0.5).backward(), [1.2, 1.38])],
)
def test_update_is_one_gradient_step_by_the_callers_backward(backward, values):
    model = Scalar()
    method, optimizer = Distance(Setup(model, 1, 1)), torch.optim.SGD(model.parameters(), lr=0.1)
    for value in values:
        expected = (model.value.item() - 3) ** 2
        losses = method.update(StepContext(model, optimizer, backward=backward), [])
        assert (model.value.item(), losses["loss"].item()) == pytest.approx((value, expected))
        assert not losses["loss"].requires_grad


def test_the_loss_of_the_task_is_the_setups():
    def half(logits, targets):
        return F.cross_entropy(logits, targets) / 2

    net, batches = network("mlp"), minibatches("mlp", 0)
    whole, halved = (ERM(Setup(net, 3, 4, **task)) for task in ({}, {"task_loss": half}))
    first, second = (method.objective(StepContext(net, None), batches) for method in (whole, halved))
    assert second["loss"].item() == second["task_loss"].item() == pytest.approx(first["loss"].item() / 2)


def pair(size):
    return torch.arange(size), torch.arange(size)


def test_every_part_of_an_accumulated_step_has_every_domain():
    method = Distance(Setup(Scalar(), 2, 1))
    parts = method.chunk([pair(4), pair(2)], 2)
    assert [[images.tolist() for images, _ in part] for part in parts] == [[[0, 1], [0]], [[2, 3], [1]]]
    with pytest.raises(ArgumentError, match=r"^grad_accum_steps=3: "):
        method.chunk([pair(4)], 3)


def test_a_shared_statistic_is_the_mean_over_processes_with_the_local_gradient():
    local = torch.tensor([1.0, 2.0], requires_grad=True)
    context = StepContext(Scalar(), None, reduce=lambda value: (value + torch.tensor([3.0, 6.0])) / 2)
    shared = context.mean_keeping_gradient(local)
    assert shared.tolist() == [2.0, 4.0]
    shared.square().sum().backward()
    assert local.grad.tolist() == [4.0, 8.0]  # 2 * the mean, with which every process's own gradient is multiplied


# The names of methods

REGISTERS = """
from timm_moe_dg.algorithms import ERM, register_algorithm

@register_algorithm
class OwnMethod(ERM): pass
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A file that is imported by name, and the registry as it was afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(algorithms._algorithms)
    yield (tmp_path / "own_methods.py").write_text
    sys.modules.pop("own_methods", None)
    algorithms._algorithms.clear()
    algorithms._algorithms.update(before)


def test_a_module_is_imported_once_and_what_it_registers_is_found(module):
    assert all(get_algorithm(name) is method and method.__name__ == name for name, method in ALGORITHMS.items())
    module(REGISTERS)
    with pytest.raises(ArgumentError, match=r"^algorithm='OwnMethod': "):
        get_algorithm("OwnMethod")
    method = get_algorithm("own_methods:OwnMethod")
    assert method.__module__ == "own_methods"
    assert get_algorithm("own_methods:OwnMethod") is get_algorithm("OwnMethod") is method is ALGORITHMS["OwnMethod"]
    with pytest.raises(ArgumentError, match=r"^algorithm='own_methods:Other': "):
        get_algorithm("own_methods:Other")


def test_a_module_s_own_failing_imports_are_not_hidden(module):
    module("import no_such_dependency")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        get_algorithm("own_methods:A")


@pytest.mark.parametrize(
    ("look_up", "argument"),
    [
        (lambda: get_algorithm("erm"), "algorithm='erm'"),
        (lambda: get_algorithm("no_such.methods:A"), r"algorithm='no_such\.methods:A'"),
        (lambda: get_averaging("sma"), "averaging='sma'"),
        (lambda: register_algorithm(type("ERM", (ERM,), {})), "algorithm='ERM'"),  # a name is given once
        (lambda: register_algorithm(type("Scheduler", (), {})), "algorithm='Scheduler'"),
    ],
)
def test_other_names_are_refused(look_up, argument):
    with pytest.raises(ArgumentError, match=f"^{argument}: "):
        look_up()
    assert ALGORITHMS["ERM"] is ERM
    assert "Scheduler" not in ALGORITHMS


def test_every_method_has_a_reference():
    assert REFERENCES.keys() == ALGORITHMS.keys()
