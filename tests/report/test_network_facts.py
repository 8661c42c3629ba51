"""Facts about a network equal its predictions, computed image by image."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.report.helpers import made_run, paint
from timm_moe_dg.analysis.run_view import open_run
from timm_moe_dg.data import split_domains
from timm_moe_dg.data.inspection import fingerprint
from timm_moe_dg.data.readers.folders import read_folder
from timm_moe_dg.data.splits import group_part
from timm_moe_dg.errors import DataError
from timm_moe_dg.losses import record_routing, router_outputs
from timm_moe_dg.networks.trained import class_positions
from timm_moe_dg.report.network_facts import MISTAKES, ReportSettings, evaluate_network

DOMAINS, CLASSES = ("a", "b", "c"), ("x", "y", "z")
SETTINGS = ReportSettings()


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The facts of a run, and for each domain (predicted, target, confidence, tokens of each expert) by hand."""
    root = tmp_path_factory.mktemp("run")
    data = paint(root / "data", DOMAINS, CLASSES, images=8)
    view = open_run(made_run(root / "run", data, DOMAINS, CLASSES, trial_seed=5))
    domains = read_folder(data)
    splits = split_domains(domains, [], trial_seed=5, holdout_fraction=0.2)
    by_hand = []
    for index, (domain, split) in enumerate(zip(domains, splits, strict=True)):
        rows = []
        for position in split.inside if index == 0 else split.outside:
            with torch.no_grad(), record_routing(view.model):
                confidence, predicted = view.model(view.inputs([domain.image(position)])).softmax(1)[0].max(0)
                (routing,) = router_outputs(view.model).values()
            tokens = torch.bincount(routing.expert_indices[:, 0], minlength=4)
            predicted = class_positions(view.model, domain.classes)[predicted]
            rows.append((predicted.item(), domain.targets[position], confidence.item(), tokens))
        by_hand.append(rows)
    return evaluate_network(view, ReportSettings(batch_size=5)), by_hand


def test_scores_are_of_images_that_were_not_trained_on(facts):
    network, by_hand = facts
    assert [scores.images for scores in network.assessment.domains] == [20, 4, 4] == [len(rows) for rows in by_hand]
    right = [sum(row[0] == row[1] for row in rows) / len(rows) for rows in by_hand]
    assert [scores.accuracy for scores in network.assessment.domains] == pytest.approx(right)
    assert network.is_counted.tolist() == [True] * 20 + [False] * 8


def test_the_confusions_are_of_the_held_out_domain(facts):
    network, by_hand = facts
    counts = torch.zeros(3, 3, dtype=torch.long)
    for predicted, target, *_ in by_hand[0]:
        counts[target, predicted] += 1
    assert network.confusion.equal(counts)
    for target, predicted, number in network.confused():
        assert target != predicted
        assert number == counts[CLASSES.index(target), CLASSES.index(predicted)] > 0
    numbers = [number for *_, number in network.confused()]
    assert numbers == sorted(numbers, reverse=True)


def test_the_worst_domains_surest_mistakes(facts):
    network, by_hand = facts
    rows = by_hand[0]
    wrong = sorted((row[2] for row in rows if row[0] != row[1]), reverse=True)[:MISTAKES]
    mistakes = network.worst_mistakes()
    assert [mistake.confidence for mistake in mistakes] == pytest.approx(wrong, abs=1e-5)
    assert all(mistake.target != mistake.predicted for mistake in mistakes)
    assert all(mistake.picture.uri.startswith("data:image/png;base64,") for mistake in mistakes)


def test_the_worst_domain_is_a_held_out_one_and_all_of_a_tie_are_named(facts):
    network, _ = facts
    target, domain = network.outputs.target, network.outputs.group // 2
    outputs = network.outputs._replace(predicted=torch.where(domain == 0, target, (target + 1) % 3))
    assert replace(network, outputs=outputs).assessment.worst == (0,)
    tied = replace(network, outputs=outputs, test_domains=[1, 2], counted=[1, 2])
    assert tied.assessment.worst == (1, 2)
    assert len(tied.worst_mistakes()) == 8


def test_expert_use_counts_the_first_expert_of_each_token(facts):
    network, by_hand = facts
    (use,) = network.expert_use().values()
    for shares, rows in zip(use, by_hand, strict=True):
        counts = torch.stack([row[3] for row in rows]).sum(0).double()
        assert shares.tolist() == pytest.approx((counts / counts.sum()).tolist(), abs=0.02)  # near ties may turn over
        assert shares.sum().item() == pytest.approx(1.0)


def test_calibration_has_both_kinds_of_domains(facts):
    network, _ = facts
    sizes = {name: int(bins.num_samples.sum()) for name, bins in network.calibration().items()}
    assert list(sizes.values()) == [20, 8]


def test_limited_images_are_the_same_ones_each_time(tmp_path):
    data = paint(tmp_path / "data", DOMAINS, CLASSES, images=4)
    view = open_run(made_run(tmp_path / "run", data, DOMAINS, CLASSES))
    first, second = (evaluate_network(view, ReportSettings(max_images=2)) for _ in range(2))
    assert first.images.positions.tolist() == second.images.positions.tolist()
    assert (len(first.outputs.target), first.total) == (6, 10 + 2 + 2)


def test_of_a_run_without_test_domains_every_out_split_counts(tmp_path):
    data = paint(tmp_path / "data", DOMAINS, CLASSES, images=4)
    network = evaluate_network(open_run(made_run(tmp_path / "run", data, DOMAINS, CLASSES, test_domains=[])), SETTINGS)
    assert [scores.images for scores in network.assessment.domains] == [2, 2, 2]
    assert int(network.confusion.sum()) == 6
    assert list(network.calibration()) == ["training domains (out-splits)"]


def test_images_of_a_run_that_was_split_by_photograph_are_those_that_were_not_trained_on(tmp_path):
    data = paint(tmp_path / "data", DOMAINS, CLASSES, images=30)
    run = made_run(tmp_path / "run", data, DOMAINS, CLASSES, split_by_photograph=True)
    network = evaluate_network(open_run(run), SETTINGS)
    for index, domain in enumerate(read_folder(data)):
        evaluated = network.images.positions[network.images.groups // 2 == index].tolist()
        part = "validation" if index else "test"
        assert evaluated == [row for row, path in enumerate(domain.paths) if group_part(Path(path).stem) == part]


def test_other_data_than_the_runs_are_refused_with_the_first_difference(tmp_path):
    data = paint(tmp_path / "data", DOMAINS, CLASSES, images=2)
    digests = fingerprint(read_folder(data))
    run = made_run(tmp_path / "run", data, DOMAINS, CLASSES, domain_digests=digests)
    assert len(open_run(run).domains) == 3
    (data / "b" / "x" / "0.png").rename(data / "b" / "x" / "7.png")
    message = f"data_dir={str(data)!r}: is not the data that the run was trained on: domain 'b' differs in the names"
    with pytest.raises(DataError, match=f"^{re.escape(message)}.*; give --data-dir, the folder of the run's data$"):
        _ = open_run(run).domains


def test_no_image_at_all_is_an_error_that_says_so(tmp_path):
    data = paint(tmp_path / "data", ["a", "b"], CLASSES[:2], images=1)
    run = made_run(tmp_path / "run", data, ["a", "b"], CLASSES[:2], test_domains=[])
    with pytest.raises(DataError, match="no image that the network was not trained on"):
        evaluate_network(open_run(run), ReportSettings())
