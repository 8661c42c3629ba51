"""Hyper-parameters: the draw written out again, and what beats what."""

import hashlib

import numpy as np
import pytest

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.protocols import SEARCH_SPACES, draw_hparams, resolve_hparams

DEFAULTS = {"lr": 5e-5, "weight_decay": 0.0, "batch_size": 32}


def generator(hparams_seed, trial_seed, name):
    """Two rounds of hashing: the pair of seeds, then that number and the name."""

    def bits(text):
        return int(hashlib.md5(text.encode()).hexdigest(), 16) & (2**31 - 1)

    return np.random.RandomState(bits(f"({bits(f'({hparams_seed}, {trial_seed})')}, '{name}')"))


@pytest.mark.parametrize(("hparams_seed", "trial_seed"), [(1, 0), (7, 2)])
def test_draws_are_those_of_domainbed(hparams_seed, trial_seed):
    drawn = draw_hparams("photographs", hparams_seed=hparams_seed, trial_seed=trial_seed)
    uniform = {name: generator(hparams_seed, trial_seed, name).uniform for name in DEFAULTS}
    assert drawn == {
        "lr": 10 ** uniform["lr"](-5, -3.5),
        "weight_decay": 10 ** uniform["weight_decay"](-6, -2),
        "batch_size": int(2 ** uniform["batch_size"](3, 5.5)),
    }


@pytest.mark.parametrize("space", SEARCH_SPACES)
def test_draws_stay_in_range_and_differ(space):
    drawn = [draw_hparams(space, hparams_seed=seed, trial_seed=0) for seed in range(1, 40)]
    assert {hparams["batch_size"] for hparams in drawn} <= set(range(8, 46))
    assert len({hparams["lr"] for hparams in drawn}) == 39
    low, high = (1e-5, 10**-3.5) if space == "photographs" else (10**-4.5, 10**-2.5)
    assert all(low <= hparams["lr"] <= high for hparams in drawn)


def test_given_beats_drawn_beats_default():
    merged = resolve_hparams(DEFAULTS, {"lr": 1e-3, "weight_decay": 1e-4}, {"lr": 0.1})
    assert merged == {"lr": 0.1, "weight_decay": 1e-4, "batch_size": 32}


def test_unknown_name():
    with pytest.raises(ArgumentError, match=r"hparams=.*no such \['learning_rate'\]; choose from \['batch_size', 'lr'"):
        resolve_hparams(DEFAULTS, {}, {"learning_rate": 0.1, "lr": 0.2})


@pytest.mark.parametrize("given", [{"lr": "1e-3"}, {"batch_size": 8.5}, {"batch_size": 0}, {"lr": True}, {"lr": -1.0}])
def test_value_of_the_wrong_kind(given):
    with pytest.raises(ArgumentError, match=rf"\['{next(iter(given))}'\] must be"):
        resolve_hparams(DEFAULTS, {}, given)
