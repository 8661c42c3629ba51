"""The command line of visualize.py: the pictures and numbers of each command, and its errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.sprites import CLASSES, sprites
from tests.invented import invented_records
from tests.load_tool import run_tool
from tests.saved_run import saved_run
from timm_moe_dg.analysis.maps import routing_maps
from timm_moe_dg.analysis.run_view import open_run

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.slow  # every test runs the tool, most a network
ARGS = {"dataset": "sprites", "data_dir": None, "test_domains": [3], "img_size": 32, "model": "gmoe_tiny_patch16"}
QUICK = ["--max-images", "16", "--permutations", "19"]


def make_run(folder: Path, name: str, **args: object) -> Path:
    saved_run(folder, name, CLASSES, {**ARGS, "model": name, **args})
    records = [record.to_json() for record in invented_records((3,), num_domains=5)]
    (folder / "results.jsonl").write_text("\n".join(records) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "gmoe", "gmoe_tiny_patch16")


def visualize(*words: object) -> None:
    run_tool("visualize", *words)


def numbers(run: Path, name: str) -> dict:
    return json.loads((run / "figures" / f"{name}.json").read_text())


def refused(message: str, *words: object) -> None:
    with pytest.raises(SystemExit, match=message):
        visualize(*words)


def test_experts_of_a_class_in_every_domain_and_of_files(run, tmp_path):
    visualize("experts", run, "--class", CLASSES[2], "--columns", "3")
    images = numbers(run, "experts")["images"]
    assert [image["domain"] for image in images] == [domain.name for domain in sprites() for _ in range(3)]
    assert [image["image"] for image in images[:3]] == ["animal_0002", "animal_0010", "animal_0018"]
    view = open_run(run)
    maps = routing_maps(view.model, [(view.inputs([sprites()[1].image(10)]),)])
    (block,) = maps
    assert images[4]["blocks"][str(block)]["first_expert"] == maps[block].first[0].tolist()
    assert {"experts.png", "entropy.png"} <= {path.name for path in (run / "figures").iterdir()}
    for name in ("one", "two"):
        Image.new("RGB", (400, 300)).save(tmp_path / f"{name}.png")
    visualize("experts", run, "--images", tmp_path)
    assert [image["image"] for image in numbers(run, "experts")["images"]] == ["one.png", "two.png"]


def test_attention_beside_a_twin(run, capsys):
    visualize("attention", run, "--twin", run, "--columns", "1")
    attention, name = numbers(run, "attention"), "gmoe_tiny_patch16"
    assert set(attention["head_similarity"]) == {name, f"{name} (twin)"}
    assert torch.tensor(attention["maps"][name]).shape == (1, 3, 2, 2)
    value = attention["head_similarity"][name]
    assert f"mean cosine between two heads' maps, {name}: {value:.4f}" in capsys.readouterr().out


def test_attributes_of_sprites(run, capsys):
    visualize("attributes", run, *QUICK)
    tables = numbers(run, "attributes")["tables"]
    assert set(tables) == {"parts", "body", "ears", "tail", "head", "legs"}
    assert np.sum(tables["parts"]["counts"]) == 5 * 16 * 4  # every patch of every image once
    assert "parts: NMI" in capsys.readouterr().out


def test_invariance_of_sprites_and_of_untrained_routers(run):
    visualize("invariance", run, *QUICK)
    trained = numbers(run, "invariance")
    assert len(trained["pairs"]) == 10
    assert trained["angles"]["turned"] == 30.0
    visualize("invariance", run, *QUICK, "--untrained-router")
    assert trained != json.loads((run / "figures" / "untrained_router" / "invariance.json").read_text())
    assert trained == numbers(run, "invariance")


def test_curves_need_no_network(tmp_path):
    run = make_run(tmp_path, "gmoe_tiny_patch16")
    (run / "best" / "model.safetensors").unlink()
    visualize("curves", run)
    assert (run / "figures" / "curves.png").stat().st_size > 2000
    refused(r"holds no network in best/", "experts", run)


def test_a_folder_of_photographs_is_paired_by_name_and_has_no_parts(tmp_path):
    for domain in sprites()[:2]:
        for index in range(8):
            path = tmp_path / domain.name / CLASSES[index] / f"{index}.png"
            path.parent.mkdir(parents=True)
            domain.image(index).save(path)
    other = make_run(tmp_path.with_name("folder_run"), "gmoe_tiny_patch16", dataset="folder", data_dir=str(tmp_path))
    cub, same, quick = tmp_path.with_name("cub"), "--split-by-photograph", ("--permutations", "9")
    refused(r"no two domains are known to hold the same pictures; .*--split-by-photogr", "invariance", other, *quick)
    visualize("invariance", other, *quick, same)
    (pair,) = numbers(other, "invariance")["pairs"]
    assert (pair["domains"], pair["pictures"]) == (["night", "paper"], 8)
    refused(r"cub=None: folder has no part maps; give --cub", "attributes", other)
    refused(r"lacks images\.txt, bounding_boxes\.txt", "attributes", other, "--cub", tmp_path)
    write_cub(cub)
    visualize("attributes", other, "--cub", cub, *quick)
    assert numbers(other, "attributes")["images"] == 14
    assert numbers(other, "attributes")["tables"]["parts"]["rows"] == ["back", "left eye", "background"]


def write_cub(root: Path) -> None:
    """Lacks the last of the eight photographs."""
    (root / "parts").mkdir(parents=True)
    (root / "images.txt").write_text("".join(f"{i + 1} {CLASSES[i]}/{i}.jpg\n" for i in range(7)))
    (root / "bounding_boxes.txt").write_text("".join(f"{i + 1} 0 0 24 48\n" for i in range(7)))
    (root / "parts" / "parts.txt").write_text("1 back\n2 left eye\n")
    rows = "".join(f"{i + 1} 1 9 9 1\n{i + 1} 2 0 0 0\n" for i in range(7))
    (root / "parts" / "part_locs.txt").write_text(rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experts", "--class", "cow"], "DataError: class='cow'"),
        (["domains"], "ArgumentError: model='MoeVisionTransformer'"),
        (["forced"], "ArgumentError: model='MoeVisionTransformer'"),
        (["attention", "--twin", "nowhere"], "ArgumentError: run='nowhere'"),
        (["experts", "--dataset", "x"], "error: no option --dataset"),
    ],
)
def test_a_mistake_is_one_line(run, words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        visualize(words[0], run, *words[1:])
    line = capsys.readouterr().err.strip() if caught.value.code == 2 else str(caught.value)
    assert line.startswith(f"visualize.py: {message}")
    assert "\n" not in line


def test_a_dense_run_says_so(run, monkeypatch):
    dense = __import__("timm").create_model("deit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3)
    monkeypatch.setattr("timm_moe_dg.analysis.run_view.load_trained", lambda *args, **options: dense)
    for command in ("experts", "attributes", "invariance"):
        refused(r"ArgumentError: model='VisionTransformer': is a dense model without", command, run)
    visualize("attention", run, "--columns", "1")  # a dense model has attention too
