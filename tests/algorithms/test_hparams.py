"""Hyper-parameters: the draw written out again, what beats what, and those of methods and averages."""

import hashlib
import json
import logging

import numpy as np
import pytest

from tests.algorithms.networks import CLASSES, network
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, Setup, get_algorithm
from timm_moe_dg.algorithms.hparams import (
    SEARCH_SPACES,
    draw_hparams,
    loss_coefficients,
    resolve_hparams,
    warn_late,
)
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError

DEFAULTS = {"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32, "irm_penalty_anneal_iters": 500}


def generator(hparams_seed, trial_seed, name):
    """Two rounds of hashing: the pair of seeds, then that number and the name."""

    def bits(text):
        return int(hashlib.md5(text.encode()).hexdigest(), 16) & (2**31 - 1)

    return np.random.RandomState(bits(f"({bits(f'({hparams_seed}, {trial_seed})')}, '{name}')"))


ARM = {"batch_size": lambda random: 8}  # a method that fixes the batch size


@pytest.mark.parametrize(("hparams_seed", "trial_seed"), [(1, 0), (7, 2), (19, 1)])
@pytest.mark.parametrize("further", [{}, ARM, get_algorithm("MLDG").SEARCH], ids=["ERM", "ARM", "MLDG"])
@pytest.mark.parametrize(("dataset", "widest"), [("PACS", 5.5), ("DomainNet", 5)])
def test_draws_are_those_of_domainbed(dataset, widest, further, hparams_seed, trial_seed):
    def stream(name):
        return generator(hparams_seed, trial_seed, name)

    expected = {
        "lr": 10 ** stream("lr").uniform(-5, -3.5),
        "weight_decay": 10 ** stream("weight_decay").uniform(-6, -2),
        "batch_size": 8 if further is ARM else int(2 ** stream("batch_size").uniform(3, widest)),
        "resnet_dropout": [0.0, 0.1, 0.5][stream("resnet_dropout").randint(0, 3)],
    }
    if "mldg_beta" in further:
        expected["mldg_beta"] = 10 ** stream("mldg_beta").uniform(-1, 1)
        expected["n_meta_test"] = [1, 2][stream("n_meta_test").randint(0, 2)]
    seeds = {"hparams_seed": hparams_seed, "trial_seed": trial_seed}
    drawn = draw_hparams(get_benchmark(dataset).search_space, **seeds, further=further)
    assert drawn == expected
    assert json.loads(json.dumps(drawn)) == drawn


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_an_adversary_has_the_names_and_ranges_of_domainbed(name):
    method, seeds = get_algorithm(name), {"hparams_seed": 7, "trial_seed": 2}
    drawn = draw_hparams("photographs", **seeds, further=method.SEARCH, aliases=method.SEARCH_ALIASES)
    assert drawn["lr"] == 10 ** generator(7, 2, "lr_g").uniform(-5, -3.5)
    assert drawn["weight_decay"] == 10 ** generator(7, 2, "weight_decay_g").uniform(-6, -2)
    assert drawn["lr_d"] == 10 ** generator(7, 2, "lr_d").uniform(-5, -3.5)
    digits = draw_hparams("digits", **seeds, further=method.SEARCH)
    assert digits["lr_d"] == 10 ** generator(7, 2, "lr_d").uniform(-4.5, -2.5)


RANGES = {  # of the learning rate, and the largest batch size
    "photographs": (1e-5, 10**-3.5, 46),
    "domain_net": (1e-5, 10**-3.5, 32),
    "digits": (10**-4.5, 10**-2.5, 46),
    "small_images": (10**-4.5, 10**-2.5, 512),
}


@pytest.mark.parametrize("space", SEARCH_SPACES)
def test_draws_stay_in_range_and_differ(space):
    drawn = [draw_hparams(space, hparams_seed=seed, trial_seed=0) for seed in range(1, 60)]
    low, high, batch = RANGES[space]
    batches = {hparams["batch_size"] for hparams in drawn}
    assert batches <= set(range(8, batch))
    assert max(batches) > 0.8 * batch
    assert len({hparams["lr"] for hparams in drawn}) == 59
    assert all(low <= hparams["lr"] <= high for hparams in drawn)
    assert {hparams["resnet_dropout"] for hparams in drawn} == {0.0, 0.1, 0.5}


def test_the_losses_of_mixtures_are_drawn_around_their_defaults():
    """MoGE's search, with ranges of ours; each from a generator of its own, as DomainBed's."""
    defaults = loss_coefficients(0, 1)
    assert defaults == {"aux_coef": 0.01, "cka_coef": 0.01, "supcon_coef": 0.1, "supcon_temperature": 0.1}
    drawn = [loss_coefficients(seed, 2) for seed in range(1, 200)]
    assert drawn[6]["supcon_coef"] == 10 ** generator(7, 2, "supcon_coef").uniform(-2, 0)
    for name, default in defaults.items():
        values = sorted(coefficients[name] for coefficients in drawn)
        width = 10**0.5 if name == "supcon_temperature" else 10
        assert default / width <= values[0] < default / width * 1.2
        assert default * width / 1.2 < values[-1] <= default * width
        assert len(set(values)) == 199


def test_given_beats_drawn_beats_default():
    merged = resolve_hparams(DEFAULTS, {"lr": 1e-3, "weight_decay": 1e-4}, {"lr": 0.1, "irm_penalty_anneal_iters": 0})
    assert merged == {"lr": 0.1, "weight_decay": 1e-4, "batch_size": 32, "irm_penalty_anneal_iters": 0}


WRONG = [{"learning_rate": 0.1}, {"lr": "1e-3"}, {"batch_size": 8.5}, {"batch_size": 0}, {"lr": True}, {"lr": -1.0}]
WRONG += [{"lr": float("inf")}, {"irm_penalty_anneal_iters": -1}]


@pytest.mark.parametrize("given", WRONG)
def test_wrong_names_and_values_are_refused(given):
    with pytest.raises(ArgumentError, match=rf"^hparams=.*\['{next(iter(given))}'\]"):
        resolve_hparams(DEFAULTS, {}, given)


def test_a_penalty_that_begins_after_the_last_step_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        warn_late({"irm_penalty_anneal_iters": 500, "sma_start_iter": 499, "lr": 1000}, steps=500)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["irm_penalty_anneal_iters=500"]


@pytest.mark.parametrize("method", ALGORITHMS.values())
def test_hyper_parameters_of_a_method_reach_it_and_are_drawn_as_numbers_of_their_kind(method):
    defaults = {**get_benchmark("rotated_digits").hparams, **method.HPARAMS}
    assert len(defaults) == len(get_benchmark("rotated_digits").hparams) + len(method.HPARAMS)  # none hides another
    assert not any(method.HPARAMS.keys() & average.HPARAMS.keys() for average in AVERAGING.values())
    given = {name: 2 if isinstance(default, int) else 0.25 for name, default in method.HPARAMS.items()}
    algorithm = method(Setup(network("mlp"), 3, CLASSES, hparams=resolve_hparams(defaults, {}, given)))
    assert given.items() <= algorithm.hparams.items()
    assert method.SEARCH.keys() <= method.HPARAMS.keys()
    for name, entry in method.SEARCH.items():
        draw = SEARCH_SPACES["photographs"][entry] if isinstance(entry, str) else entry
        values = [draw(np.random.RandomState(seed)) for seed in range(20)]
        assert {type(value) for value in values} == {type(method.HPARAMS[name])}, name
        assert json.loads(json.dumps(values)) == values
        assert len(set(values)) > 1


OUT_OF_RANGE = [("Fishr", "ema", 1.0), ("DANN", "beta1", 1.0), ("DANN", "beta1", -0.1), ("CDANN", "mlp_dropout", 2.0)]
OUT_OF_RANGE += [("Mixup", "mixup_alpha", 0.0), ("ema", "ema_decay", 1.0)]


@pytest.mark.parametrize(("method", "name", "value"), OUT_OF_RANGE)
def test_a_hyper_parameter_outside_its_range_is_refused(method, name, value):
    net, given = network("mlp"), {name: value}
    with pytest.raises(ArgumentError, match=rf"^hparams={{'{name}': {value}}}"):
        AVERAGING[method](net, given) if method in AVERAGING else ALGORITHMS[method](
            Setup(net, 3, CLASSES, hparams=given)
        )
