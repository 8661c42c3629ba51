"""Cards of each kind of benchmark: their numbers, names and sentences match the records."""

import html
import json
import random
import re
import shlex
from dataclasses import dataclass

import pytest
import yaml
from PIL import Image

from tests.hub.published import CARDS, config_of, fine_tuned, write_run
from tests.invented import ARGS, make_record
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.hub.card import losses_in_effect, write_card
from timm_moe_dg.hub.folder import fill_from_run, load_folder
from timm_moe_dg.networks.build import build_network, data_config, save_network
from timm_moe_dg.protocols.options import NO_EFFECT_ON_RESULTS, run_parser
from timm_moe_dg.protocols.records import Record

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
    (root / "folder").mkdir()
    origin = fill_from_run(root / "folder", run)
    card = write_card(root / "folder", load_folder(root / "folder"), "someone/network", origin, CARDS)
    return Published(card.text, plan, records, root / "folder")


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


def test_the_headline_is_taken_over_what_is_out_of_distribution(published):
    record = published.record()
    (meaning, value) = re.findall(r"reported number is ([^:]*): \*\*([\d.]+)\*\*", published.text)[0]
    held_out = [record.in_acc[index] for index in record.test_domains]
    if not held_out:
        assert value == percent(sum(record.out_acc) / len(record.out_acc))
        assert "no domain was held out" in meaning
    elif record.roles:
        assert value == percent(record.roles["ood"]["accuracy"])
        assert "out-of-distribution" in meaning
    else:
        assert value == percent(sum(held_out) / len(held_out))
        assert ("mean" in meaning) == (len(held_out) > 1)


def test_what_is_said_about_the_splits_is_what_was_done(published):
    sentences = re.findall(r"^- Splits: (.*)\.$", published.text, re.MULTILINE)
    assert len(sentences) == 1
    official = all(domain.split is not None for domain in published.plan.domains)
    assert ("the data's own" in sentences[0]) == official
    assert ("% (out)" in sentences[0]) == (not official and not published.plan.options.split_by_photograph)
    assert ("by photograph" in sentences[0]) == published.plan.options.split_by_photograph
    assert ("(determines the splits)" in published.text) == ("at random" in sentences[0])
    if "at random" in sentences[0]:
        inside, outside = map(float, re.findall(r"([\d.]+)% \((?:in|out)\)", sentences[0]))
        for split in published.plan.splits:
            number = len(split.inside) + len(split.outside)
            assert len(split.inside) == number - int(number * outside / 100)
        assert (inside, outside) == (80, 20)
    assert "80" not in sentences[0] or not official


def test_the_method_names_the_losses_that_ran_with_their_coefficients(published):
    (line,) = re.findall(r"^- Method: (.*)\.$", published.text, re.MULTILINE)
    method, _, hparams = line.partition("; ")
    assert method == "ERM, with the routers' auxiliary loss x 0.02"
    assert {
        name: float(value) for name, value in (pair.split() for pair in hparams.split(", "))
    } == published.record().hparams


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


def test_a_model_that_was_trained_from_scratch_claims_no_origin(published):
    config = config_of(published.folder)["pretrained_cfg"]
    assert config["license"] == "unknown"
    assert {"tag", "paper_ids", "origin_url"}.isdisjoint(config)
    assert "| Starting point | random initialization |" in published.text


def test_the_package_is_to_be_had_where_the_citation_says(published):
    repository = yaml.safe_load((CARDS.parent / "CITATION.cff").read_text()).get("repository-code")
    assert "pip install" in published.text
    assert (f"pip install git+{repository}" in published.text) == (repository is not None)


def test_config_json_of_a_run_has_no_tag_of_weights_that_were_not_loaded(tmp_path):
    network = build_network(
        "gmoe_tiny_patch16", 3, img_size=32, model_kwargs={"embed_dim": 24, "depth": 2, "num_heads": 2}
    )
    save_network(network, tmp_path, ("a", "b", "c"), data_config(network, 32))
    assert {"tag", "license", "paper_ids"}.isdisjoint(config_of(tmp_path)["pretrained_cfg"])
