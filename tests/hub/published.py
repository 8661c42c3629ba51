"""Small networks, and finished runs with invented records, for tests of publishing."""

import json
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import ModelCard
from PIL import Image
from torch import nn

from tests.models.cases import BY_NAME, SMALL, Case, randomize
from timm_moe_dg.hub.card import write_card
from timm_moe_dg.hub.folder import Origin, fill_from_network, fill_from_run, load_folder
from timm_moe_dg.hub.push import write_checksums
from timm_moe_dg.networks.build import data_config, save_network
from timm_moe_dg.protocols.records import Record

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "hub_cards"
REPOSITORY = "someone/network"
NAMES = [*BY_NAME, "erm_le_tiny_patch16", "d3g_tiny_patch16"]
CLASSES = ("cat", "dog", "elephant", "giraffe", "horse")
ACCURACIES = {0: (0.25, 0.125), 20: (0.5, 0.375), 40: (0.75, 0.25)}  # step -> (in-splits, out-splits)
MARGIN = 0.0625  # of one domain over the one before


def case_of(name: str) -> Case:
    """Sizes and inputs of a registered model."""
    return BY_NAME.get(name) or Case(name, "deit_in1k", "deit_tiny_patch16_224.fb_in1k", metadata="coordinates")


def fine_tuned(name: str = "gmoe_tiny_patch16", num_classes: int = len(CLASSES), **kwargs: Any) -> nn.Module:
    """A small network of a registered architecture, every weight and the classifier moved away from their start."""
    options = {**SMALL, "img_size": case_of(name).small_size, **kwargs} if name in NAMES else kwargs
    return randomize(timm.create_model(name, **{**options, "num_classes": num_classes})).eval()


def invented_records(
    roles: dict[str, Any] | None = None, hparams: dict[str, Any] | None = None, **args: Any
) -> list[Record]:
    """Three evaluations of a run on three domains, the first held out; validation picks the one at step 20."""
    options = {"dataset": "folder", "algorithm": "ERM", "test_envs": [0], "trial_seed": 1, "hparams_seed": 0, "seed": 7}
    options |= {"model": "gmoe_tiny_patch16", "holdout_fraction": 0.2, "pretrained": True, "initial_checkpoint": None}
    options |= {"domain_facts": [["train", f"domain {number}", "random"] for number in range(3)]}
    return [
        Record(
            step=step,
            epoch=step / 10,
            losses={"loss": 1.0},
            step_time=0.1,
            mem_gb=0.0,
            in_acc=tuple(inside + MARGIN * domain for domain in range(3)),
            out_acc=tuple(outside + MARGIN * domain for domain in range(3)),
            args={**options, **args},
            hparams=hparams or {"lr": 3e-5, "weight_decay": 0.0, "batch_size": 32},
            roles=roles or {},
        )
        for step, (inside, outside) in ACCURACIES.items()
    ]


def write_run(folder: Path, network: nn.Module | None = None, classes: tuple[str, ...] = CLASSES, **args: Any) -> Path:
    """Writes the files of a finished run that publishing reads."""
    network = fine_tuned() if network is None else network
    save_network(network, folder / "best", classes=classes, config=data_config(network))
    lines = [record.to_json() for record in invented_records(**args)]
    (folder / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    Image.effect_noise((8, 8), 80).save(folder / "learning_curves.png")
    (folder / "done").write_text("done")
    return folder


def card_of(run: Path) -> ModelCard:
    """Writes the folder to publish beside a run, with its card, which is returned."""
    folder = run.with_name("folder")
    folder.mkdir()
    origin = fill_from_run(folder, run)
    return write_card(folder, load_folder(folder), REPOSITORY, origin, CARDS)


def card_of_run(root: Path, network: nn.Module | None = None, **args: Any) -> ModelCard:
    """Writes a run below a folder, and the folder to publish with its card, which is returned."""
    return card_of(write_run(root / "run", network, **args))


def card_of_network(folder: Path, network: nn.Module, origin: Origin | None = None) -> ModelCard:
    """Writes the folder of a network to publish, with its card, which is returned, and checksums."""
    fill_from_network(folder, network)
    card = write_card(folder, load_folder(folder), REPOSITORY, origin or Origin("random initialization"), CARDS)
    write_checksums(folder)
    return card


def config_of(folder: Path) -> dict[str, Any]:
    """A folder's config.json."""
    return json.loads((folder / "config.json").read_text())
