"""The fine-tuning script as a user runs it: launched with accelerate, on digits and on folders of images."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config

from tests.load_tool import TOOLS, read_rows, run_tool
from timm_moe_dg.data import get_benchmark, read_folder, split_domain
from timm_moe_dg.finetuning.plan import make_plan
from timm_moe_dg.finetuning.resume import parse_resumable
from timm_moe_dg.protocols.options import NO_EFFECT_ON_RESULTS, run_parser
from timm_moe_dg.protocols.records import Record, read_records
from timm_moe_dg.protocols.selection import training_domain_validation

SCRIPT = TOOLS / "finetune.py"
SIZE = ["embed_dim=48", "depth=3", "num_heads=3"]
GMOE = ["--model", "gmoe_tiny_patch16", "--model-kwargs", *SIZE, "moe_layers=(1,)", "num_experts=3"]
DENSE = ["--model", "deit_tiny_patch16_224", "--model-kwargs", *SIZE]
QUICK = ["--steps", "4", "--checkpoint-freq", "2", "--batch-size", "4", "--cpu-threads", "1"]
DIGITS_RUN = [*GMOE, *QUICK, "--test_envs", "5", "--lr", "0.002", "--drop-path", "0.2", "--eval-train"]


def launch(python, *words, launcher=("--cpu", "--num_processes", "1"), cwd=None, **environment):
    command = [python, "-m", "accelerate.commands.launch", *launcher, str(SCRIPT), *map(str, words)]
    root = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory, fresh_python):
    """A short run of a small GMoE on the digits, in the default place below an empty working directory."""
    folder = tmp_path_factory.mktemp("digits")
    result = launch(fresh_python, *DIGITS_RUN, cwd=folder)
    assert result.returncode == 0, result.stderr
    (run,) = (folder / "output").iterdir()
    return run, result


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """Three rotations and four classes of the digits as DOMAIN/CLASS/IMAGE."""
    root = tmp_path_factory.mktemp("images")
    for domain in get_benchmark("rotated_digits").read(None)[:3]:
        for index in range(100):
            if domain.targets[index] < 4:
                path = root / domain.name / f"class_{domain.targets[index]}" / f"{index}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                domain.image(index).save(path)
    return root


def reloaded_accuracy(run: Path, record: Record, domain, position: int) -> float:
    """Accuracy of best/ on a domain's in-split, by timm alone: its factory, its transform."""
    model = timm.create_model(f"local-dir:{run / 'best'}", pretrained=True).eval()
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    inside = split_domain(len(domain), position, trial_seed=record.args["trial_seed"]).inside
    with torch.no_grad():
        predicted = model(torch.stack([transform(domain.image(int(index))) for index in inside])).argmax(1)
    return sum(int(predicted[row]) == domain.targets[index] for row, index in enumerate(inside)) / len(inside)


@pytest.mark.slow
def test_digits_files_and_records(digits_run):
    run, _ = digits_run
    folders = {"best", "checkpoints"}
    files = {"args.yaml", "done", "learning_curves.png", "log.txt", "results.jsonl", "summary.csv"}
    assert {entry.name for entry in run.iterdir()} == folders | files
    records = read_records(run / "results.jsonl")
    assert [record.step for record in records] == [0, 2, 3]
    row = json.loads((run / "results.jsonl").read_text().splitlines()[-1])
    assert {f"env{domain}_{split}_acc" for domain in range(6) for split in ("in", "out")} < set(row)
    assert {"loss", "task_loss", "aux_loss", "step", "epoch", "step_time", "mem_gb", "args", "hparams"} < set(row)
    assert row["args"]["test_envs"] == [5]
    assert row["hparams"] == {"lr": 0.002, "weight_decay": 0.0, "batch_size": 4, "resnet_dropout": 0.0}
    assert row["loss"] == pytest.approx(row["task_loss"] + 0.01 * row["aux_loss"], abs=1e-6)
    assert row["aux_loss"] > 0
    assert row["epoch"] == pytest.approx(3 * 4 / 240)
    settings = yaml.safe_load((run / "args.yaml").read_text())
    assert settings["test_domains"] == [5]
    assert settings["model_kwargs"]["moe_layers"] == [1]
    assert settings["img_size"] == 32
    assert [row["step"] for row in read_rows(run / "summary.csv")] == ["0", "2", "3"]


@pytest.mark.slow
def test_best_reloads_with_the_recorded_accuracy(digits_run):
    run, _ = digits_run
    record = training_domain_validation(read_records(run / "results.jsonl"))
    domains = get_benchmark("rotated_digits").read(None)
    for position in (1, 5):
        assert reloaded_accuracy(run, record, domains[position], position) == pytest.approx(record.in_acc[position])
    config = json.loads((run / "best" / "config.json").read_text())
    assert config["label_names"] == list("0123456789")


@pytest.mark.slow
def test_settings_repeat_the_run_whatever_the_workers(digits_run, tmp_path):
    run, _ = digits_run
    run_tool("finetune", "-c", run / "args.yaml", "--output", tmp_path, "--experiment", "again", "--workers", 0)
    for record, again in zip(
        *(read_records(path / "results.jsonl") for path in (run, tmp_path / "again")), strict=True
    ):
        assert (again.losses, again.in_acc, again.out_acc) == (record.losses, record.in_acc, record.out_acc)
    first, second = (load_file(path / "best" / "model.safetensors") for path in (run, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


CHANGES = (
    ["--trial-seed", "1"],
    ["--hparams-seed", "2"],
    ["--algorithm", "IRM"],
    ["--dataset", "colored_digits", "--test-domains", "0"],
)


@pytest.mark.slow
@pytest.mark.parametrize("change", [*CHANGES, ["--averaging", "swad", "--test-domains", "1"]], ids=" ".join)
def test_settings_with_something_changed_are_the_same_experiment(digits_run, change):
    def identity(*words):
        plan = make_plan(parse_resumable(run_parser(), words))
        return {name: value for name, value in plan.identity().items() if name not in NO_EFFECT_ON_RESULTS}

    run, _ = digits_run
    assert identity("-c", str(run / "args.yaml"), *change) == identity(*DIGITS_RUN, *change)


@pytest.mark.slow
def test_folder_upcycled_from_a_dense_checkpoint(image_folder, tmp_path, capsys):
    torch.manual_seed(0)
    kwargs = {"embed_dim": 48, "depth": 3, "num_heads": 3}
    dense = timm.create_model("deit_tiny_patch16_224", num_classes=11, img_size=32, **kwargs)
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    words = ["--dataset", "folder", "--data-dir", image_folder, "--img-size", "32", "--output", tmp_path / "runs"]
    words += ["--initial-checkpoint", tmp_path / "dense.safetensors", "--experiment", "a", "--test-domains", "1"]
    run_tool("finetune", *words, *GMOE, *QUICK, "--lr", 0, "--workers", 1)
    assert "3 experts filled in 1 mixture layers" in capsys.readouterr().out
    best = load_file(tmp_path / "runs" / "a" / "best" / "model.safetensors")
    for expert in best["blocks.1.mlp.experts.fc1.weight"]:
        assert torch.equal(expert, dense.blocks[1].mlp.fc1.weight)
    assert best["head.weight"].shape == (4, 48)
    (record, *_) = read_records(tmp_path / "runs" / "a" / "results.jsonl")
    domain = read_folder(image_folder)[1]
    assert reloaded_accuracy(tmp_path / "runs" / "a", record, domain, 1) == pytest.approx(record.in_acc[1])


@pytest.mark.slow
def test_two_processes_train_as_one_and_evaluate_every_image_once(image_folder, tmp_path, fresh_python):
    common = [*DENSE, *QUICK, "--dataset", "folder", "--data-dir", image_folder, "--img-size", "32", "--drop-path", "0"]
    common += ["--opt", "sgd", "--lr", "0.05", "--output", tmp_path, "--workers", "0", "--validation-batch-size", "7"]
    # Its discriminator is outside the launcher's wrapper: the method itself has to share those gradients
    common += ["--algorithm", "DANN", "--hparams", '{"lr_d": 0.002}', "--linear-steps", "2"]
    two = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "29611")
    result = launch(
        fresh_python, *common, "--experiment", "two", "--skip-unreadable", launcher=two, ACCELERATE_USE_CPU="true"
    )
    assert result.returncode == 0, result.stderr
    assert "processes 2, device cpu" in result.stdout
    assert result.stdout.count("selected step") == 1
    assert result.stdout.count("all images can be read") == 1
    run_tool("finetune", *common, "--experiment", "one")
    one, two = (read_records(tmp_path / name / "results.jsonl") for name in ("one", "two"))
    for record, other in zip(one, two, strict=True):
        # Gradients are summed in another order; an image that counts twice would change means by a percent
        assert other.losses["loss"] == pytest.approx(record.losses["loss"], rel=1e-5)
        assert other.out_loss == pytest.approx(record.out_loss, rel=1e-5)
        assert (other.in_acc, other.out_acc) == (record.in_acc, record.out_acc)
    assert one[0].out_loss != one[-1].out_loss


@pytest.mark.slow
def test_a_silent_world_of_one_is_refused(tmp_path, fresh_python):
    result = launch(
        fresh_python, *DENSE, *QUICK, "--output", tmp_path / "runs", launcher=("--cpu", "--num_processes", "2")
    )
    assert result.returncode != 0
    assert "num_processes=1: more were asked for" in result.stderr
    assert not (tmp_path / "runs").exists()


def unreadable(root):
    for domain in "ab":
        for index in range(6):
            path = root / domain / "cat" / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8)).save(path)
    (root / "b" / "cat" / "3.png").write_bytes(b"garbage")


FOLDER = ["--dataset", "folder", "--data-dir", "DATA"]
MISTAKES = {
    "empty folder": (FOLDER, Path.mkdir, "DataError: data_dir="),
    "no folder given": (FOLDER[:2], None, "DataError: data_dir=None"),
    "unreadable": ([*FOLDER, "--workers", "1"], unreadable, r"ImageReadError: image='.*b/cat/3\.png'"),
    "model": (["--model", "gmoe_tny_patch16"], None, "ArgumentError: model="),
    "checkpoint": (["--initial-checkpoint", "DATA"], None, "CheckpointError: initial_checkpoint="),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_behind(mistake, tmp_path, monkeypatch):
    words, prepare, complaint = MISTAKES[mistake]
    data = tmp_path / "data"
    if prepare:
        prepare(data)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    words = [str(data) if word == "DATA" else word for word in words]
    with pytest.raises(SystemExit, match=rf"^finetune\.py: {complaint}") as caught:
        run_tool("finetune", *DENSE, *QUICK, "--img-size", 32, *words)
    assert "Traceback" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
