"""Cards: valid metadata, numbers from the records, and usage examples that run."""

import html
import json
import random
import re
import shlex
from dataclasses import dataclass, replace
from math import nan

import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

import timm_moe_dg
from tests.hub.published import (
    ACCURACIES,
    CARDS,
    CLASSES,
    MARGIN,
    NAMES,
    REPOSITORY,
    card_of,
    card_of_network,
    card_of_run,
    config_of,
    fine_tuned,
    invented_records,
    write_run,
)
from tests.hub_server import card_mistakes
from tests.invented import ARGS, make_record
from timm_moe_dg.errors import RecordError
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.hub.card import card_data, losses_in_effect, splits_in_words
from timm_moe_dg.hub.folder import Origin
from timm_moe_dg.hub.push import push_folder
from timm_moe_dg.networks.calibration import Calibration, Scores, fit_distribution, identify
from timm_moe_dg.networks.trained import load_trained
from timm_moe_dg.protocols.options import NO_EFFECT_ON_RESULTS, run_parser
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.storage.run_folder import save_calibration

FACTS = yaml.safe_load((CARDS / "facts.yaml").read_text())
INSIDE, OUTSIDE = ACCURACIES[20]


def test_every_registered_model_has_a_family_and_every_dense_source_its_facts():
    ours = {name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("timm_moe_dg.")}
    assert FACTS["models"].keys() == ours - {"moge", "text_classifier"}  # on any backbone
    for name in FACTS["models"]:
        cfg = timm.get_pretrained_cfg(name)
        assert FACTS["dense_sources"][cfg.hf_hub_id]["license"] == cfg.license
    for family in FACTS["families"].values():
        assert family["paper"] in FACTS["papers"]
    assert {f"{family}.md" for family in FACTS["families"]} <= {path.name for path in CARDS.iterdir()}


@pytest.mark.parametrize("name", [*NAMES, "text_classifier", "test_vit"])
def test_cards_of_every_family_are_valid_and_state_that_nothing_was_evaluated(name, tmp_path):
    card = card_of_network(tmp_path, fine_tuned(name, num_classes=1000))
    assert card_mistakes(card.content) == []
    assert "These weights have not been evaluated." in card.text
    assert card.data.eval_results is None
    assert not re.search(r"\d%|accuracy", card.text, re.IGNORECASE)
    assert (tmp_path / "README.md").read_text() == card.content


def test_metadata_of_a_run_survives_reading_and_holds_what_the_selected_record_measured(tmp_path):
    card = card_of_run(tmp_path, dataset="hub:flwrlabs/pacs")
    again = ModelCard.load(tmp_path / "folder" / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert card_mistakes(card.content) == []
    data = again.data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "timm", "image-classification")
    assert (data.base_model, data.base_model_relation) == ("timm/deit_tiny_patch16_224.fb_in1k", "finetune")
    assert {"domain-generalization", "mixture-of-experts", "timm"} <= set(data.tags)
    assert (data.model_name, data.datasets) == ("network", ["flwrlabs/pacs"])
    results = {(result.dataset_config, result.dataset_split): result.metric_value for result in data.eval_results}
    expected = {("domain 0", "in"): INSIDE}
    expected |= {(f"domain {domain}", "out"): OUTSIDE + MARGIN * domain for domain in (1, 2)}
    assert results == {key: round(value, 4) for key, value in expected.items()}
    assert "at step 20" in card.text
    assert "held-out in-split: **50.0**" in card.text
    assert "trial seed 1" in card.text
    assert "![learning curves](learning_curves.png)" in card.text


@pytest.mark.parametrize("facts", [[], [["train", "a", "unheard of"]] * 3, [["train", "a"]] * 3], ids=str)
def test_damaged_facts_of_domains_are_refused(facts, tmp_path):
    with pytest.raises(RecordError, match="domain_facts="):
        card_of_run(tmp_path, domain_facts=facts)


def test_metadata_have_no_result_of_an_empty_split(tmp_path):
    records = [replace(record, out_acc=(nan, nan, *record.out_acc[2:])) for record in invented_records()]
    results = card_data(REPOSITORY, Origin("start", records=records), "unknown", []).eval_results
    assert [(result.dataset_config, result.dataset_split) for result in results] == [
        ("domain 0", "in"),
        ("domain 2", "out"),
    ]


def test_intervals_count_groups_and_the_most_frequent_class_stands_beside_the_result(tmp_path):
    sizes, squares = [[33, 9]] * 3, [[99, 81]] * 3  # groups of three, and one of nine
    facts = {"split_sizes": sizes, "group_squares": squares, "classes_present": [[2, 2, 2]] * 3}
    text = card_of_run(tmp_path, **facts, most_frequent=[[22, 3]] * 3, most_frequent_class="a").text
    assert text.count("(33 images in groups, as good as 11, 95% interval") == 4  # the table and the result
    assert text.count("(9 images in groups, as good as 1, 95% interval") == 3
    assert "The most frequent class of the training images alone gives 66.7." in text


def test_scores_of_domains_that_are_set_apart_are_shown_too(tmp_path):
    scores = {"accuracy": 0.625, "worst_accuracy": 0.25, "worst_group": "Africa", "f1_macro": 0.375}
    text = card_of_run(tmp_path, roles={"ood": scores}).text
    assert "| ood | 62.5 | 25.0 (Africa) | 37.5 |" in text


@pytest.mark.parametrize("name", ["gmoe_tiny_patch16", "moge_tiny", "moge_small_patch32_384", "erm_le_tiny_patch16"])
def test_the_snippet_runs_on_what_was_published(name, hub, tmp_path, monkeypatch, capsys):
    network = fine_tuned(name)
    network.pretrained_cfg["label_names"] = list(CLASSES)
    card_of_run(tmp_path, network)
    push_folder(tmp_path / "folder", REPOSITORY)
    (snippet,) = re.findall(r"```python\n(.*?)```", (tmp_path / "folder" / "README.md").read_text(), re.DOTALL)
    assert snippet.startswith("import timm_moe_dg")
    Image.effect_noise((40, 50), 80).save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(snippet, {})
    assert capsys.readouterr().out.strip() in CLASSES


@pytest.mark.parametrize(("temperature", "is_calibrated"), [(1.0, True), (2.7182818, True), (2.7182818, False)])
@pytest.mark.parametrize(
    ("name", "mode"), [("gmoe_tiny_patch16", None), ("moge_tiny", "shared"), ("d3g_tiny_patch16", None)]
)
def test_the_snippet_gives_the_probabilities_of_predict(name, mode, temperature, is_calibrated, tmp_path, monkeypatch):
    network = fine_tuned(name)
    if mode:
        network.set_expert_mode(mode)
    run = write_run(tmp_path / "run", network)
    source = f"local-dir:{run / 'best'}"
    digest = identify(load_trained(source)) if is_calibrated else "of other weights"
    scores = [Scores(torch.ones(1), torch.ones(1)) for _ in range(2)]
    pixels = fit_distribution(torch.randn(9, 6), torch.zeros(9).long(), torch.randn(9, 6))
    save_calibration(Calibration(temperature, digest, "", list(CLASSES), *scores, [], {"pixels": pixels}), run / "best")
    text = card_of(run).text
    assert ("divided by the temperature" in text) == (is_calibrated and temperature != 1)
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    Image.effect_noise((40, 50), 80).save(tmp_path / "image.jpg")
    (tmp_path / "places.csv").write_text("path,lon,lat\nimage.jpg,13.4,52.5\n")
    monkeypatch.chdir(tmp_path)
    values = {}
    exec(snippet.replace(f"hf-hub:{REPOSITORY}", f"local-dir:{tmp_path / 'folder'}"), values)
    places = {"metadata": "places.csv"} if "metadata" in snippet else {}
    (row,) = timm_moe_dg.predict(source, "image.jpg", top_k=5, workers=0, **places).to_dict("records")
    expected = {row[f"class{rank}"]: row[f"probability{rank}"] for rank in ("", "_2", "_3", "_4", "_5")}
    assert dict(zip(CLASSES, values["probabilities"][0].tolist(), strict=True)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["moge_tiny", "erm_le_tiny_patch16"])
@pytest.mark.parametrize(("encoder", "place"), [("location_id", "[17]"), ("spherical_harmonics", "[[13.4, 52.5]]")])
def test_the_snippet_gives_the_kind_of_metadata_that_the_model_reads(name, encoder, place, tmp_path):
    text = card_of_run(tmp_path, fine_tuned(name, metadata_encoder=encoder)).text
    assert f"metadata = torch.tensor({place})" in text
    assert "probabilities = model(images, metadata).softmax" in text


def test_the_snippet_of_a_model_with_columns_names_them_and_gives_a_number_for_each(tmp_path):
    network = fine_tuned("moge_tiny", metadata_columns={"month": (6.5, 3.0), "elevation": (500.0, 250.0)})
    text = card_of_run(tmp_path, network).text
    assert "# longitude, latitude in degrees, month, elevation, NaN if unknown" in text
    (row,) = re.findall(r"metadata = torch\.tensor\((.*)\)", text)
    assert network(torch.zeros(1, 3, *network.patch_embed.img_size), torch.tensor(eval(row))).shape == (1, len(CLASSES))


def test_a_mixture_on_another_backbone_names_it_and_its_weights(tmp_path):
    kwargs = {"backbone": "test_vit.r160_in1k", "moe_layers": [1], "img_size": 32}
    card = card_of_run(tmp_path, fine_tuned("gmoe", **kwargs), model="gmoe", model_kwargs=kwargs)
    assert "GMoE on timm's `test_vit.r160_in1k`" in card.text
    assert "sends\nevery token to 2 of 6 experts (`moe_layers` [1]" in html.unescape(card.text)
    assert card.data.base_model == "timm/test_vit.r160_in1k"


def test_an_upcycled_starting_point_is_described(tmp_path):
    source = "timm/deit_tiny_patch16_224.fb_in1k"
    card = card_of_network(tmp_path, fine_tuned(num_classes=1000), Origin(source, source, upcycled=True))
    assert "an upcycled model without training" in card.text
    assert "its outputs equal those of the dense source up to rounding" in card.text
    assert (card.data.base_model, card.data.base_model_relation) == (source, "finetune")
    assert "touvron2021deit" in card.text
    assert "}\n\n@" in card.text


MODEL = ["--model", "gmoe_tiny_patch16", "--steps", "7", "--aux-coef", "0.02"]
PLACES = [
    *(("train", "Europe"), ("id_val", "Europe"), ("id_test", "Europe"), ("train", "Africa"), ("id_val", "Africa")),
    *(("id_test", "Mars"), ("ood_test", "Asia"), ("ood_val", "Asia"), ("ood_test", "Africa")),
]


def place_folder(root):
    """A folder with a csv: Africa is trained on and tested under shift, Mars is an id group without training images."""
    lines = ["path,label,lon,lat,split,group"]
    for part, group in PLACES:
        for label in ("cat", "dog"):
            name = f"{part}-{group}-{label}.png"
            Image.effect_noise((8, 8), 50).save(root / name)
            lines.append(f"{name},{label},10,20,{part},{group}")
    (root / "metadata.csv").write_text("\n".join(lines))


def folder(root):
    for domain in ("art", "photo", "sketch"):
        for label in ("cat", "dog"):
            (root / domain / label).mkdir(parents=True)
            for index in range(20):
                Image.new("RGB", (8, 8)).save(root / domain / label / f"{index}.png")


@dataclass
class Published:
    """A card with all that it can be checked against."""

    text: str
    plan: object
    records: list
    folder: object

    def record(self):
        """The evaluation that training-domain validation picks, found by hand."""
        means = [sum(r.out_acc[i] for i in self.plan.training) / len(self.plan.training) for r in self.records]
        return self.records[means.index(max(means))]

    def rows(self):
        number = r"([\d.]+|-)(?: \((\d+) images?[^)]*\))?"
        pattern = rf"^\| ([^|]+) \| (\**)([a-z ,-]+)\2 \| {number} \| {number} \|$"
        return [
            (html.unescape(name), bool(bold), role, (inside, number_inside), (outside, number_outside))
            for name, bold, role, inside, number_inside, outside, number_outside in re.findall(
                pattern, self.text, re.MULTILINE
            )
        ]


def invented(plan, step, generator):
    """A record of a plan; empty splits have no accuracy."""
    columns = [
        [generator.random() if len(part) else float("nan") for part in parts]
        for parts in zip(*((split.inside, split.outside) for split in plan.splits), strict=True)
    ]
    roles = {}
    for role in ("id", "ood"):
        groups = [domain.group for domain in plan.domains if domain.role == role]
        if groups:
            names = ("accuracy", "worst_accuracy", "f1_macro")
            roles[role] = {name: generator.random() for name in names} | {"worst_group": groups[0]}
    losses = {"loss": 1.5, "aux_loss": 0.3}
    args = json.loads(json.dumps(dict(plan.record_args)))
    return Record(step, step / 2, losses, 0.1, 0.0, *map(tuple, columns), args, dict(plan.hparams), roles)


KINDS = {
    "digits": (["--dataset", "rotated_digits", "--test-domains", "5"], None),
    "geo_digits": (["--dataset", "geo_digits"], None),
    "folder": (["--dataset", "folder", "--data-dir", "DATA", "--test-domains", "0", "2"], folder),
    "final": (["--dataset", "folder", "--data-dir", "DATA", "--test-domains", "none"], folder),
    "photograph": (["--dataset", "folder", "--data-dir", "DATA", "--split-by-photograph"], folder),
    "place_folder": (["--dataset", "place_folder", "--data-dir", "DATA"], place_folder),
}


@pytest.fixture(scope="module", params=KINDS)
def published(request, tmp_path_factory):
    words, prepare = KINDS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    (root / "data").mkdir()
    if prepare:
        prepare(root / "data")
    words = [str(root / "data") if word == "DATA" else word for word in words]
    plan = make_plan(parse_resumable(run_parser(), [*MODEL, *words, "--output", str(root)]))
    generator = random.Random(3)
    records = [invented(plan, step, generator) for step in range(0, 7, 3)]
    run = write_run(root / "run", fine_tuned(num_classes=len(plan.classes)), plan.classes)
    (run / "results.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    return Published(card_of(run).text, plan, records, root / "folder")


def percent(value):
    return f"{100 * value:.1f}" if value == value else "-"


def test_the_table_has_every_domain_with_its_role_and_numbers(published):
    record, plan = published.record(), published.plan
    assert f"Accuracy in percent at step {record.step}, on" in published.text
    numbers = [[str(len(part) or "") for part in (split.inside, split.outside)] for split in plan.splits]
    expected = [
        (name, (percent(inside), number_inside), (percent(outside), number_outside))
        for name, inside, outside, (number_inside, number_outside) in zip(
            plan.names, record.in_acc, record.out_acc, numbers, strict=True
        )
    ]
    assert [(name, inside, outside) for name, _, _, inside, outside in published.rows()] == expected
    for position, (_, bold, role, *_) in enumerate(published.rows()):
        assert (role == "training") == (position in plan.training)
        assert bold == (role != "training")
        domain = plan.domains[position]
        seen = domain.group in {plan.domains[index].group for index in plan.training}
        if role != "training":
            assert ("held out" in role or "group not trained on" in role) == (not seen)
            assert ("in-distribution" in role) == (domain.role == "id")
            assert ("out-of-distribution" in role) == (domain.role == "ood")


def test_the_method_names_the_losses_that_ran_with_their_coefficients(published):
    (line,) = re.findall(r"^- Method: (.*)\.$", published.text, re.MULTILINE)
    method, _, hparams = line.partition("; ")
    assert method == "ERM, with the routers' auxiliary loss x 0.02"
    assert {
        name: float(value) for name, value in (pair.split() for pair in hparams.split(", "))
    } == published.record().hparams


def test_splits_are_described_with_their_shares_in_percent():
    args = {**ARGS, "trial_seed": 3, "holdout_fraction": 0.25, "group_column": "site"}
    facts = [["train", "a", "random"], ["train", "b", "group"], ["id", "b", "official"]]
    record = replace(make_record(args={**args, "domain_facts": facts}), in_acc=(1.0,) * 3)
    assert splits_in_words(record) == [
        "each domain is split at random, by trial seed 3, into 75.0% (in) and 25.0% (out)",
        "each domain is split by groups of images (site), by trial seed 3, into about 75.0% (in) and 25.0% (out)",
        "the data's own; in-distribution test domains: test images (in)",
    ]


@pytest.mark.parametrize(
    ("coefficients", "losses", "named"),
    [
        ({}, {"aux_loss": 0.3}, ["the routers' auxiliary loss x 0.01"]),
        ({"aux_coef": 0}, {"aux_loss": 0.3}, []),
        (
            {"aux_coef": 0.02, "cka_coef": 0.5},
            {"aux_loss": 0.0, "cka_loss": 0.1},
            ["MoGE's diversity loss (CKA) x 0.5"],
        ),
    ],
)
def test_losses_without_a_coefficient_or_a_value_are_not_named(coefficients, losses, named):
    record = make_record(losses={"loss": 1.0, **losses}, args={**ARGS, **coefficients})
    assert losses_in_effect(record) == named


def test_the_command_says_what_differs_from_the_defaults_and_gives_the_same_plan(published, tmp_path):
    (command,) = re.findall(r"```bash\n(accelerate.*?)```", published.text, re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    words = words[words.index("finetune") + 1 :]
    assert len(words) < 16
    given = [str(published.plan.options.data_dir) if word == "DATA" else word for word in words]
    again = make_plan(parse_resumable(run_parser(), [*given, "--output", str(tmp_path)]))
    first, second = (
        {name: value for name, value in plan.identity().items() if name not in NO_EFFECT_ON_RESULTS - {"domain_facts"}}
        for plan in (published.plan, again)
    )
    assert second == first


def test_the_card_claims_no_origin_and_names_where_the_package_is(published):
    config = config_of(published.folder)["pretrained_cfg"]
    assert config["license"] == "unknown"
    assert {"tag", "paper_ids", "origin_url"}.isdisjoint(config)
    assert "| Starting point | random initialization |" in published.text
    repository = yaml.safe_load((CARDS.parent / "CITATION.cff").read_text()).get("repository-code")
    assert "pip install" in published.text
    assert (f"pip install git+{repository}" in published.text) == (repository is not None)
