"""Hyper-parameters: the draw written out again, and what beats what."""

import hashlib
import json

import numpy as np
import pytest

from timm_moe_dg.algorithms import get_algorithm
from timm_moe_dg.algorithms.hparams import SEARCH_SPACES, draw_hparams, loss_coefficients, resolve_hparams
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError

DEFAULTS = {"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32}


def generator(hparams_seed, trial_seed, name):
    """Two rounds of hashing: the pair of seeds, then that number and the name."""

    def bits(text):
        return int(hashlib.md5(text.encode()).hexdigest(), 16) & (2**31 - 1)

    return np.random.RandomState(bits(f"({bits(f'({hparams_seed}, {trial_seed})')}, '{name}')"))


def expected_draws(dataset, algorithm, hparams_seed, trial_seed):
    """DomainBed's ranges, for a few data sets and algorithms, written out by hyper-parameter."""

    def stream(name):
        return generator(hparams_seed, trial_seed, name)

    widest = 5 if dataset == "DomainNet" else 5.5
    draws = {
        "lr": 10 ** stream("lr").uniform(-5, -3.5),
        "weight_decay": 10 ** stream("weight_decay").uniform(-6, -2),
        "batch_size": 8 if algorithm == "ARM" else int(2 ** stream("batch_size").uniform(3, widest)),
        "resnet_dropout": [0.0, 0.1, 0.5][stream("resnet_dropout").randint(0, 3)],
    }
    if algorithm == "MLDG":
        draws["mldg_beta"] = 10 ** stream("mldg_beta").uniform(-1, 1)
        draws["n_meta_test"] = [1, 2][stream("n_meta_test").randint(0, 2)]
    return draws


FURTHER = {
    "ERM": {},
    "ARM": {"batch_size": lambda random: 8},
    "MLDG": {
        "mldg_beta": lambda random: 10 ** random.uniform(-1, 1),
        "n_meta_test": lambda random: random.choice([1, 2]),
    },
}


@pytest.mark.parametrize(("hparams_seed", "trial_seed"), [(1, 0), (7, 2), (19, 1)])
@pytest.mark.parametrize("algorithm", FURTHER)
@pytest.mark.parametrize("dataset", ["PACS", "DomainNet"])
def test_draws_are_those_of_domainbed(dataset, algorithm, hparams_seed, trial_seed):
    seeds = {"hparams_seed": hparams_seed, "trial_seed": trial_seed}
    drawn = draw_hparams(get_benchmark(dataset).search_space, **seeds, further=FURTHER[algorithm])
    assert drawn == expected_draws(dataset, algorithm, hparams_seed, trial_seed)


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
def test_the_generator_s_rates_are_drawn_under_its_own_names(name):
    method = get_algorithm(name)
    drawn = draw_hparams(
        "photographs", hparams_seed=7, trial_seed=2, further=method.SEARCH, aliases=method.SEARCH_ALIASES
    )
    assert drawn["lr"] == 10 ** generator(7, 2, "lr_g").uniform(-5, -3.5)
    assert drawn["weight_decay"] == 10 ** generator(7, 2, "weight_decay_g").uniform(-6, -2)
    assert drawn["lr_d"] == 10 ** generator(7, 2, "lr_d").uniform(-5, -3.5)


@pytest.mark.parametrize("name", ["DANN", "CDANN"])
@pytest.mark.parametrize(("space", "low", "high"), [("photographs", -5, -3.5), ("digits", -4.5, -2.5)])
def test_the_discriminator_s_rate_is_drawn_from_the_data_set_s_range_under_its_own_name(name, space, low, high):
    for seed in (1, 5):
        drawn = draw_hparams(space, hparams_seed=seed, trial_seed=1, further=get_algorithm(name).SEARCH)
        assert drawn["lr_d"] == 10 ** generator(seed, 1, "lr_d").uniform(low, high)
        assert drawn["lr"] != drawn["lr_d"]


def test_draws_are_plain_numbers():
    drawn = draw_hparams("photographs", hparams_seed=3, trial_seed=0, further=FURTHER["MLDG"])
    assert json.loads(json.dumps(drawn)) == drawn


RANGES = {
    "photographs": (1e-5, 10**-3.5, 46),
    "domain_net": (1e-5, 10**-3.5, 33),
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
    merged = resolve_hparams(DEFAULTS, {"lr": 1e-3, "weight_decay": 1e-4}, {"lr": 0.1})
    assert merged == {"lr": 0.1, "weight_decay": 1e-4, "batch_size": 32}


def test_unknown_name():
    with pytest.raises(ArgumentError, match=r"hparams=.*no such \['learning_rate'\]; choose from \['batch_size', 'lr'"):
        resolve_hparams(DEFAULTS, {}, {"learning_rate": 0.1, "lr": 0.2})


@pytest.mark.parametrize(
    "given",
    [{"lr": "1e-3"}, {"batch_size": 8.5}, {"batch_size": 0}, {"lr": True}, {"lr": -1.0}, {"lr": float("inf")}],
)
def test_value_of_the_wrong_kind(given):
    with pytest.raises(ArgumentError, match=rf"\['{next(iter(given))}'\] must be"):
        resolve_hparams(DEFAULTS, {}, given)


def test_a_position_among_the_steps_may_be_the_first():
    defaults = {**DEFAULTS, "irm_penalty_anneal_iters": 500, "sma_start_iter": 100}
    given = {"irm_penalty_anneal_iters": 0, "sma_start_iter": 0}
    assert resolve_hparams(defaults, {}, given) == {**defaults, **given}
