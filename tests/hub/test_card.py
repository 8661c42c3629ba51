"""Cards: valid metadata, numbers from the records, and usage examples that run."""

import html
import json
import re
from dataclasses import replace
from math import nan

import numpy as np
import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from tests.hub.published import (
    ACCURACIES,
    CARDS,
    CLASSES,
    MARGIN,
    NAMES,
    config_of,
    fine_tuned,
    invented_records,
    write_run,
)
from tests.hub_repository import card_mistakes
from timm_moe_dg.data.readers.images import read_pixels
from timm_moe_dg.errors import CheckpointError
from timm_moe_dg.hub.card import card_data, write_card
from timm_moe_dg.hub.folder import Origin, fill_from_network, fill_from_run, load_folder, origin_of_run
from timm_moe_dg.hub.push import push_folder

REPOSITORY = "someone/network"
FACTS = yaml.safe_load((CARDS / "facts.yaml").read_text())
INSIDE, OUTSIDE = ACCURACIES[20]


def card_of_network(folder, name, origin=None):
    fill_from_network(folder, fine_tuned(name, num_classes=1000))
    return write_card(folder, load_folder(folder), REPOSITORY, origin or Origin("random initialization"), CARDS)


def card_of_run(tmp_path, network=None, **args):
    run = write_run(tmp_path / "run", network, **args)
    (tmp_path / "folder").mkdir()
    origin = fill_from_run(tmp_path / "folder", run)
    return write_card(tmp_path / "folder", load_folder(tmp_path / "folder"), REPOSITORY, origin, CARDS)


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
    card = card_of_network(tmp_path, name)
    assert card_mistakes(card.content) == []
    assert "These weights have not been evaluated." in card.text
    assert card.data.eval_results is None
    assert not re.search(r"\d%|accuracy", card.text, re.IGNORECASE)
    assert (tmp_path / "README.md").read_text() == card.content


def test_metadata_of_a_run_survives_reading_and_holds_what_the_selected_record_measured(tmp_path):
    card = card_of_run(tmp_path)
    again = ModelCard.load(tmp_path / "folder" / "README.md")
    assert again.data.to_dict() == card.data.to_dict()
    assert card_mistakes(card.content) == []
    data = again.data
    assert (data.license, data.library_name, data.pipeline_tag) == ("apache-2.0", "timm", "image-classification")
    assert (data.base_model, data.base_model_relation) == ("timm/deit_tiny_patch16_224.fb_in1k", "finetune")
    assert {"domain-generalization", "mixture-of-experts", "timm"} <= set(data.tags)
    assert data.model_name == "network"
    results = {(result.dataset_config, result.dataset_split): result.metric_value for result in data.eval_results}
    expected = {("domain 0", "in"): INSIDE}
    expected |= {(f"domain {domain}", "out"): OUTSIDE + MARGIN * domain for domain in (1, 2)}
    assert results == {key: round(value, 4) for key, value in expected.items()}


def test_metadata_have_no_result_of_an_empty_split(tmp_path):
    records = [replace(record, out_acc=(nan, nan, *record.out_acc[2:])) for record in invented_records()]
    results = card_data(REPOSITORY, Origin("start", records=records), "unknown", []).eval_results
    assert [(result.dataset_config, result.dataset_split) for result in results] == [
        ("domain 0", "in"),
        ("domain 2", "out"),
    ]


def test_the_page_has_the_selected_step_the_headline_the_seed_and_the_figures(tmp_path):
    text = card_of_run(tmp_path).text
    assert "at step 20" in text
    assert "held-out in-split: **50.0**" in text
    assert "trial seed 1" in text
    assert "![learning curves](learning_curves.png)" in text


def test_hidden_pictures_are_not_published(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "figures").mkdir()
    for name in ("._learning_curves.png", "figures/._map.png", "figures/map.png", "best/calibration.safetensors"):
        (run / name).write_bytes(b"a picture")
    (tmp_path / "folder").mkdir()
    fill_from_run(tmp_path / "folder", run)
    names = sorted(str(path.relative_to(tmp_path / "folder")) for path in (tmp_path / "folder").rglob("*.png"))
    assert names == ["figures/map.png", "learning_curves.png"]
    assert (tmp_path / "folder" / "calibration.safetensors").read_bytes() == b"a picture"


def test_scores_of_domains_that_are_set_apart_are_shown_too(tmp_path):
    scores = {"accuracy": 0.625, "worst_accuracy": 0.25, "worst_group": "Africa", "f1_macro": 0.375}
    text = card_of_run(tmp_path, roles={"ood": scores}).text
    assert "| ood | 62.5 | 25.0 (Africa) | 37.5 |" in text


def test_an_average_of_weights_is_named_and_is_no_choice_between_evaluations(tmp_path):
    fill_from_network(tmp_path, fine_tuned())
    records = invented_records(averaging="swad")
    averaged = [*records, replace(records[-1], averaged=True)]
    for evaluations, rule in ((records, "training-domain validation"), (averaged, "none.")):
        origin = Origin("random initialization", records=evaluations)
        card = write_card(tmp_path, load_folder(tmp_path), REPOSITORY, origin, CARDS)
        assert "- Method: ERM, weights averaged (`swad`); lr" in card.text
        assert re.findall("- Selection rule: (.*)", card.text)[0].startswith(rule)
        assert ("of the averaged weights" in card.text) == (rule == "none.")


@pytest.mark.parametrize(
    ("args", "base_model", "start", "license"),
    [
        ({"pretrained": False}, None, "random initialization", "unknown"),
        ({"initial_checkpoint": "/home/me/dense.safetensors"}, None, "the file `dense.safetensors`", "unknown"),
        ({"model": "hf-hub:org/name@main"}, "org/name", "[org/name](https://huggingface.co/org/name)", "apache-2.0"),
        ({"model": "local-dir:output/x/best"}, None, "a network of an earlier run", "unknown"),
    ],
)
def test_base_model_and_license_are_of_what_the_run_started_from(args, base_model, start, license, tmp_path):
    origin = origin_of_run(invented_records(**args))
    assert (origin.base_model, origin.start) == (base_model, start)
    card = card_of_run(tmp_path, **args)
    assert card.data.license == license
    assert f"| License of the weights | {license} |" in card.text
    # Whoever goes on from here inherits it
    assert config_of(tmp_path / "folder")["pretrained_cfg"]["license"] == license


def test_data_of_the_hub_are_named_as_such(tmp_path):
    assert card_of_run(tmp_path, dataset="hub:flwrlabs/pacs").data.datasets == ["flwrlabs/pacs"]


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


def test_the_snippet_reads_images_of_16_bits_as_the_tools_do(tmp_path, monkeypatch):
    (snippet,) = re.findall(r"```python\n(.*?)```", card_of_run(tmp_path).text, re.DOTALL)
    values = np.random.default_rng(0).integers(0, 2**16, (40, 30)).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    names = {}
    snippet = snippet.replace(f"hf-hub:{REPOSITORY}", f"local-dir:{tmp_path / 'folder'}")
    exec(snippet.replace("image.jpg", "image.png"), names)
    torch.testing.assert_close(names["images"][0], names["transform"](read_pixels(str(tmp_path / "image.png"))))


@pytest.mark.parametrize(("mode", "call"), [("routed", "model(images, metadata)"), ("shared", "model(images)")])
def test_the_snippet_asks_the_experts_that_were_measured(mode, call, tmp_path):
    network = fine_tuned("moge_tiny")
    network.set_expert_mode(mode)
    card = card_of_run(tmp_path, network)
    assert f"probabilities = {call}.softmax" in card.text
    assert ("metadata = torch.tensor" in card.text) == (mode == "routed")
    assert ("Only the shared expert was trained. Pass no metadata" in card.text) == (mode == "shared")


@pytest.mark.parametrize("name", ["moge_tiny", "erm_le_tiny_patch16"])
@pytest.mark.parametrize(("encoder", "place"), [("location_id", "[17]"), ("spherical_harmonics", "[[13.4, 52.5]]")])
def test_the_snippet_gives_the_kind_of_metadata_that_the_model_reads(name, encoder, place, tmp_path):
    card = card_of_run(tmp_path, fine_tuned(name, metadata_encoder=encoder))
    assert f"metadata = torch.tensor({place})" in card.text


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
    card = card_of_network(tmp_path, "gmoe_tiny_patch16", Origin(source, source, upcycled=True))
    assert "an upcycled model without training" in card.text
    assert "its outputs equal those of the dense source up to rounding" in card.text
    assert (card.data.base_model, card.data.base_model_relation) == (source, "finetune")
    assert "touvron2021deit" in card.text
    assert "}\n\n@" in card.text


def test_published_records_keep_their_numbers_and_lose_the_paths_of_this_machine(tmp_path):
    card_of_run(tmp_path, data_dir="/home/me/images", output="output")
    before, after = (
        [json.loads(line) for line in (tmp_path / place / "results.jsonl").read_text().splitlines()]
        for place in ("run", "folder")
    )
    assert [row["args"].pop("data_dir") for row in before] == ["/home/me/images"] * 3
    assert [row["args"].pop("data_dir") for row in after] == ["images"] * 3
    assert after == before


def test_a_configuration_that_lacks_what_its_card_states_is_named(tmp_path):
    fill_from_network(tmp_path, fine_tuned())
    network, config = load_folder(tmp_path), config_of(tmp_path)
    del config["model_args"]["top_k"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"^config\.json: lacks what a card states, .*top_k"):
        write_card(tmp_path, network, REPOSITORY, Origin("random initialization"), CARDS)
