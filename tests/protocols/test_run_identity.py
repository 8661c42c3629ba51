"""What a run writes down: its format, its arguments, and what it is recognized by."""

import pytest
import timm
import torch
import yaml

import timm_moe_dg
from tests.invented import make_record
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError, FormatError
from timm_moe_dg.networks.build import sha256
from timm_moe_dg.protocols.options import DEFAULTS, FILLED_IN, NO_EFFECT_ON_RESULTS
from timm_moe_dg.protocols.records import Record
from timm_moe_dg.protocols.run_identity import (
    FORMAT,
    benchmark_defaults,
    canonical_json,
    changed_options,
    check_unchanged,
    check_weights_files,
    differences,
    measured_settings,
    method_of,
    read_arguments,
    read_repeatable,
    settings,
    stamp,
    weights_files,
)


def write(path, **table):
    path.write_text(yaml.safe_dump(table))
    return path


def test_a_stamp_names_the_versions_that_count():
    versions = {"torch": torch.__version__, "timm": timm.__version__, "timm_moe_dg": timm_moe_dg.__version__}
    assert stamp() == {"format": FORMAT, "versions": versions}
    assert yaml.safe_load(yaml.safe_dump(stamp())) == stamp()


def test_files_are_read_under_any_spelling_and_a_repeated_run_leaves_out_what_is_of_one_start(tmp_path):
    path = write(tmp_path / "args.yaml", checkpoint_freq=3, steps=9)
    assert read_arguments(path, "run") == {"eval_freq": 3, "steps": 9}
    table = {"lr": 0.1, "steps": 9, "resume": "auto", "config": "a.yaml", "filled_in": ["lr"], **stamp()}
    table |= {"data": "ab12", "weights_sha256": None, "domain_digests": [{"name": "a"}]}
    assert read_repeatable(str(write(path, **table)), "config") == {"steps": 9}
    by_hand = {"steps": 9, "dry_run": True, "resume": "auto", "check_images": False}
    assert read_repeatable(str(write(path, **by_hand)), "config") == by_hand


@pytest.mark.parametrize(
    ("variable", "amp_dtype", "entry"),
    [("", None, {}), ("no", None, {}), ("bf16", None, {"mixed_precision": "bf16"}), ("bf16", "float16", {})],
)
def test_the_launchers_precision_is_a_setting_unless_an_option_replaces_it(variable, amp_dtype, entry, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    assert measured_settings({"amp_dtype": amp_dtype}) == {"weights_sha256": None, **entry}
    assert settings({"amp_dtype": amp_dtype, **entry}) == {"amp_dtype": amp_dtype, **entry}


@pytest.mark.parametrize(
    ("environment", "entry"),
    [
        ({"WORLD_SIZE": "2"}, {"processes": 2}),
        ({"PMI_SIZE": "4"}, {"processes": 4}),
        ({"WORLD_SIZE": "1"}, {}),
        ({}, {}),
    ],
)
def test_several_processes_are_recorded_and_older_runs_without_the_record_go_on(environment, entry, monkeypatch):
    for name in ("WORLD_SIZE", "PMI_SIZE", "ACCELERATE_NUM_PROCESSES", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    measured = measured_settings({"amp_dtype": None})
    assert measured == {"weights_sha256": None, **entry}
    check_unchanged({"weights_sha256": None}, measured)


@pytest.mark.parametrize("number", [1, FORMAT + 1, "2", None, [1]])
@pytest.mark.parametrize(("versions", "version"), [({"timm_moe_dg": "9.9"}, "9.9"), ("x", "unknown")])
def test_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, number, versions, version):
    stamped = {"format": number, "versions": versions}
    with pytest.raises(FormatError, match=rf"^run='.*args\.yaml': .*timm_moe_dg {version}"):
        read_arguments(write(tmp_path / "args.yaml", **stamped), "run")
    record = make_record(args={**make_record().args, **stamped})
    with pytest.raises(FormatError, match=rf"^record=.*timm_moe_dg {version}"):
        Record.from_json(record.to_json())


FINGERPRINTS = [5, "x", [5], [[]], [{"images": 3}], [{"name": 3}], {"name": "a"}, None]


@pytest.mark.parametrize(
    "table",
    [*({"domain_digests": value} for value in FINGERPRINTS), stamp(), {**stamp(), "domain_digests": []}, {"lr": "x"}],
    ids=str,
)
def test_a_damaged_file_and_a_run_without_a_fingerprint_are_refused_with_the_file(tmp_path, table):
    with pytest.raises(ArgumentError, match=r"^run='.*args\.yaml': (domain_digests|lr='x'): "):
        read_arguments(write(tmp_path / "args.yaml", **table), "run")


RECORDED = {"lr": 0.1, "test_domains": [0], "model_kwargs": {"moe_layers": [8, 10]}, "workers": 2, "resume": None}
DATA = {"data": "ab12", "domain_digests": [{"name": "a"}], "data_dir": "d", "weights_sha256": "1"}
START = {"initial_checkpoint": "a.pt", "head": "text:a.pt", "weights_sha256": "1"}
CHANGED = [
    (RECORDED, {"lr": 0.2}, r"lr=0\.2: .*0\.1"),
    (RECORDED, {"averaging": "ema"}, "averaging='ema': .*None"),
    (RECORDED, {"mixed_precision": "bf16"}, "mixed_precision='bf16': .*None"),
    (DATA, {"data": "cd34"}, "data_dir='d': "),
    (DATA, {"data": "cd34", "domain_digests": [{"name": "b"}]}, "data_dir='d': .*the domains are b and were a"),
    (DATA, {"weights_sha256": None}, "model=None: "),
    (START, {"head": None}, "head=None: "),
    ({"initial_checkpoint": "a.pt"}, {"initial_checkpoint": "b.pt"}, r"initial_checkpoint='b\.pt': "),
]


@pytest.mark.parametrize(("recorded", "changes", "message"), CHANGED)
def test_a_run_is_not_resumed_with_other_arguments(recorded, changes, message):
    with pytest.raises(ArgumentError, match=f"^{message}"):
        check_unchanged(recorded, {**recorded, **changes})


def test_arguments_of_the_same_effect_are_no_change():
    check_unchanged(RECORDED, {**RECORDED, "model_kwargs": {"moe_layers": (8, 10)}, "workers": 0, "resume": "auto"})
    # A moved checkpoint with the same weights
    check_unchanged(START, {"initial_checkpoint": "b.pt", "head": "text:b.pt", "weights_sha256": "1"})


def test_every_file_that_a_run_starts_from_counts(tmp_path):
    start, texts, encoder = (tmp_path / name for name in ("start.pt", "head.npz", "encoder.safetensors"))
    args = {"model": "moge_tiny", "initial_checkpoint": str(start), "head": f"text:{texts}"}
    args["model_kwargs"] = {"metadata_encoder": f"satclip:{encoder}"}
    for path in (start, texts, encoder):
        path.write_text("before")
    before = sha256(*weights_files(args))
    for path in (start, texts, encoder):
        path.write_text("after")
        changed = {**args, "weights_sha256": sha256(*weights_files(args))}
        path.write_text("before")
        with pytest.raises(ArgumentError, match=r"^initial_checkpoint='.*start\.pt': "):
            check_weights_files({**args, "weights_sha256": before}, changed)
    check_weights_files({"weights_sha256": before}, {**args, "weights_sha256": sha256(*weights_files(args))})


GIVEN = {"lr": 0.1, "batch_size": 8, "weight_decay": 0.0, "num_classes": 3, "seed": 5, "hparams": {"lr": 9, "x": 1}}
NAMED = {"dataset": "toy", "trial_seed": 1, "lr": 0.1, "output": "a", "workers": 3, "format": 1, "output_dir": "b"}
SETTINGS = [
    (
        {**NAMED, "steps": 5, "checkpoint_freq": 2, "model_kwargs": {"depth": 3}},
        {"steps": 5, "eval_freq": 2, "depth": 3},
    ),
    # Options that were given by hand are settings, and those that were filled in are not
    ({**GIVEN, "filled_in": ["batch_size", "weight_decay", "num_classes", "seed"]}, {"lr": 0.1, "x": 1}),
    (
        {**GIVEN, "filled_in": ["lr", "seed"]},
        {"lr": 9, "x": 1, "batch_size": 8, "weight_decay": 0.0, "num_classes": 3},
    ),
    # Steps follow from epochs
    ({"epochs": 2.0, "steps": 37}, {"epochs": 2.0}),
    ({"epochs": None, "steps": 37}, {"steps": 37}),
    ({"hparams": '{"irm_lambda": 1}'}, {"irm_lambda": 1}),  # DomainBed's form
    ({"hparams": None, "model_kwargs": None}, {}),
]


@pytest.mark.parametrize(("args", "expected"), SETTINGS)
def test_rows_of_tables_are_told_apart_by_settings_alone(args, expected):
    assert settings(args) == expected
    assert {"config", "resume", "filled_in", "versions"} <= NO_EFFECT_ON_RESULTS


def test_changed_options_are_those_that_a_user_gave():
    args = {"steps": 9, "lr": 0.1, "workers": 5, "test_envs": [1], "data_dir": "a", "hparams": {}, "model_kwargs": []}
    changed = changed_options({**args, "filled_in": ["lr"], "domains": ["x"], **stamp()})
    assert changed == {"steps": 9, "test_domains": [1], "data_dir": "a"}
    assert changed_options({"epochs": 2.0, "steps": 37, "filled_in": ["steps"]}) == {"epochs": 2.0}
    assert changed_options({"test_domains": []}) == {"test_domains": []}


def test_values_that_mean_the_same_have_the_same_canonical_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alike = [1, 1.0, True], [(1, 2), [1, 2.0]], [[("a", 1)], [["a", 1.0]], {"a": True}], [None, {}, []]
    paths = ["local-dir:a/best", "local-dir:./a/best", f"local-dir:{tmp_path}/b/../a/best"]
    for values in (*alike, paths, ["text:a.pt", "text:b/../a.pt"]):
        assert len(set(map(canonical_json, values))) == 1
    assert len(set(map(canonical_json, (None, 0, 1, "1", [1], {"a": 1}, "a", "./a", 2**60, 2**60 + 1)))) == 10


TABLE, PAIRS = {"num_experts": 4.0, "moe_layers": (2, 3)}, [("moe_layers", [2, 3]), ("num_experts", 4)]
ALIKE = [
    ({"router": "self", "model_kwargs": {"depth": 3}}, {"model_kwargs": {"router": "self", "depth": 3}}),
    ({"hparams": {"mixup_alpha": 1.0}, "model_kwargs": TABLE}, {"hparams": {"mixup_alpha": 1}, "model_kwargs": PAIRS}),
    (
        {"lr": 1, "pretrained": 1, "initial_checkpoint": "./start.pt", "model": "local-dir:x/../a"},
        {"lr": 1.0, "pretrained": True, "initial_checkpoint": "start.pt", "model": "local-dir:a"},
    ),
]
DIGITS = get_benchmark("rotated_digits")


@pytest.mark.parametrize(("planned", "recorded"), ALIKE)
def test_a_run_is_recognized_in_another_spelling(planned, recorded):
    planned, recorded = ({**DEFAULTS, "num_classes": 2, **args} for args in (planned, recorded))
    filled = {name: value for name, value in benchmark_defaults(planned, DIGITS).items() if planned[name] is None}
    assert differences(planned, {**recorded, **filled}, DIGITS) == []
    check_unchanged({**recorded, **filled}, {**planned, **filled})


def test_a_planned_run_of_some_epochs_is_recognized_by_these():
    planned = {**DEFAULTS, "epochs": 2}
    recorded = {**planned, **benchmark_defaults(planned, DIGITS), "epochs": 2.0, "steps": 37}
    assert differences(planned, recorded, DIGITS) == []
    assert differences({**planned, "epochs": 3}, recorded, DIGITS) == ["epochs: 2.0 there, 3 planned"]
    assert differences({**planned, "epochs": None}, recorded, DIGITS) == ["steps: 37 there, 501 planned"]


@pytest.mark.parametrize("given", [{"seed": 5}, {"num_classes": 12}, {"hparams_seed": 1, "lr": 0.1}])
def test_a_value_that_a_run_was_given_is_not_one_that_would_follow(given):
    name, value = list(given.items())[-1]
    planned = {**DEFAULTS, **given, name: None}
    recorded = {**planned, **benchmark_defaults(planned, DIGITS), **given}
    followed = sorted(FILLED_IN)
    assert differences(planned, {**recorded, "filled_in": followed}, DIGITS) == []
    without = [option for option in followed if option != name]
    assert differences(planned, {**recorded, "filled_in": without}, DIGITS) == [f"{name}: {value} there, None planned"]


METHOD = {"algorithm": "ERM", "model": "gmoe", "averaging": None, "model_kwargs": {}, "weights_sha256": "ab12"}
METHODS = [  # local folders and files are named by the digest of their weights
    ({}, "ERM, gmoe"),
    ({"averaging": "swad"}, "ERM, swad, gmoe"),
    ({"average_method": "diwa"}, "ERM, gmoe, diwa"),
    ({"model_kwargs": {"moe_layers": (1, 2), "depth": 3}}, 'ERM, gmoe, {"depth": 3.0, "moe_layers": [1.0, 2.0]}'),
    ({"router": "self"}, 'ERM, gmoe, {"router": "self"}'),
    ({"model": "local-dir:/home/me/best"}, "ERM, weights ab12"),
    ({"model": "local-dir:a,b/best"}, "ERM, weights ab12"),
    ({"model_kwargs": {"backbone": "local-dir:/home/me/best"}}, 'ERM, gmoe, {"backbone": "weights ab12"}'),
    ({"model_kwargs": {"metadata_encoder": "satclip:/me/x"}}, 'ERM, gmoe, {"metadata_encoder": "weights ab12"}'),
]


@pytest.mark.parametrize(("args", "expected"), METHODS)
def test_the_method_of_a_calibration_names_no_folder_of_this_machine(args, expected):
    assert method_of(METHOD | args) == expected
