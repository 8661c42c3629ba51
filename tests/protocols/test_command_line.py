"""The names that the command line knows without torch are those of the rooms where they stand for something."""

import pytest

from timm_moe_dg.algorithms import AVERAGING, registry
from timm_moe_dg.finetuning.processes.launch import PRECISIONS
from timm_moe_dg.losses.router import FORMS
from timm_moe_dg.networks.freeze import FREEZABLE
from timm_moe_dg.protocols.command_line import NAMES, run_parser

ROOMS = {
    "algorithm": [method.__name__ for method in registry._METHODS],
    "averaging": AVERAGING,
    "freeze": FREEZABLE,
    "aux_form": FORMS,
    "amp_dtype": PRECISIONS,
}


@pytest.mark.parametrize("name", ROOMS)
def test_names_are_those_of_their_rooms(name):
    assert NAMES[name] == tuple(ROOMS[name])


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_them(name):
    shown = " ".join(run_parser().format_help().split())
    assert all(one in shown for one in NAMES[name])


@pytest.mark.parametrize("name", ["freeze", "aux_form", "sched", "amp_dtype"])
def test_others_are_refused(name, capsys):
    option = f"--{name.replace('_', '-')}"
    for known in NAMES[name]:
        assert vars(run_parser().parse_args([option, known]))[name] == known
    with pytest.raises(SystemExit):
        run_parser().parse_args([option, "nonsense"])
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err
