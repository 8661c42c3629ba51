"""Values of options: what each reader takes and refuses, and runs in every form in which users name them."""

import argparse
from pathlib import Path

import pytest

from tests.load_tool import load_tool
from timm_moe_dg.cli.arguments import parse_arguments
from timm_moe_dg.cli.values import (
    between,
    fits,
    folder_name,
    fraction,
    fraction_to_1,
    int_from_2,
    json_object,
    key_value,
    kilometers_or_auto,
    model_source,
    non_negative,
    non_negative_int,
    output_file,
    position_or_name,
    positive,
    positive_int,
    run_folder,
    seed_number,
    shard_text,
    share,
    usable_device,
    weights_file,
)
from timm_moe_dg.protocols.options import FURTHER_RULES


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (json_object, {'{"lr": 1}': {"lr": 1}}, ["{lr: 1}", "[1]"]),
        (positive_int, {"1": 1}, ["0", "-3", "2.5", "2147483648"]),
        (non_negative_int, {"0": 0}, ["-1", "0.5"]),
        (int_from_2, {"2": 2}, ["1", "many"]),
        (seed_number, {"4294967295": 2**32 - 1}, ["4294967296"]),
        (non_negative, {"0": 0, "1e3": 1000}, ["-0.1", "inf", "nan"]),
        (fraction, {"0": 0, "0.9": 0.9}, ["1", "-0.1"]),
        (fraction_to_1, {"1": 1}, ["0", "1.1", "much"]),
        (share, {"0": 0, "1": 1}, ["-0.1", "1.1"]),
        (between, {"0.9": 0.9}, ["0", "1"]),
        (positive, {"0.1": 0.1}, ["0", "inf"]),
        (kilometers_or_auto, {"auto": "auto", "inf": float("inf")}, ["-1", "far"]),
        (position_or_name, {"@1": 1, "@-1": -1, "1": "1", "@x": "@x"}, []),
        (shard_text, {"0/3": "0/3"}, ["3/3", "-1/3", "1"]),
        (folder_name, {"a/b": "a/b"}, ["../a", "/a", "a\nb", "x" * 241, ""]),
        (output_file, {"new.json": Path("new.json")}, ["no such folder/file.json", "."]),
        (usable_device, {"cpu": "cpu"}, ["gpu"]),
        (
            key_value,
            {
                "a=4": ("a", 4),
                "a=(8,10)": ("a", (8, 10)),
                "a=None": ("a", None),
                "a=null": ("a", None),
                "a=cosine": ("a", "cosine"),
                "a='4'": ("a", "4"),
                "a=b=c": ("a", "b=c"),
                "a=false": ("a", False),
                "a=true": ("a", True),
                "a='false'": ("a", "false"),
            },
            ["a", "=4"],
        ),
    ],
)
def test_a_value_is_read_or_refused(read, good, bad):
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


@pytest.mark.parametrize("form", ["{run}", "{run}/best", "{run}/best/", "local-dir:{run}", "local-dir:{run}/best"])
def test_every_tool_takes_a_run_in_every_form(form, tmp_path):
    run = tmp_path / "resnet50"
    (run / "best").mkdir(parents=True)
    (run / "best" / "config.json").write_text("{}")
    text = form.format(run=run)
    for tool, further in (("evaluate", []), ("predict", ["image.png"]), ("export", [])):
        args = parse_arguments(load_tool(tool).build_parser(), ["--model", text, *further])
        assert args.model == f"local-dir:{run}/best"
    for tool, name, words in (("report", "folder", []), ("push_to_hub", "run", ["--repo-id", "a/b"])):
        assert vars(load_tool(tool).build_parser().parse_args([text, *words]))[name] == run
    args = load_tool("visualize").build_parser().parse_args(["attention", text, "--twin", text])
    assert (args.run, args.twin) == (run, run)


@pytest.mark.parametrize("rule", FURTHER_RULES)
@pytest.mark.parametrize("read", [model_source, weights_file, run_folder])
def test_a_network_that_a_run_did_not_save_is_refused(read, rule, tmp_path):
    (tmp_path / "args.yaml").touch()
    with pytest.raises(argparse.ArgumentTypeError, match=f"best_{rule}"):
        read(str(tmp_path / f"best_{rule}"))
    (tmp_path / f"best_{rule}").mkdir()
    (tmp_path / f"best_{rule}" / "config.json").touch()
    assert model_source(str(tmp_path / f"best_{rule}")) == f"local-dir:{tmp_path / f'best_{rule}'}"


def test_what_is_no_run_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("resnet50/best", "best", "plain", "sweep/best/run/best"):
        Path(name).mkdir(parents=True)
    for name in ("resnet50/best", "plain", "sweep/best/run/best"):
        Path(name, "config.json").write_text("{}")
    assert model_source("resnet50") == "resnet50"  # a timm model, though a run is called so
    assert model_source("./resnet50") == "local-dir:resnet50/best"
    assert model_source("plain") == "local-dir:plain"  # a saved network that belongs to no run
    for text in ("hf-hub:owner/name", "nothing", "local-dir:nothing"):
        assert model_source(text) == text
    # A folder of runs may be called best
    for text in ("resnet50", "best", "sweep/best", "nothing"):
        assert run_folder(text) == Path(text)


def test_values_of_files_fit_their_types_and_truth_values_are_no_numbers():
    kinds = {"a": str, "n": int | float, "b": bool, "texts": [str], "rows": [[int]]}
    values = {"a": "x", "n": 0.5, "b": True, "texts": ["x"], "rows": [[1], []]}
    assert {(name, kind) for name, of in kinds.items() for kind, value in values.items() if fits(value, of)} == {
        (name, name) for name in kinds
    }
    assert not fits([1, "x"], [str])
