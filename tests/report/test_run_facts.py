"""Facts about a run from its files: state, options, selected records, cautions."""

from dataclasses import replace
from math import nan

import pytest

from tests.invented import invented_records, write_run
from tests.report.helpers import Page
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.options import DEFAULTS
from timm_moe_dg.protocols.selection import oracle, training_domain_validation
from timm_moe_dg.report.network_facts import ReportSettings
from timm_moe_dg.report.pages import run_page
from timm_moe_dg.report.run_facts import at_chance, cautions, divergence, read_run, set_options


def facts_of(folder, finished=True, losses=None, **args):
    records = [replace(record, losses=losses or record.losses) for record in invented_records([1], **args)]
    return read_run(write_run(folder, records, finished))


def test_each_rule_picks_its_record(tmp_path):
    facts = facts_of(tmp_path / "run")
    picked = [choice.record for choice in facts.choices]
    assert picked == [training_domain_validation(facts.records), oracle(facts.records)]
    record = facts.selected.record
    assert facts.selected.validation == (record.out_acc[0] + record.out_acc[2]) / 2
    assert facts.selected.headline.value == record.in_acc[1]


def test_a_rule_that_sees_held_out_groups_is_labeled_oracle(tmp_path):
    scores = {"accuracy": 0.25, "worst_accuracy": 0.25, "worst_group": "b", "f1_macro": 0.2}
    facts = [[role, group, "official"] for role, group in (("train", "a"), ("ood", "b"), ("train", "c"))]
    records = invented_records([1], domain_facts=facts, split_sizes=[[4, 1]] * 3)
    records = [replace(record, roles={"ood": scores, "ood_val": scores}) for record in records]
    titles = [choice.title for choice in read_run(write_run(tmp_path / "run", records)).choices]
    assert ["oracle" in title for title in titles] == [False, True, True, True]


def test_where_the_data_set_images_of_other_places_apart_they_are_what_is_reported(tmp_path):
    scores = {"accuracy": 0.25, "worst_accuracy": 0.25, "worst_group": "b", "f1_macro": 0.2}
    records = [
        replace(record, roles={"id": {**scores, "accuracy": 0.75}, "ood": scores}) for record in invented_records([1])
    ]
    choice = read_run(write_run(tmp_path / "run", records)).selected
    assert choice.headline.value == 0.25
    assert "out-of-distribution" in choice.headline.meaning


def test_only_options_that_were_set_and_have_a_part_in_the_numbers_are_given():
    args = {**DEFAULTS, "lr": 0.1, "seed": 7, "steps": 9, "filled_in": ["seed"], "workers": 5, "format": 1}
    args |= {"initial_checkpoint": "/home/somebody/weights.pth", "model_kwargs": {}}
    assert set_options(args) == {"lr": 0.1, "steps": 9, "initial_checkpoint": "weights.pth"}
    assert set_options(DEFAULTS) == {}


def test_the_command_has_what_is_given(tmp_path):
    command = facts_of(tmp_path / "run", lr=0.5, model_kwargs={"num_experts": 4}).command
    assert "--lr 0.5" in command
    assert "num_experts=4" in command
    assert "--aux-coef" not in command


def test_a_damaged_line_matters_in_a_finished_run_alone(tmp_path):
    for finished in (True, False):
        folder = write_run(tmp_path / str(finished), invented_records([1]), finished)
        with (folder / "results.jsonl").open("a") as file:
            file.write('{"step"')
    assert len(read_run(tmp_path / "False").records) == 3
    with pytest.raises(RecordError, match="line 4"):
        read_run(tmp_path / "True")


def test_losses_that_are_no_numbers_are_a_divergence(tmp_path):
    assert divergence(facts_of(tmp_path / "good")) is None
    assert "at step 0" in divergence(facts_of(tmp_path / "bad", losses={"loss": nan}))


@pytest.mark.parametrize(
    ("classes", "accuracy", "expected"),
    [(2, 0.54, True), (2, 0.56, False), (100, 0.016, False), (10, 0.14, True), (10, 0.16, False), (10, nan, True)],
)
def test_chance_depends_on_the_number_of_classes(tmp_path, classes, accuracy, expected):
    records = [replace(record, out_acc=(accuracy,) * 3) for record in invented_records([1], num_classes=classes)]
    assert at_chance(read_run(write_run(tmp_path / "run", records))) == expected


def test_every_accuracy_has_its_images_and_few_images_an_interval_and_a_caution(tmp_path):
    sizes = [[80, 2], [300, 60], [80, 1]]
    records = [replace(record, out_acc=(1.0,) * 3) for record in invented_records([1], split_sizes=sizes)]
    facts = read_run(write_run(tmp_path / "run", records))
    assert "Selection rests on 3 validation images of the training domains." in cautions(facts)
    text = Page(run_page(facts, ReportSettings())).text
    reported = f"{100 * facts.selected.headline.value:.1f}"
    for words in (
        f"Reported accuracy: {reported}% , the accuracy on the held-out in-split (300 images).",
        "validation 100.0 (3 images) 100.0 (3 images)",
        f"domain 1 (tested) {reported} (300 images)",
        "domain 0 100.0 (2 images, 34 to 100%)",
    ):
        assert words in text


def test_groups_of_a_tie_are_all_named_with_their_images(tmp_path):
    scores = {"accuracy": 0.5, "worst_accuracy": 0.25, "worst_group": "a", "f1_macro": 0.2}
    scores |= {"group_accuracy": {"a": 0.25, "b": 0.25, "c": 1.0}, "num_samples": {"a": 4, "b": 8, "c": 500}}
    records = [replace(record, roles={"ood": scores}) for record in invented_records([1])]
    text = Page(run_page(read_run(write_run(tmp_path / "run", records)), ReportSettings())).text
    assert "ood 50.0 (512 images) 25.0 (12 images, 9 to 53%) a, b 20.0" in text


def test_without_a_number_of_classes_nothing_is_said_of_chance(tmp_path):
    assert not at_chance(facts_of(tmp_path / "run"))
