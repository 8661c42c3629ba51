"""The folder of a run: its files without local paths, the origin of its weights, and the command that repeats it."""

import json
import subprocess

import pytest

from tests.hub.published import card_of_run, config_of, invented_records, write_run
from tests.load_tool import load_tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.hub.folder import fill_from_run, origin_of_run, training_command, without_local_paths
from timm_moe_dg.protocols.options import NO_EFFECT_ON_RESULTS


def test_the_command_gives_every_option_of_the_run_back():
    parser = load_tool("finetune").build_parser()
    words = ["--dataset", "folder", "--data-dir", "/home/me/my images", "--test-domains", "1", "2", "--pretrained"]
    words += ["--model-kwargs", "num_experts=4", "moe_layers=(8,10)", "router=linear", "--hparams", '{"lr": 0.1}']
    args = vars(parse_arguments(parser, [*words, "--drop-path", "0.2", "--seed", "3"]))
    args["model_kwargs"] = dict(args["model_kwargs"])
    command = training_command(json.loads(json.dumps({**args, "test_envs": [1, 2]})))
    assert max(map(len, command.splitlines())) < 160
    echo = "import json, sys; print(json.dumps(sys.argv[1:]))"
    shell = command.replace("accelerate launch -m timm_moe_dg finetune", f"python3 -c '{echo}'", 1)
    words = json.loads(subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout)
    again = vars(parse_arguments(parser, words))
    again["model_kwargs"] = dict(again["model_kwargs"])
    assert again.pop("model_kwargs") == {"num_experts": 4, "moe_layers": [8, 10], "router": "linear"}
    expected = {name: value for name, value in args.items() if name not in NO_EFFECT_ON_RESULTS} | {"data_dir": "DATA"}
    del expected["model_kwargs"]
    assert {name: again[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("args", "command"),
    [
        ({"test_envs": [], "filled_in": ["lr"], "lr": 0.1}, "-m timm_moe_dg finetune --test-domains none"),
        ({"mixed_precision": "bf16"}, "--mixed_precision bf16 -m timm_moe_dg finetune"),
    ],
)
def test_the_command_has_no_test_domains_and_the_launchers_precision(args, command):
    assert training_command({"dataset": "rotated_digits", **args}) == f"accelerate launch {command}"


def test_only_absolute_paths_are_shortened():
    args = {"data_dir": "/home/me/images", "model": "local-dir:/home/me/best", "steps": 3, "output": "output"}
    assert without_local_paths(args) == {**args, "data_dir": "images", "model": "local-dir:best"}
    assert without_local_paths({"group_column": r"/(P\d+)/"}) == {"group_column": r"/(P\d+)/"}
    kwargs = {"model_kwargs": {"backbone": "local-dir:/home/me/best", "depth": 2}}
    assert without_local_paths(kwargs) == {"model_kwargs": {"backbone": "local-dir:best", "depth": 2}}
    assert without_local_paths({"model": "hf-hub:org/name", "dataset": "hub:org/data"})["model"] == "hf-hub:org/name"


def test_hidden_pictures_are_not_published(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "figures").mkdir()
    for name in ("._learning_curves.png", "figures/._map.png", "figures/map.png", "best/calibration.safetensors"):
        (run / name).write_bytes(b"a picture")
    (tmp_path / "folder").mkdir()
    fill_from_run(tmp_path / "folder", run)
    names = sorted(str(path.relative_to(tmp_path / "folder")) for path in (tmp_path / "folder").rglob("*.png"))
    assert names == ["figures/map.png", "learning_curves.png"]
    assert (tmp_path / "folder" / "calibration.safetensors").read_bytes() == b"a picture"


@pytest.mark.parametrize(
    ("args", "base_model", "start", "license"),
    [
        ({"pretrained": False}, None, "random initialization", "unknown"),
        ({"initial_checkpoint": "/home/me/dense.safetensors"}, None, "the file `dense.safetensors`", "unknown"),
        ({"model": "hf-hub:org/name@main"}, "org/name", "[org/name](https://huggingface.co/org/name)", "apache-2.0"),
        ({"model": "local-dir:output/x/best"}, None, "a network of an earlier run", "unknown"),
    ],
)
def test_base_model_and_license_are_of_what_the_run_started_from(args, base_model, start, license, tmp_path):
    origin = origin_of_run(invented_records(**args))
    assert (origin.base_model, origin.start) == (base_model, start)
    card = card_of_run(tmp_path, **args)
    assert card.data.license == license
    assert f"| License of the weights | {license} |" in card.text
    # Whoever goes on from here inherits it
    assert config_of(tmp_path / "folder")["pretrained_cfg"]["license"] == license


def test_published_records_keep_their_numbers_and_lose_the_paths_of_this_machine(tmp_path):
    card_of_run(tmp_path, data_dir="/home/me/images", output="output")
    before, after = (
        [json.loads(line) for line in (tmp_path / place / "results.jsonl").read_text().splitlines()]
        for place in ("run", "folder")
    )
    assert [row["args"].pop("data_dir") for row in before] == ["/home/me/images"] * 3
    assert [row["args"].pop("data_dir") for row in after] == ["images"] * 3
    assert after == before
