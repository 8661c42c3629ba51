"""Result files go both ways: DomainBed's reader reads ours, and ours reads DomainBed's.

DomainBed's side is written down here from its documentation and conventions: a folder per run with results.jsonl, one
JSON object per line, env{i}_in_acc and env{i}_out_acc, runs that hold out one domain or two.
"""

import json
import re
from collections import defaultdict

import numpy as np
import pytest

from tests.invented import write_sweep
from tests.load_tool import load_tool
from tests.results.cells import cells_of
from timm_moe_dg.results.runs import NO_MODEL, RowKey, find_runs
from timm_moe_dg.results.tables import make_tables

RULES = ("training_domain_validation", "leave_one_domain_out_cv", "oracle")


def read_rows(folder):
    """Every line of every run folder, as a plain table of keys."""
    paths = sorted(folder.glob("*/results.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def scored(rows, test, rule, count):
    """The values by which a rule compares the rows of one draw that hold out the test domain alone."""
    alone = [row for row in rows if row["args"]["test_envs"] == [test]]
    others = [domain for domain in range(count) if domain != test]
    if rule == "oracle":
        return [(row[f"env{test}_out_acc"], row) for row in alone if row["step"] == max(r["step"] for r in alone)]
    if rule == "training_domain_validation":
        return [(np.mean([row[f"env{domain}_out_acc"] for domain in others]), row) for row in alone]
    values = []
    for row in alone:
        pairs = [pair for pair in rows if len(pair["args"]["test_envs"]) == 2 and pair["step"] == row["step"]]
        left = {d: pair[f"env{d}_in_acc"] for pair in pairs for d in pair["args"]["test_envs"] if d != test}
        if len(left) == len(others):
            values.append((np.mean([left[domain] for domain in others]), row))
    return values


def accuracy_by_rule(rows, test, rule, count):
    """What each rule reports for a test domain from the rows of one trial, or None; values by draw, then the best."""
    by_draw = defaultdict(list)
    for row in rows:
        if test in row["args"]["test_envs"]:
            by_draw[row["args"]["hparams_seed"]].append(row)
    selected = []
    for draw in sorted(by_draw):
        if values := scored(by_draw[draw], test, rule, count):
            best = max(value for value, _ in values)
            selected.append(next((value, row) for value, row in values if value == best))
    return max(reversed(selected), key=lambda pair: pair[0])[1][f"env{test}_in_acc"] if selected else None


@pytest.mark.parametrize("levels", [2, 8, 1024])  # with and without equal values
@pytest.mark.parametrize("rule", RULES)
def test_both_readers_make_the_same_table(rule, levels, tmp_path):
    skip = [((1, 2), 0, 0), ((1, 2), 0, 1), ((3,), 2, 1)]
    write_sweep(tmp_path, dataset="toy", num_domains=4, levels=levels, skip=skip)
    runs, rows, gaps = find_runs([tmp_path])[0], read_rows(tmp_path), 0
    (table,) = make_tables(runs, [rule])
    assert make_tables(runs[::-1], [rule])[0].scores.equals(table.scores)  # in any order
    ((row, cells),) = cells_of(table).items()
    assert row == RowKey("ERM", "vit")
    for domain in range(4):
        for trial in range(3):
            of_trial = [row for row in rows if row["args"]["trial_seed"] == trial]
            expected = accuracy_by_rule(of_trial, domain, rule, 4)
            assert cells[domain].values.get(trial) == expected
            gaps += expected is None
        values = list(cells[domain].values.values())
        assert cells[domain].mean == pytest.approx(np.mean(values))
        assert cells[domain].error == pytest.approx(np.std(values) / np.sqrt(len(values)))
    assert gaps == (2 if rule == "leave_one_domain_out_cv" else 0)
    whole = [np.mean([cell.values[seed] for cell in cells[:4]]) for seed in sorted(cells[4].values)]
    assert list(cells[4].values.values()) == pytest.approx(whole)


def domainbed_row(step, test_envs, trial_seed):
    """One of its rows: no model, older ones without mem_gb, its own names for where things are."""
    args = {"algorithm": "CORAL", "checkpoint_freq": None, "data_dir": "/data", "dataset": "VLCS", "hparams": None}
    args |= {"holdout_fraction": 0.2, "output_dir": f"/sweep/{test_envs}{trial_seed}", "seed": trial_seed + 7}
    args |= {"hparams_seed": 0, "skip_model_save": False, "task": "domain_generalization", "test_envs": test_envs}
    args |= {"steps": 1001}
    accuracies = {f"env{domain}_{split}_acc": 0.5 + domain / 8 for domain in range(4) for split in ("in", "out")}
    other = {"args": {**args, "trial_seed": trial_seed}, "epoch": 0.0, "hparams": {"batch_size": 39}, "step": step}
    return {**other, **accuracies, "loss": 1.0, "penalty": 0.5, "step_time": 0.2}


def test_folders_of_domainbed_are_read(tmp_path, capsys):
    for domain in range(4):
        for trial in range(2):
            folder = tmp_path / f"{domain}{trial}"
            folder.mkdir()
            rows = [domainbed_row(step, [domain], trial) for step in (0, 300, 1000)]
            (folder / "results.jsonl").write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
            (folder / "done").write_text("done")
            (folder / "out.txt").write_text("...")
    (table, _) = make_tables(find_runs([tmp_path])[0])
    ((row, cells),) = cells_of(table).items()
    assert row == RowKey("CORAL", NO_MODEL)
    assert [cell.mean for cell in cells] == [0.5, 0.625, 0.75, 0.875, 0.6875]
    load_tool("collect_results").main([str(tmp_path)])
    assert re.search(r"^CORAL +\(not recorded\)  50\.0 ± 0\.0 ", capsys.readouterr().out, re.MULTILINE)
