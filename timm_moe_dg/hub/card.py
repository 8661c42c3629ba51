"""Model cards, from the templates and facts in hub_cards/ and the numbers in a run's records."""

import json
from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from markupsafe import Markup
from torch import nn

from ..algorithms.hparams import LOSS_COEFFICIENTS
from ..cli.text import code, markdown, one_line
from ..cli.values import LOCAL
from ..data import BENCHMARKS
from ..data.readers.places import POOLED
from ..errors import RecordError
from ..layers import LossWeights
from ..metrics import METRICS
from ..networks.bands import bands_of
from ..networks.build import CONFIG, Config, read_config, without_origin
from ..networks.calibration import find_calibration
from ..networks.trained import label_names
from ..protocols.records import Record
from ..protocols.selection import counted, headlines, images, independent_images, worst_groups
from ..results.runs import domain_names, unseen_of_most_frequent
from .folder import Origin, training_command

_TAGS = ["timm", "image-classification", "domain-generalization"]
_KINDS = OFFICIAL, PHOTOGRAPH, GROUP, RANDOM = "official", "photograph", "group", "random"  # of splits
# The names of losses in records: the option of their weight, and words
_LOSSES = {
    item.metadata["loss"]: (item.name, item.metadata["words"])
    for item in fields(LossWeights)
    if "loss" in item.metadata
}


def write_card(
    folder: Path, network: nn.Module, repo_id: str, origin: Origin, cards: Path, license: str | None = None
) -> ModelCard:
    """Writes the README.md of a model folder, and the license into its config.json.

    The folder holds config.json, the model.safetensors of `network` and any number of PNG figures. `cards` is that of
    templates and facts. `license` is the Hub's identifier of the weights' license. None stands for the license of
    the published weights that training started from, or "unknown" if it started from anything else.
    """
    config = read_config(folder / CONFIG)
    facts = read_facts(cards, config["architecture"])
    inherited = config["pretrained_cfg"].get("license") if origin.base_model else None
    license = license or inherited or "unknown"
    if not (origin.base_model or origin.upcycled):
        # timm's entry of the architecture describes published weights, which were not used here.
        config["pretrained_cfg"] = without_origin(config["pretrained_cfg"])
    config["pretrained_cfg"]["license"] = license  # inherited by the cards of models that start from these weights
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    data = card_data(repo_id, origin, license, facts["family"]["tags"])
    model = {**_model_facts(folder, config, network), "repo_id": repo_id, "license": license}
    page = _render(cards, facts, origin, model)
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{page}")
    card.save(folder / "README.md")
    return card


def read_facts(cards: Path, architecture: str) -> dict[str, Any]:
    """Reads the entries of facts.yaml for a model: family, template, the family's paper, and all dense sources."""
    facts = yaml.safe_load((cards / "facts.yaml").read_text())
    name = facts["models"].get(architecture, "timm")
    family = facts["families"][name]
    return {
        "template": f"{name}.md",
        "family": family,
        "paper": facts["papers"][family["paper"]],
        "dense_sources": facts["dense_sources"],
    }


def card_data(repo_id: str, origin: Origin, license: str, tags: list[str]) -> ModelCardData:
    """Builds a card's metadata in the Hub's format."""
    dataset = one_line(origin.args["dataset"]) if origin.records else ""
    return ModelCardData(
        license=license,
        library_name="timm",
        pipeline_tag="image-classification",
        tags=[*_TAGS, *tags],
        datasets=[dataset.removeprefix("hub:")] if dataset.startswith("hub:") else None,
        base_model=origin.base_model,
        base_model_relation="finetune" if origin.base_model else None,
        model_name=repo_id.partition("/")[2],
        eval_results=_eval_results(dataset, origin) or None,
    )


def _eval_results(dataset: str, origin: Origin) -> list[EvalResult]:
    """One result per domain, on the reported split of held-out domains and on the validation split of the others."""
    results = []
    for position, row in enumerate(domain_results(origin.selected)) if origin.records else []:
        split = "out" if row.trained else origin.selected.reported_split
        value = origin.selected.scores_on(split, "accuracy")[position]
        name, part = one_line(row.domain), "all images" if split == "whole" else f"{split}-split"
        if isfinite(value):  # an empty split has no accuracy
            results.append(
                EvalResult(
                    task_type="image-classification",
                    task_name="Image classification",
                    dataset_type=dataset.removeprefix("hub:"),
                    dataset_name=f"{dataset}, {name}",
                    dataset_config=name,
                    dataset_split=split,
                    metric_type="accuracy",
                    metric_name=f"Accuracy on the domain {name} ({row.role}), {part}",
                    metric_value=round(value, 4),
                )
            )
    return results


def _model_facts(folder: Path, config: Config, network: nn.Module) -> dict[str, object]:
    calibration = find_calibration(f"{LOCAL}{folder}", network)
    temperature = calibration.temperature if calibration else 1.0
    return {
        "architecture": config["architecture"],
        "scaling": f".div({temperature!r})" if temperature != 1 else "",
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "num_classes": network.num_classes,
        "classes": label_names(network) or (),
        "config": config["pretrained_cfg"],
        "bands": bands_of(network).count,
        "band_names": bands_of(network).names,
        "values": bands_of(network).scaling,
        "options": config.get("model_args", {}),
        "expert_mode": config.get("expert_mode", "routed"),
        "figures": sorted(path.relative_to(folder) for path in folder.rglob("*.png")),
    }


def _render(cards: Path, facts: Mapping[str, Any], origin: Origin, model: Mapping[str, object]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(cards),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Every value is escaped for Markdown, unless a template marks it by `safe`, `code` or `url`
        finalize=lambda value: value if isinstance(value, Markup) else markdown(value),
    )
    environment.filters |= {"code": lambda name: Markup(code(name)), "url": lambda path: Markup(quote(path))}
    environment.filters |= {"counted": counted, "images": images, "worst_groups": worst_groups}
    environment.globals["independent"] = independent_images
    environment.filters["percent"] = lambda share: f"{100 * share:.1f}" if isfinite(share) else "-"
    # Only starting points that facts.yaml lists have a citation.
    source = facts["dense_sources"].get(origin.base_model or "")
    citations = [facts["paper"]["citation"], *([source["citation"]] if source else [])]
    name, citation = str(model["repo_id"]).partition("/")[2], cards.parent / "CITATION.cff"
    repository = yaml.safe_load(citation.read_text()).get("repository-code") if citation.is_file() else None
    page = {**model, "name": name, "repository": repository, "paper": facts["paper"]}
    page |= {"origin": origin, "citations": citations, "source": source}
    if origin.records:
        page |= _run_facts(origin.selected)
    return environment.get_template(facts["template"]).render(page)


def _run_facts(record: Record) -> dict[str, object]:
    return {
        "record": record,
        "args": record.args,
        "hparams": record.hparams,
        "results": domain_results(record),
        "headlines": headlines(record),
        "metric": METRICS[record.metric],
        "zeros": [*unseen_of_most_frequent(record, record.reported_split).values()],
        "losses": losses_in_effect(record),
        "splits": splits_in_words(record),
        "random_split": any(fact.split == RANDOM for fact in domain_facts(record)),
        "benchmark": BENCHMARKS.get(record.args["dataset"]),
        "versions": record.args.get("versions"),
        "command": training_command(record.args),
    }


class DomainResult(NamedTuple):
    """Accuracy of the published weights on the two splits of a domain, NaN for an empty split, and their images."""

    domain: str
    role: str  # in words
    trained: bool
    inside: float
    outside: float
    images_inside: int | None = None  # None if not recorded
    images_outside: int | None = None
    independent_inside: float | None = None  # see `Record.independent_images`
    independent_outside: float | None = None


class DomainFact(NamedTuple):
    """A domain as recorded by a run: its role and group (see `data.Domain`), and the kind of its split."""

    role: str
    group: str
    split: str


def domain_facts(record: Record) -> list[DomainFact]:
    """Reads the recorded role, group and split of each domain."""
    facts = record.args.get("domain_facts", ())
    if len(facts) != len(record.in_acc) or any(len(fact) != 3 or fact[2] not in _KINDS for fact in facts):
        raise RecordError(f"domain_facts={facts}: must have role, group and split of each domain; it is damaged")
    return [DomainFact(*fact) for fact in facts]


def domain_results(record: Record) -> list[DomainResult]:
    """Returns the accuracies of an evaluation by domain."""
    facts = domain_facts(record)
    trained = [position not in record.test_domains for position in range(len(facts))]
    groups = {fact.group for fact, used in zip(facts, trained, strict=True) if used}
    roles = ["training" if used else _test_role(fact, groups) for fact, used in zip(facts, trained, strict=True)]
    counts = [
        [count([position], split) for count in (record.images, record.independent_images) for split in ("in", "out")]
        for position in range(len(facts))
    ]
    rows = zip(domain_names([record]), roles, trained, record.in_acc, record.out_acc, counts, strict=True)
    return [DomainResult(*row, *images) for *row, images in rows]


def _test_role(fact: DomainFact, trained: set[str]) -> str:
    """Describes a domain that was not trained on, and whether other images of its group were."""
    if fact.role == "train":
        return "held out"
    words = {"id": "in-distribution test", "ood": "out-of-distribution test"}.get(fact.role, "test")
    if POOLED in trained:  # one training domain with the images of all groups, so no group is unseen for certain
        return words
    return f"{words}, group {'trained on' if fact.group in trained else 'not trained on'}"


def losses_in_effect(record: Record) -> list[str]:
    """Describes the auxiliary losses with their coefficients. Losses without effect are left out."""
    losses = []
    for loss, (option, words) in _LOSSES.items():
        coefficient = record.args.get(option, LOSS_COEFFICIENTS.get(option, 0.0))
        if coefficient and record.losses.get(loss):
            losses.append(f"{words} x {coefficient:g}")
    return losses


def splits_in_words(record: Record) -> list[str]:
    """Describes the splits of the domains, one sentence for each kind of split."""
    out, seed = 100 * record.args.get("holdout_fraction", 0.2), record.args["trial_seed"]
    facts = domain_facts(record)
    roles = {fact.role for fact in facts if fact.split == OFFICIAL}
    parts = {
        "train": "training domains: training images (in), validation images (out)",
        "id": "in-distribution test domains: test images (in)",
        "ood": "out-of-distribution test domains: test images (in), validation images of that kind, if any (out)",
    }
    sentences = {
        RANDOM: f"each domain is split at random, by trial seed {seed}, into {100 - out:.1f}% (in) and {out:.1f}% "
        "(out)",
        GROUP: f"each domain is split by groups of images ({record.args.get('group_column')}), by trial seed {seed}, "
        f"into about {100 - out:.1f}% (in) and {out:.1f}% (out)",
        OFFICIAL: f"the data's own; {'; '.join(words for role, words in parts.items() if role in roles)}",
        PHOTOGRAPH: "by photograph, the same in all domains: 60% for training, 20% for validation (out), 20% for "
        "testing",
    }
    return [sentences[kind] for kind in dict.fromkeys(fact.split for fact in facts)]
