"""MoGE from the command line: training with metadata, its options, the baselines, and the pictures of a run."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from sklearn.metrics import normalized_mutual_info_score

import timm_moe_dg
from tests.data.files import read_few
from tests.load_tool import read_rows, run_tool
from timm_moe_dg.analysis.geography import domains_at
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.protocols.records import read_records

pytestmark = pytest.mark.slow  # every test has a run

SIZE = ["patch_size=16", "depth=2", "embed_dim=24", "num_heads=3"]
MOGE = ["--model", "moge_tiny", "--model-kwargs", *SIZE, "moe_layers=(0,1)", "metadata_drop=0.0"]
QUICK = ["--dataset", "geo_digits", "--steps", "3", "--checkpoint-freq", "5", "-b", "4", "--workers", "0",
         "--cpu-threads", "1", "--validation-batch-size", "500"]  # fmt: skip


def train(folder: Path, *words: object) -> Path:
    """Trains a run in `folder`/run."""
    run_tool("finetune", *QUICK, *words, "--output", folder, "--experiment", "run")
    return folder / "run"


def visualize(*words: str | Path) -> dict:
    """Draws pictures of the run that is among the words, and returns their numbers by file."""
    run_tool("visualize", *words, "-b", "500")
    (run,) = (word for word in words if isinstance(word, Path))
    return {path.stem: json.loads(path.read_text()) for path in (run / "figures").glob("*.json")}


@pytest.fixture(scope="module", autouse=True)
def few_images() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        read_few(patch, 6)
        yield


def geo_digits() -> list[Any]:
    return get_benchmark("geo_digits").read(None)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("geo"), *MOGE, "--cka-tokens", "8", "--save-rules", "oracle")


def test_records_hold_each_loss_and_the_scores_of_both_roles(run: Path) -> None:
    records = read_records(run / "results.jsonl")
    assert [record.step for record in records] == [0, 2]
    assert set(records[0].losses) == {"loss", "task_loss", "aux_loss", "cka_loss", "supcon_loss"}
    losses = records[0].losses
    total = losses["task_loss"] + 0.01 * losses["aux_loss"] + 0.01 * losses["cka_loss"] + 0.1 * losses["supcon_loss"]
    assert losses["loss"] == pytest.approx(total, abs=1e-5)
    assert set(records[-1].roles["id"]["num_samples"].values()) == {50}
    assert records[-1].roles["ood"]["num_samples"] == {"Oceania": 50}
    assert records[-1].test_domains == (5, 6, 7, 8, 9, 10)


def test_the_recorded_accuracy_was_measured_with_metadata(run: Path) -> None:
    model = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).eval()
    record = max(read_records(run / "results.jsonl"), key=lambda record: sum(record.out_acc[:5]))
    domain = next(domain for domain in geo_digits() if domain.name == "id Asia")
    pixels = torch.stack([torch.tensor(image) for image in domain.images]).float() / 255
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        right = model((pixels[:, None] - mean) / std, torch.tensor(domain.metadata)).argmax(1)
    accuracy = (right == torch.tensor(domain.targets)).double().mean().item()
    assert record.roles["id"]["group_accuracy"]["Asia"] == pytest.approx(accuracy, abs=0.021)


def test_pictures_and_their_numbers(run: Path) -> None:
    pytest.importorskip("matplotlib")
    findings = visualize(run)
    for name in ("map", "forced_experts", "curves"):
        assert (run / "figures" / f"{name}.png").stat().st_size > 2000
    model = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True)
    domains = [domain for domain in geo_digits() if domain.role == "id"]
    discovered = domains_at(model, torch.cat([torch.tensor(domain.metadata) for domain in domains]))
    expected = normalized_mutual_info_score(torch.arange(5).repeat_interleave(50), discovered)
    assert findings["analysis"]["nmi"] == pytest.approx(expected, abs=1e-9)
    assert findings["analysis"]["groups"] == ["Africa", "Asia", "Europe", "North America", "South America"]
    assert [sum(row) for row in findings["analysis"]["images_by_group_and_domain"]] == [50] * 5
    forced = [findings["forced_experts"], visualize("forced", run, "--role", "ood")["forced_experts"]]
    assert [(numbers["role"], sum(numbers["num_samples"])) for numbers in forced] == [("id", 250), ("ood", 50)]


def test_beyond_the_coverage_radius_every_tool_lets_the_shared_expert_answer(run: Path, tmp_path: Path) -> None:
    covered = train(tmp_path, *MOGE, "--cka-tokens", "8", "--coverage-radius", "auto", "--save-rules", "oracle")
    best, before = (f"local-dir:{folder / 'best_oracle'}" for folder in (covered, run))  # the last step's
    args = json.loads((covered / "best_oracle" / "config.json").read_text())["model_args"]
    assert 20.0 < args["coverage_radius"] < 1000.0

    def oceania(model: str, **options: object) -> dict[str, object]:
        scores = timm_moe_dg.evaluate(model, workers=0, **options).set_index("domain")
        return scores.loc["ood Oceania"].dropna().to_dict()

    shared = oceania(best, expert_mode="shared")
    routed = oceania(best, coverage_radius=float("inf"))
    assert oceania(best) == shared != routed
    assert oceania(before) == routed  # the radius has no part in training
    assert oceania(before, coverage_radius=200) == shared

    findings = visualize("domains", covered, "--role", "ood")["analysis"]
    assert findings["images_by_group_and_domain"] == [[0] * 6 + [50]]


def test_without_matplotlib_the_numbers_are_written(run, monkeypatch, caplog) -> None:
    shutil.rmtree(run / "figures", ignore_errors=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    visualize(run)
    assert {path.name for path in (run / "figures").iterdir()} == {"analysis.json", "forced_experts.json"}
    for name in ("curves", "map", "forced_experts"):
        assert f"{name}.png is not drawn: drawing needs matplotlib" in caplog.text


def test_a_new_head_on_the_frozen_shared_path(run: Path, tmp_path: Path) -> None:
    start = run / "best" / "model.safetensors"
    options = ["--freeze", "backbone", "--expert-mode", "shared"]
    shared = train(tmp_path, *MOGE, "--initial-checkpoint", start, *options)
    before, after = load_file(start), load_file(shared / "best" / "model.safetensors")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    record = read_records(shared / "results.jsonl")[-1]
    assert record.losses["supcon_loss"] == 0.0  # nothing is routed, so there are no discovered domains
    configs = [json.loads((folder / "best" / "config.json").read_text()) for folder in (run, shared)]
    assert [config["expert_mode"] for config in configs] == ["routed", "shared"]


@pytest.mark.parametrize(
    ("model", "extra"), [("erm_le_tiny_patch16", []), ("d3g_tiny_patch16", ["relation_query=wrap"])]
)
def test_baselines_run_through_the_same_command(model: str, extra: list[str], tmp_path: Path) -> None:
    baseline = train(tmp_path, "--model", model, "--model-kwargs", *SIZE, *extra)
    record = read_records(baseline / "results.jsonl")[-1]
    assert set(record.roles) == {"id", "ood", "id_val"}
    assert "cka_loss" not in record.losses


def test_a_held_out_region_is_scored_and_drawn_with_all_its_images(tmp_path: Path) -> None:
    run = train(tmp_path, *MOGE, "--test-domains", "Asia")
    sizes = {domain.name: len(domain) for domain in geo_digits()}
    scores = read_records(run / "results.jsonl")[-1].roles
    validation = scores["ood_val"]["num_samples"]["Asia"]
    images = {"Asia": sizes["train Asia"] - validation + sizes["id Asia"], "Oceania": sizes["ood Oceania"]}
    assert scores["ood"]["num_samples"] == images
    assert "Asia" not in {**scores["id"]["num_samples"], **scores["id_val"]["num_samples"]}
    numbers = visualize("domains", run, "--role", "ood")["analysis"]
    counts = map(sum, numbers["images_by_group_and_domain"])
    assert dict(zip(numbers["groups"], counts, strict=True)) == images
    run_tool("evaluate", "--model", run, "--split", "in", "--workers", 0, "--output", tmp_path / "scores")
    rows = read_rows(tmp_path / "scores" / "per_domain.csv")
    found = {row["domain"] for row in rows if row["role"] == "test (ood)"}
    assert found == {"train Asia", "id Asia", "ood Oceania"}
