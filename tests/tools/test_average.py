"""Averages of finished runs, as a user makes them."""

import csv
import json
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

import timm_moe_dg  # noqa: F401 (registers the models)
from tests.load_tool import run_tool
from tests.storage.toy_runs import content, killed_at
from timm_moe_dg.protocols.records import read_records
from timm_moe_dg.protocols.selection import held_out_score, training_domain_validation, validation_score

pytestmark = pytest.mark.slow  # whole runs

SIZE = ["patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "moe_layers=(1,)", "num_experts=2"]
RUN = ["--model", "gmoe_tiny_patch16", "--model-kwargs", *SIZE, "--workers", "0", "--cpu-threads", "1"]
RUN += ["--batch-size", "8", "--steps", "6", "--eval-freq", "3", "--lr", "0.01"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run from random weights, two that start from it, one with a learning rate of 0, and one of another seed."""
    output = tmp_path_factory.mktemp("runs")
    start = ["--initial-checkpoint", output / "start" / "best" / "model.safetensors"]
    further = {
        "start": [],
        "a": ["--seed", 1, *start],
        "b": ["--seed", 2, *start, "--weight-decay", 0.1],
        "still": ["--lr", 0],
        "apart": ["--seed", 3],
    }
    for name, words in further.items():
        run_tool("finetune", *RUN, "--output", output, "--experiment", name, *words)
    return output


@pytest.fixture
def average(runs, tmp_path):
    """Averages runs by name and returns the folder."""

    def run(*names, output="average", words=()):
        run_tool("average", *(runs / name for name in names), "--output", tmp_path / output, "--workers", 0, *words)
        return tmp_path / output

    return run


def weights(folder):
    return load_file(folder / "model.safetensors")


def evaluated(folder, capfd):
    """The line that evaluate prints about out-splits of rot_15."""
    capfd.readouterr()
    run_tool("evaluate", "--model", folder, "--workers", 0, "--split", "out", "--domains", "all")
    return next(line for line in capfd.readouterr().out.splitlines() if line.startswith("rot_15"))


def card_of(folder):
    run_tool("push_to_hub", folder, "--repo-id", "me/x", "--dry-run", "--output", folder.parent / "hub")
    return next((folder.parent / "hub").rglob("README.md")).read_text()


def test_a_soup_is_the_mean_and_loads_and_counts_like_a_run(runs, average, capfd):
    soup = average("a", "b")
    first, second, mean = (weights(folder / "best") for folder in (runs / "a", runs / "b", soup))
    assert all(torch.allclose(mean[name], (first[name] + second[name]) / 2) for name in mean)
    (record,) = read_records(soup / "results.jsonl")
    assert record.averaged
    assert record.args["average_of"] == ["a", "b"]
    assert "weight_decay" not in record.args  # in which they differ
    network = timm.create_model(f"local-dir:{soup / 'best'}", pretrained=True)
    assert all(torch.equal(value, mean[name]) for name, value in network.state_dict().items())
    assert f"{record.out_acc[1]:.4f}" in evaluated(soup, capfd)
    run_tool("collect_results", soup, runs / "a")
    assert "ERM + uniform" in capfd.readouterr().out
    card = card_of(soup)
    assert "average a b --method uniform --output DIR" in card
    assert "single run" not in card


def test_diwa_is_not_below_its_best_member(runs, average):
    diwa = average("a", "b", words=["--method", "diwa"])
    (record,) = read_records(diwa / "results.jsonl")
    best = max(validation_score(row) for name in "ab" for row in read_records(runs / name / "results.jsonl"))
    assert validation_score(record) >= best
    assert set(record.args["average_of"]) <= {"a", "b"}


def test_wise_ft_ends_at_the_start_and_at_the_run(runs, average):
    for name, start in (("a", "start"), ("still", "still")):  # with a file, and with a seed, to start from
        wise = average(name, output=name, words=["--method", "wise_ft", "--alpha", "0", "1"])
        for alpha, expected in (("0", start), ("1", name)):
            found, expected = weights(wise / f"alpha_{alpha}" / "best"), weights(runs / expected / "best")
            assert all(torch.equal(found[key], expected[key]) for key in expected)
        (record,) = read_records(wise / "alpha_0" / "results.jsonl")
        assert record.args["average_method"] == "wise_ft --alpha 0"


def test_wise_ft_refuses_a_start_that_changed_since(runs, average, tmp_path):
    start = shutil.copy(runs / "start" / "best" / "model.safetensors", tmp_path / "start.safetensors")
    run_tool("finetune", *RUN, "--experiment", "moved", "--output", tmp_path, "--initial-checkpoint", start)
    shutil.copy(runs / "still" / "best" / "model.safetensors", start)
    with pytest.raises(SystemExit, match=r"initial_checkpoint='.*start.safetensors': .*other weights under this name"):
        average(tmp_path / "moved", words=["--method", "wise_ft"])
    assert not (tmp_path / "average").exists()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a"], ["--method", "wise_ft", "--alpha", "0", "0.5"]),
        (["start", "apart"], ["--method", "ensemble"]),
    ],
)
def test_the_same_command_completes_an_average_that_was_killed(names, words, average, tmp_path, capfd):
    expected = content(average(*names, output="try_000/r", words=words))
    events = killed_at(None, tmp_path / "counted", partial(average, *names, output="counted/r", words=words))
    for number in range(3, events + 1, 17):
        folder = f"try_{number:03}"
        action = partial(average, *names, output=f"{folder}/r", words=words)
        killed_at(number, tmp_path / folder, action)
        completed = content(action())
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["r"]
        # Only the place is another
        assert {name: text.replace(folder.encode(), b"try_000") for name, text in completed.items()} == expected
    capfd.readouterr()
    assert content(average(*names, output="try_000/r", words=words)) == expected
    assert "finished before" in capfd.readouterr().out


def test_an_ensemble_of_other_preprocessing_is_scored_as_its_members_see_images(runs, average, tmp_path, capfd):
    for name, words in {"dark": ["--mean", 0, 0, 0, "--std", 0.1, 0.1, 0.1], "plain": []}.items():
        run_tool("finetune", *RUN, "--output", tmp_path, "--experiment", name, *words)
    paths = (tmp_path / "dark", tmp_path / "plain")
    results = [
        average(*order, output=order[0].name + "_first", words=["--method", "ensemble"])
        for order in (paths, paths[::-1])
    ]
    first, second = (read_records(result / "results.jsonl")[0] for result in results)
    assert (first.in_acc, first.out_acc) == (second.in_acc, second.out_acc)
    for result in results:
        assert f"{first.out_acc[1]:.4f}" in evaluated(result, capfd)
    with pytest.raises(SystemExit, match=r"has mean=.*--method ensemble averages such runs"):
        average(*paths, words=["--method", "uniform"])


def test_predict_averages_the_probabilities_of_an_ensemble_and_other_tools_name_a_member(runs, average, tmp_path):
    ensemble = average("start", "apart", words=["--method", "ensemble"])
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)).save(tmp_path / "a.png")

    def probabilities(model):
        output = tmp_path / f"{model.name}.csv"
        run_tool("predict", tmp_path / "a.png", "--model", model, "-j", 0, "--top-k", 10, "--output", output, "--force")
        _, row = csv.reader(output.read_text().splitlines())
        return {name: float(value) for name, value in zip(row[1:-1:2], row[2:-1:2], strict=True)}

    # The members without the temperatures of their runs
    first, second, both = (
        probabilities(model) for model in (*(ensemble / "best" / member for member in "01"), ensemble)
    )
    assert both == pytest.approx({name: (first[name] + second[name]) / 2 for name in first}, abs=2e-6)
    run_tool("report", ensemble)
    assert "average start apart --method ensemble" in (ensemble / "report.html").read_text()
    for tool, words in {
        "export": ["--model", ensemble],
        "push_to_hub": [ensemble, "--repo-id", "me/ensemble", "--dry-run", "--output", tmp_path / "hub"],
        "visualize": ["experts", ensemble],
        "finetune": [*RUN, "--model", f"local-dir:{ensemble / 'best'}", "--pretrained", "--output", tmp_path],
    }.items():
        with pytest.raises(SystemExit, match=r"is an ensemble( of 2 networks, .* give one: .*best.0)?"):
            run_tool(tool, *words)
    with pytest.raises(SystemExit, match=r"is an ensemble of 2 networks, .* give one"):
        average(ensemble, output="again")
    assert not (tmp_path / "again").exists()


WITHOUT_THE_PACKAGE = """
import sys
sys.modules["timm_moe_dg"] = None  # cannot be imported
import timm, torch
from PIL import Image
folder, picture, output = sys.argv[1:]
model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
config = timm.data.resolve_model_data_config(model)
images = timm.data.create_transform(**config)(Image.open(picture).convert("RGB")).unsqueeze(0)
torch.save(model(images).detach(), f"{output}/logits.pt")
torch.save(images, f"{output}/images.pt")
torch.onnx.export(model, (images,), f"{output}/plain.onnx", dynamo=False, input_names=["images"])
print(model.pretrained_cfg["label_names"][model(images).argmax()])
"""


def test_merged_experts_are_a_plain_network_that_timm_loads_without_this_package(
    runs, average, tmp_path, fresh_python, capfd
):
    plain = average("a", words=["--method", "experts"])
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "load.py").write_text(WITHOUT_THE_PACKAGE)
    paths = [plain / "best", tmp_path / "a.png", tmp_path]
    command = [fresh_python, tmp_path / "load.py", *paths]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    images, logits = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("images", "logits"))
    state, dense = weights(runs / "a" / "best"), timm.create_model(f"local-dir:{plain / 'best'}")
    means = {name.replace("experts.", ""): value.mean(0) for name, value in state.items() if ".experts." in name}
    rest = {name: value for name, value in state.items() if ".mlp.r" not in name and ".experts." not in name}
    dense.load_state_dict(rest | means)
    assert torch.allclose(dense.eval()(images), logits, atol=1e-5)
    session = onnxruntime.InferenceSession(tmp_path / "plain.onnx")
    assert np.allclose(session.run(None, {"images": images.numpy()})[0], logits.numpy(), atol=1e-4)
    capfd.readouterr()
    run_tool("predict", tmp_path / "a.png", "--model", plain, "-j", 0)
    assert capfd.readouterr().out.splitlines()[1].split(",")[1] == done.stdout.strip()
    (record,) = read_records(plain / "results.jsonl")
    expected = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8}
    assert (record.args["model"], record.args["model_kwargs"]) == ("deit_tiny_patch16_224", expected)
    assert record.args["average_method"] == "experts"
    card = card_of(plain)
    assert "import timm_moe_dg" not in card
    assert "average a --method experts --output DIR" in card


def test_the_example_compares_mixtures_with_their_merged_networks(runs, tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from merge_experts import main

    monkeypatch.setattr("timm_moe_dg.cli.tool.started_as", "")  # the command sets it
    monkeypatch.chdir(tmp_path)
    main("merged", str(runs / "a"), str(runs / "start"))
    lines = [line for line in capfd.readouterr().out.splitlines() if " MB" in line]
    assert [line.split(": ")[0] for line in lines] == ["mixture", "merged, mean", "merged, by use", "dense"]
    (record,) = read_records(tmp_path / "merged" / "alpha_0" / "a" / "results.jsonl")
    accuracy, mixture = (
        100 * held_out_score(row)
        for row in (record, training_domain_validation(read_records(runs / "a" / "results.jsonl")))
    )
    assert lines[1].startswith(f"merged, mean: {accuracy:.1f} ± nan")
    assert f"{accuracy - mixture:+.1f} to the mixture" in lines[1]


@pytest.mark.parametrize(
    ("names", "words", "argument"),
    [
        ("ab", ["--method", "experts"], "runs="),
        ("a", ["--method", "experts", "--alpha", "0", "1"], "alpha=[0.0, 1.0]"),
        ("a", ["--method", "experts", "--at", "13.4", "52.5"], "at=(13.4, 52.5)"),
        ("ab", ["--at", "13.4", "52.5"], "at=[13.4, 52.5]"),
        ("ab", ["--alpha", "0.5"], "alpha=[0.5]"),
        (["start", "apart"], [], "apart': started from random weights of its own"),
        (["a", "start"], [], "has weights_sha256="),
        ("ab", ["--method", "wise_ft"], "runs="),
        ("a", ["--method", "wise_ft", "--alpha", "1.5"], "argument --alpha"),
        (["missing"], [], "no such folder"),
        (["a/checkpoints"], [], "holds no finished run"),
        (["a/best_oracle"], [], "was not saved"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_averaged_are_one_line(names, words, argument, average, tmp_path, capfd):
    with pytest.raises(SystemExit) as caught:
        average(*names, words=words)
    assert argument in f"{caught.value} {capfd.readouterr().err}"
    assert not (tmp_path / "average").exists()


def test_runs_on_other_data_or_of_another_model_are_named(runs, average, tmp_path):
    changes = (("model", "model", "gmoe_small_patch16"), ("data", "data", "0123456789ab"))
    for name, key, value in (*changes, ("soup", "average_method", "uniform")):
        other = shutil.copytree(runs / "b", tmp_path / name)
        args = yaml.safe_load((other / "args.yaml").read_text())
        (other / "args.yaml").write_text(yaml.safe_dump({**args, key: value}))
        rows = [json.loads(line) for line in (other / "results.jsonl").read_text().splitlines()]
        lines = [json.dumps({**row, "args": {**row["args"], key: value}}) for row in rows]
        (other / "results.jsonl").write_text("\n".join(lines) + "\n")
        with pytest.raises(SystemExit, match=f"has {key}='{value}', and "):
            average("a", other)
    full = tmp_path / "average"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds files of another run"):
        average("a", "b")
    assert (full / "notes.txt").read_text() == "mine"
