"""MoGE from the command line: training with metadata, its options, the baselines, and the pictures of a run."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from sklearn.metrics import normalized_mutual_info_score

from tests.load_tool import load_tool
from timm_moe_dg.analysis import domains_at
from timm_moe_dg.data.readers.digits import geo_digits
from timm_moe_dg.protocols.records import read_records

pytestmark = pytest.mark.slow  # every test has a run

SIZE = ["patch_size=16", "depth=2", "embed_dim=24", "num_heads=3"]
MOGE = ["--model", "moge_tiny", "--model-kwargs", *SIZE, "moe_layers=(0,1)", "metadata_drop=0.0"]
QUICK = ["--dataset", "geo_digits", "--steps", "3", "--checkpoint-freq", "5", "-b", "4", "--workers", "0",
         "--cpu-threads", "1", "--validation-batch-size", "500"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("geo")
    load_tool("finetune").main([*MOGE, *QUICK, "--output", str(folder), "--experiment", "moge", "--cka-tokens", "8"])
    return folder / "moge"


def test_records_hold_each_loss_and_the_scores_of_both_roles(run: Path) -> None:
    records = read_records(run / "results.jsonl")
    assert [record.step for record in records] == [0, 2]
    assert set(records[0].losses) == {"loss", "task_loss", "aux_loss", "cka_loss", "supcon_loss"}
    losses = records[0].losses
    total = losses["task_loss"] + 0.01 * losses["aux_loss"] + 0.01 * losses["cka_loss"] + 0.1 * losses["supcon_loss"]
    assert losses["loss"] == pytest.approx(total, abs=1e-5)
    assert set(records[-1].roles["id"]["num_samples"].values()) == {300}
    assert records[-1].roles["ood"]["num_samples"] == {"Oceania": 300}
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
    assert record.roles["id"]["group_accuracy"]["Asia"] == pytest.approx(accuracy, abs=0.004)


def test_pictures_and_their_numbers(run: Path) -> None:
    pytest.importorskip("matplotlib")
    load_tool("visualize").main([str(run), "--map-step", "15", "-b", "500"])
    figures = run / "figures"
    for name in ("map", "routing", "forced_experts", "curves"):
        assert (figures / f"{name}.png").stat().st_size > 2000
    findings = json.loads((figures / "analysis.json").read_text())
    model = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True)
    domains = [domain for domain in geo_digits() if domain.role == "id"]
    discovered = domains_at(model, torch.cat([torch.tensor(domain.metadata) for domain in domains]))
    expected = normalized_mutual_info_score(torch.arange(5).repeat_interleave(300), discovered)
    assert findings["nmi"] == pytest.approx(expected, abs=1e-9)
    assert findings["groups"] == ["Africa", "Asia", "Europe", "North America", "South America"]
    assert [sum(row) for row in findings["images_by_group_and_domain"]] == [300] * 5
    assert sum(findings["forced_experts"]["num_samples"]) == 1500


def test_another_role_or_another_network_makes_pictures_and_numbers_again(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("figures"))

    def files(*words: str) -> tuple[dict, set[str]]:
        load_tool("visualize").main([*words, str(copy), "-b", "500"])
        names = {path.name for path in (copy / "figures").iterdir()}
        return json.loads((copy / "figures" / "analysis.json").read_text()), names

    files("domains", "--map-step", "15")
    both, names = files("forced")
    assert {"nmi", "forced_experts"} <= both.keys()
    assert names == {"analysis.json", "map.png", "routing.png", "forced_experts.png"}
    of_ood, names = files("forced", "--role", "ood")
    assert of_ood["role"] == "ood"
    assert sum(of_ood["forced_experts"]["num_samples"]) == 300
    assert "nmi" not in of_ood
    assert names == {"analysis.json", "forced_experts.png"}
    shutil.copytree(copy / "best_oracle", copy / "best", dirs_exist_ok=True)
    renewed, names = files("domains", "--role", "ood", "--map-step", "15")
    assert "forced_experts" not in renewed
    assert names == {"analysis.json", "map.png", "routing.png"}


def test_beyond_the_coverage_radius_every_tool_lets_the_shared_expert_answer(run: Path, tmp_path: Path) -> None:
    words = [*MOGE, *QUICK, "--output", str(tmp_path), "--experiment", "covered", "--cka-tokens", "8"]
    load_tool("finetune").main([*words, "--coverage-radius", "auto"])
    best, before = (f"local-dir:{folder / 'best_oracle'}" for folder in (tmp_path / "covered", run))  # the last step's
    args = json.loads((tmp_path / "covered" / "best_oracle" / "config.json").read_text())["model_args"]
    assert 20.0 < args["coverage_radius"] < 1000.0

    def oceania(name: str, model: str, *words: str) -> object:
        load_tool("evaluate").main(["--model", model, "--workers", "0", "--output", str(tmp_path / name), *words])
        return json.loads((tmp_path / name / "metrics.json").read_text())["domains"]["ood Oceania"]

    shared = oceania("shared", best, "--expert-mode", "shared")
    routed = oceania("routed", best, "--coverage-radius", "inf")
    assert oceania("covered-again", best) == shared != routed
    assert oceania("before", before) == routed  # the radius has no part in training
    assert oceania("before-covered", before, "--coverage-radius", "200") == shared

    load_tool("visualize").main(["domains", str(tmp_path / "covered"), "--role", "ood", "--map-step", "15"])
    findings = json.loads((tmp_path / "covered" / "figures" / "analysis.json").read_text())
    assert findings["images_by_group_and_domain"] == [[0] * 6 + [300]]


def test_prediction_takes_a_radius(run: Path, tmp_path: Path) -> None:
    domain = next(domain for domain in geo_digits() if domain.group == "Oceania")
    domain.image(0).save(tmp_path / "a.png")
    (tmp_path / "where.csv").write_text(f"path,lon,lat\na.png,{','.join(map(str, domain.metadata[0]))}\n")
    words = [str(tmp_path / "a.png"), "--model", f"local-dir:{run / 'best'}", "-j", "0", "--output"]
    place = ["--metadata", str(tmp_path / "where.csv")]
    for name, more in {"shared": [], "covered": [*place, "--coverage-radius", "100"], "routed": place}.items():
        load_tool("predict").main([*words, str(tmp_path / f"{name}.csv"), *more])
    shared, covered, routed = ((tmp_path / f"{name}.csv").read_text() for name in ("shared", "covered", "routed"))
    assert covered == shared != routed


def test_without_matplotlib_the_numbers_are_written(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(run / "figures", ignore_errors=True)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    load_tool("visualize").main([str(run), "--map-step", "15", "-b", "500"])
    assert [path.name for path in (run / "figures").iterdir()] == ["analysis.json"]
    assert {"nmi", "forced_experts"} <= json.loads((run / "figures" / "analysis.json").read_text()).keys()
    for name in ("curves", "map", "routing", "forced_experts"):
        assert f"{name}.png is not drawn: drawing needs matplotlib" in caplog.text


def test_a_new_head_on_the_frozen_shared_path(run: Path, tmp_path: Path) -> None:
    start = run / "best" / "model.safetensors"
    words = ["--initial-checkpoint", str(start), "--freeze", "backbone", "--expert-mode", "shared"]
    load_tool("finetune").main([*MOGE, *QUICK, *words, "--output", str(tmp_path), "--experiment", "se"])
    before, after = load_file(start), load_file(tmp_path / "se" / "best" / "model.safetensors")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"head.weight", "head.bias"}
    record = read_records(tmp_path / "se" / "results.jsonl")[-1]
    assert record.losses["supcon_loss"] == 0.0  # nothing is routed, so there are no discovered domains
    configs = [json.loads((folder / "best" / "config.json").read_text()) for folder in (run, tmp_path / "se")]
    assert [config["expert_mode"] for config in configs] == ["routed", "shared"]


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("erm_le_tiny_patch16", []),
        ("d3g_tiny_patch16", ["relation_query=wrap"]),
        ("gmoe_tiny_patch16", ["moe_layers=(1,)"]),
    ],
)
def test_baselines_run_through_the_same_command(model: str, extra: list[str], tmp_path: Path) -> None:
    words = ["--model", model, "--model-kwargs", *SIZE, *extra, "--output", str(tmp_path), "--experiment", "baseline"]
    load_tool("finetune").main([*QUICK, *words])
    record = read_records(tmp_path / "baseline" / "results.jsonl")[-1]
    assert set(record.roles) == {"id", "ood", "id_val"}
    assert "cka_loss" not in record.losses


def test_a_dense_baseline_is_trained_on_one_region_alone(tmp_path: Path) -> None:
    others = [str(position) for position in range(1, 11)]
    words = ["--output", str(tmp_path), "--experiment", "africa", "--test-domains", *others]
    load_tool("finetune").main(["--model", "deit_tiny_patch16_224", "--model-kwargs", *SIZE, *QUICK, *words])
    assert read_records(tmp_path / "africa" / "results.jsonl")[-1].training_domains == (0,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "deit_tiny_patch16_224", "--expert-mode", "shared"], "expert_mode.*no metadata-routed experts"),
        (["--model", "erm_le_tiny_patch16", "--expert-mode", "shared"], "expert_mode.*no metadata-routed experts"),
        (["--cka-tokens", "1"], "num_tokens"),
    ],
)
def test_a_mistake_is_named(words: list[str], message: str, tmp_path: Path) -> None:
    sizes = ["--model-kwargs", *SIZE]
    with pytest.raises(SystemExit, match=message):
        load_tool("finetune").main(["--model", "moge_tiny", *QUICK, *words, *sizes, "--output", str(tmp_path)])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"visualize.py: ArgumentError: run=.*results.jsonl"):
        load_tool("visualize").main([str(tmp_path)])


def test_a_held_out_region_is_scored_and_drawn_with_all_its_images(tmp_path: Path) -> None:
    words = ["--test-domains", "Asia", "--output", str(tmp_path), "--experiment", "run"]
    load_tool("finetune").main([*MOGE, *QUICK, *words])
    run = tmp_path / "run"
    sizes = {domain.name: len(domain) for domain in geo_digits()}
    scores = read_records(run / "results.jsonl")[-1].roles
    validation = scores["ood_val"]["num_samples"]["Asia"]
    images = {"Asia": sizes["train Asia"] - validation + sizes["id Asia"], "Oceania": sizes["ood Oceania"]}
    assert scores["ood"]["num_samples"] == images
    assert "Asia" not in {**scores["id"]["num_samples"], **scores["id_val"]["num_samples"]}
    load_tool("visualize").main(["domains", str(run), "--role", "ood", "--map-step", "15", "-b", "500"])
    numbers = json.loads((run / "figures" / "analysis.json").read_text())
    counts = map(sum, numbers["images_by_group_and_domain"])
    assert dict(zip(numbers["groups"], counts, strict=True)) == images
    evaluated = load_tool("evaluate")
    evaluated.main(["--model", str(run), "--split", "in", "--workers", "0", "--output", str(tmp_path / "scores")])
    rows = (tmp_path / "scores" / "per_domain.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in rows if "test (ood)" in row} == {"train Asia", "id Asia", "ood Oceania"}
