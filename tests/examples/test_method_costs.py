"""examples/method_costs.py measures all of a method's steps, and sets the papers' costs beside steps of their size."""

from functools import partial, partialmethod
from itertools import product

import pytest

from examples import method_costs
from timm_moe_dg.algorithms import ALGORITHMS

QUICK = ["--rounds", "2", "--warmup", "0", "--cpu-threads", "1", "--no-memory"]
SMALL = ["--img-size", "32", "--batch-size", "2"]


def table(capsys):
    """The cells of the printed lines, without the heading."""
    lines = capsys.readouterr().out.splitlines()[2:]
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]


@pytest.mark.slow
def test_every_method_is_measured_relative_to_erm_for_every_model_and_mode(capsys):
    method_costs.main([*QUICK, *SMALL, "--models", "test_vit"])
    assert [cells[0] for cells in table(capsys)] == list(ALGORITHMS)
    words = ["--models", "test_vit", "test_vit2", "--algorithms", "ERM", "--averaging", "swad"]
    method_costs.main([*QUICK, *SMALL, *words, "--mode", "train", "inference"])
    rows = table(capsys)
    expected = product(("train", "inference"), ("test_vit", "test_vit2"), ("ERM", "ERM + swad"))
    assert [(mode, model, method) for method, model, mode, *_ in rows] == list(expected)
    assert [row for row in rows if row[4] == "1.00 (1.00-1.00)"] == [rows[0], rows[4]]


def test_the_papers_costs_stand_beside_steps_of_as_many_images(monkeypatch, capsys):
    monkeypatch.setattr(method_costs, "time_steps", lambda entries, _: {key: [1.0, 1.0] for key in entries})
    words = ["--models", "resnet50.tv_in1k", "vit_tiny_patch16_224", "gmoe_small_patch16", "--algorithms", "ERM"]
    method_costs.main([*QUICK, *words, "--averaging", "swad", "--num-domains", "5", "--batch-size", "32"])
    costs = {(model, method): papers for method, model, *_, papers in table(capsys)}
    assert costs["resnet50.tv_in1k", "ERM + swad"] == (
        "1.21 s, 14.32 GB (GMoE, Table 16); 0.67 s, 13.23 GB (SF-MoE, Table 4)"
    )
    assert costs["gmoe_small_patch16", "ERM"] == "0.98 s, 12.28 GB (GMoE, Table 16)"
    assert costs["vit_tiny_patch16_224", "ERM"] == ""
    method_costs.main([*QUICK, *words])  # of 24 images
    assert not any("GMoE" in cells[-1] for cells in table(capsys))


def test_penalties_have_their_full_weight_and_all_steps_of_a_method_are_timed_together(monkeypatch):
    args = method_costs.parse([*QUICK, *SMALL])
    entries = [method_costs.Entry("test_vit", name) for name in ("IRM", "DANN")]
    updates = dict.fromkeys(("IRM", "DANN"), 0)

    def update(method, original, algorithm, *args):
        updates[method] += 1
        assert getattr(algorithm, "annealed", True)
        return original(algorithm, *args)

    for name in updates:
        kind = ALGORITHMS[name]
        monkeypatch.setattr(kind, "update", partialmethod(partial(update, name, kind.update)))
    times = method_costs.time_steps(entries, args)
    assert [len(times[entry]) for entry in entries] == [2, 2]
    assert updates == {"IRM": 2, "DANN": 4}
