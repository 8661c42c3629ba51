"""Writes the tables of docs/reference/ from the code: models and their options, data sets, training methods.

python -m tests.write_reference
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import timm_moe_dg
from timm_moe_dg.algorithms import ALGORITHMS, AVERAGING, Algorithm, Setup
from timm_moe_dg.data import Benchmark
from timm_moe_dg.data.benchmarks import DIGIT_ROWS, PHOTOGRAPH_ROWS, PLACE_ROWS
from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.layers import GeoMixtureOptions, GeoMoeMlp, MixtureOptions
from timm_moe_dg.layers.moe_mlp import RoutedMlp
from timm_moe_dg.models import MetadataRoutingOptions
from timm_moe_dg.networks.cost import count_macs

PAGES = Path(__file__).parent.parent / "docs" / "reference"
MARK = "<!-- {}: written by python -m tests.write_reference -->"
TABLE = re.compile(rf"(?P<mark>{MARK.format('(?P<name>[a-z ]+)')}\n\n)(?P<table>.*?)(?=\n<!-- end -->)", re.DOTALL)

ROWS = (*DIGIT_ROWS, *PHOTOGRAPH_ROWS, *PLACE_ROWS)  # without those that an imported module has registered
ROUTED_BY = {
    "CosineRouter": "token, cosine",
    "LinearRouter": "token, linear",
    "LocationEncoder": "coordinates",
    "LocationIdEmbedding": "location id",
}
# Option -> when to change it
WHEN = {
    "num_experts": "more kinds of images or places",
    "top_k": "1 is faster, more mixes experts",
    "router": "`linear` is SF-MoE's, two are controls",
    "router_kwargs": "another choice of experts",
    "capacity_factor": "one crowded expert fills the memory",
    "normalize_weights": "you repeat a paper's gate",
    "router_noise": "0 for repeatable training",
    "expert_drop": "more against overfitting",
    "expert_perturbation": "upcycled experts stay alike",
    "expert_width": "many small experts",
    "expert_reinit": "upcycled experts stay alike",
    "shared_expert": "MoGE: `False` if every image has metadata",
    "metadata_encoder": "other metadata than coordinates",
    "metadata_frozen": "`False` to train them too",
    "metadata_drop": "0.0 from random weights",
    "metadata_features": "few distinct places",
    "num_locations": "your number of locations",
    "seen_locations": "training sets it",
    "metadata_columns": "`--metadata-columns` sets it",
    "coverage_points": "`--coverage-radius` sets it",
    "coverage_radius": "tests far from training places",
}


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Renders a table of Markdown, narrow for the sake of its source."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"|{'|'.join(map(str, line))}|\n" for line in lines)


def registered_models() -> list[str]:
    """Names of the registered models with a backbone of their own."""
    return [name for name in timm_moe_dg.models.__all__ if timm.is_model(name)]


def _model_row(name: str) -> list[str]:
    model: Any = timm.create_model(name, weight_init="skip").eval()
    layers = [layer for layer in model.modules() if isinstance(layer, RoutedMlp)]
    blocks = [index for index, block in enumerate(model.blocks) if isinstance(block.mlp, RoutedMlp)]
    experts, routed_by, metadata = "none", "none, a baseline", []
    if layers:
        router: Any = layers[0].router
        experts = f"{router.num_experts}, {router.top_k} active"
        if geo := isinstance(layers[0], GeoMoeMlp):
            encoder = type(model.metadata_encoder.encoder).__name__
            metadata = [torch.tensor([0]) if encoder == "LocationIdEmbedding" else torch.zeros(1, 2)]
        experts += " and a shared one" if geo else ""
        every_second = blocks == list(range(0, len(model.blocks), 2))
        experts += ", in every second block" if every_second else f", in blocks {', '.join(map(str, blocks))}"
        routed_by = ROUTED_BY[encoder if geo else type(router).__name__]
    macs = count_macs(model, [torch.zeros(1, *model.pretrained_cfg["input_size"]), *metadata])
    count = sum(parameter.numel() for parameter in model.parameters())
    source = model.pretrained_cfg["hf_hub_id"]
    return [f"`{name}`", experts, routed_by, f"{count / 1e6:.2f} M", f"{macs / 1e9:.2f}", f"`{source}`"]


def models() -> str:
    """Renders the registered models."""
    heads = ["name", "experts", "routed by", "parameters", "GMACs", "dense weights"]
    return table(heads, map(_model_row, registered_models()))


def _meanings(options: type) -> dict[str, str]:
    """First sentence of each attribute's description in the docstrings of a dataclass and its bases."""
    text = "\n".join(cls.__doc__ or "" for cls in options.__mro__)
    items = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, re.MULTILINE)
    return {name: re.split(r"\.(?:\s|$)", re.sub(r"\s+", " ", meaning))[0] for name, meaning in items}


def _default(options: type, name: str) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    return f"`{defaults[name]}`" if name in defaults else "-"


def _options(*classes: type) -> str:
    """Renders the options of one class or more, with a column of defaults for each."""
    meanings = {name: meaning for options in reversed(classes) for name, meaning in _meanings(options).items()}
    names = dict.fromkeys(field.name for options in classes for field in dataclasses.fields(options))
    rows = [
        [f"`{name}`", *(_default(options, name) for options in classes), meanings[name], WHEN[name]] for name in names
    ]
    defaults = ["default"] if len(classes) == 1 else ["GMoE, SF-MoE", "MoGE"]
    return table(["option", *defaults, "meaning", "when to change it"], rows)


def _images(row: Benchmark) -> int | None:
    if row.takes_data_dir:
        return sum(row.images.values()) or row.published.get("images")
    return sum(map(len, row.read(None)))


def _dataset_row(row: Benchmark) -> list[object]:
    unknown: Any = "yours" if row.name in ("folder", "place_folder") else "see source"
    domains = len(row.domains) or ("yours" if unknown == "yours" else "fixed splits")
    classes = row.num_classes or row.published.get("classes") or unknown
    images = _images(row)
    batch = f"{row.hparams['batch_size']} x {row.domains_per_step or 'all'}"
    sizes = [domains, classes, f"{images:,}" if images else unknown]
    return [f"`{row.name}`", *sizes, f"{row.steps - 1:,}", batch, f"{row.hparams['lr']:g}"]


def data_sets() -> str:
    """Renders the sizes and the training defaults of the data sets."""
    heads = ["name", "domains", "classes", "images", "steps", "batch", "learning rate"]
    return table(heads, map(_dataset_row, ROWS))


def sources() -> str:
    """Renders where the data sets come from; those of one source share a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for row in ROWS:
        names.setdefault((row.source, row.license, row.layout), []).append(f"`{row.name}`")
    heads = ["name", "source", "license", "what `--data-dir` holds"]
    return table(heads, [[", ".join(same), *facts] for facts, same in names.items()])


def _reference(cls: type) -> str:
    """The first work in parentheses in a docstring, as a link if it has an arXiv number."""
    text = re.sub(r"\s+", " ", cls.__doc__ or "")
    found = re.search(r"\(([A-Z][^()]*?(?:19|20)\d\d)(?:, arXiv:([\d.]+))?[),;]", text)
    if found is None:
        return ""
    return f"[{found[1]}](https://arxiv.org/abs/{found[2]})" if found[2] else found[1]


def _hparams(defaults: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"`{name}` ({value:g})" for name, value in defaults)


# Word in an error message -> what a method needs
NEEDS = {"linear classifier": "linear classifier", "feature_info": "list of blocks"}


class _NoClassifier(nn.Module):
    """A network without classifier and list of blocks."""


def _needs(method: type[Algorithm]) -> str:
    needs = ["2 domains"] if method.MIN_DOMAINS == 2 else []
    try:
        method(Setup(_NoClassifier(), num_domains=3, num_classes=2))
    except ArgumentError as error:
        needs += [NEEDS[word] for word in NEEDS if word in str(error)]
    needs += [] if method.ACCUMULATES else ["whole steps"]
    needs += ["constant rate"] if method.OVERRIDES_LR else []
    return ", ".join(needs) or "nothing"


def methods() -> str:
    """Renders the training methods."""
    rows = [
        [f"`{name}`", _needs(method), _hparams(method.HPARAMS.items()), _reference(method)]
        for name, method in ALGORITHMS.items()
        if method.__module__.startswith("timm_moe_dg.")
    ]
    return table(["name", "needs", "hyper-parameters (default)", "reference"], rows)


def averages() -> str:
    """Renders the averages of weights."""
    rows = [[f"`{name}`", _hparams(cls.HPARAMS.items()), _reference(cls)] for name, cls in AVERAGING.items()]
    return table(["`--averaging`", "hyper-parameters (default)", "reference"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "models": models,
    "options of experts": lambda: _options(MixtureOptions, GeoMixtureOptions),
    "options of metadata": lambda: _options(MetadataRoutingOptions),
    "data sets": data_sets,
    "sources": sources,
    "methods": methods,
    "averages": averages,
}


def tables_in(page: str) -> dict[str, str]:
    """Returns the tables between a page's marks, by name."""
    return {match["name"]: match["table"] for match in TABLE.finditer(page)}


def write() -> None:
    """Writes all tables into their pages."""
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        written = TABLE.sub(lambda match: match["mark"] + TABLES[match["name"]](), text)
        if written != text:
            page.write_text(written)


if __name__ == "__main__":
    write()
