"""Model cards, from the templates and facts in hub_cards/ and the numbers in a run's records."""

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from markupsafe import Markup
from torch import nn

from ..cli.text import code, markdown, one_line
from ..data import BENCHMARKS
from ..errors import CheckpointError
from ..networks.bands import bands_of
from ..networks.build import CONFIG, Config, read_config, without_origin
from ..networks.trained import label_names
from ..protocols.records import Record
from ..protocols.selection import counted, headlines, images, worst_groups
from .measured import RANDOM, domain_facts, domain_results, losses_in_effect, splits_in_words
from .origin import Origin, training_command

_TAGS = ["timm", "image-classification", "domain-generalization"]


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
    for row in domain_results(origin.selected) if origin.records else []:
        split, value = ("out", row.outside) if row.trained else ("in", row.inside)
        name = one_line(row.domain)
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
                    metric_name=f"Accuracy on the domain {name} ({row.role}), {split}-split",
                    metric_value=round(value, 4),
                )
            )
    return results


def _model_facts(folder: Path, config: Config, network: nn.Module) -> dict[str, object]:
    return {
        "architecture": config["architecture"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "num_classes": network.num_classes,
        "classes": label_names(network) or (),
        "config": config["pretrained_cfg"],
        "bands": bands_of(network).count,
        "band_names": bands_of(network).names,
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
    try:
        return environment.get_template(facts["template"]).render(page)
    except (jinja2.UndefinedError, TypeError) as error:  # of a configuration that timm loads nevertheless
        raise CheckpointError(f"{CONFIG}: lacks what a card states, or has it in another type ({error})") from error


def _run_facts(record: Record) -> dict[str, object]:
    return {
        "record": record,
        "args": record.args,
        "hparams": record.hparams,
        "results": domain_results(record),
        "headlines": headlines(record),
        "losses": losses_in_effect(record),
        "splits": splits_in_words(record),
        "random_split": any(fact.split == RANDOM for fact in domain_facts(record)),
        "benchmark": BENCHMARKS.get(record.args["dataset"]),
        "versions": record.args.get("versions"),
        "command": training_command(record.args),
    }
