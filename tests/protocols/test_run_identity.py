"""What a run writes down: its format, its arguments, and what it is recognized by."""

import pytest
import timm
import torch
import yaml

import timm_moe_dg
from tests.invented import make_record
from timm_moe_dg.data import get_benchmark
from timm_moe_dg.errors import ArgumentError, FormatError
from timm_moe_dg.protocols.options import DEFAULTS, NO_EFFECT_ON_RESULTS
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
    sha256,
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


def test_configurations_without_a_format_are_read_under_any_spelling(tmp_path):
    path = write(tmp_path / "args.yaml", checkpoint_freq=3, steps=9)
    assert read_arguments(path, "run") == {"eval_freq": 3, "steps": 9}


def test_a_repeated_run_leaves_out_filled_in_values_and_options_of_one_start(tmp_path):
    table = {"lr": 0.1, "steps": 9, "resume": "auto", "config": "a.yaml", "filled_in": ["lr"], **stamp()}
    table |= {"data": "ab12", "weights_sha256": None, "domain_digests": [{"name": "a"}]}
    assert read_repeatable(str(write(tmp_path / "args.yaml", **table)), "config") == {"steps": 9}


def test_a_file_that_a_user_wrote_keeps_options_of_one_start(tmp_path):
    table = {"steps": 9, "dry_run": True, "resume": "auto", "check_images": False}
    assert read_repeatable(str(write(tmp_path / "run.yaml", **table)), "config") == table


@pytest.mark.parametrize(
    ("variable", "amp_dtype", "entry"),
    [(None, None, {}), ("no", None, {}), ("bf16", None, {"mixed_precision": "bf16"}), ("bf16", "float16", {})],
)
def test_the_launchers_precision_is_a_setting_unless_an_option_replaces_it(variable, amp_dtype, entry, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    if variable:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", variable)
    assert measured_settings({"amp_dtype": amp_dtype}) == {"weights_sha256": None, **entry}
    assert settings({"amp_dtype": amp_dtype, **entry}) == {"amp_dtype": amp_dtype, **entry}


@pytest.mark.parametrize("number", [1, FORMAT + 1, "2", None, [1]])
@pytest.mark.parametrize(("versions", "version"), [({"timm_moe_dg": "9.9"}, "9.9"), ("x", "unknown")])
def test_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, number, versions, version):
    stamped = {"format": number, "versions": versions}
    message = f"has format {number!r}, written by timm_moe_dg {version}, and this version reads format {FORMAT} alone"
    with pytest.raises(FormatError) as caught:
        read_arguments(write(tmp_path / "args.yaml", **stamped), "run")
    assert str(caught.value).startswith(f"run={str(tmp_path / 'args.yaml')!r}: {message}")
    record = make_record(args={**make_record().args, **stamped})
    with pytest.raises(FormatError) as caught:
        Record.from_json(record.to_json())
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [5, "x", [5], [[]], [{"images": 3}], [{"name": 3}], {"name": "a"}, None], ids=str)
def test_a_damaged_fingerprint_is_refused_with_the_file(tmp_path, value):
    path = write(tmp_path / "args.yaml", domain_digests=value)
    with pytest.raises(ArgumentError, match=r"^run='.*args.yaml': domain_digests: must be tables with names; restore"):
        read_arguments(path, "run")


def test_a_run_of_this_format_without_a_fingerprint_is_refused(tmp_path):
    for table in ({}, {"domain_digests": []}):
        with pytest.raises(ArgumentError, match="domain_digests: must be tables with names; restore the file"):
            read_arguments(write(tmp_path / "args.yaml", **stamp(), **table), "run")


def test_changed_data_and_missing_weights_are_named_without_a_part_that_differs():
    recorded = {"data": "ab12", "domain_digests": [{"name": "a"}], "data_dir": "d", "weights_sha256": "1"}
    with pytest.raises(
        ArgumentError, match="started by a version that recorded less of the data; finish it there, or start"
    ):
        check_unchanged(recorded, {**recorded, "data": "cd34"})
    with pytest.raises(ArgumentError, match="from a file of weights that is not there; restore the file, or"):
        check_unchanged(recorded, {**recorded, "weights_sha256": None})


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
        with pytest.raises(ArgumentError, match=r"other weights or texts under this name; restore the file"):
            check_weights_files({**args, "weights_sha256": before}, changed)
    check_weights_files({"weights_sha256": before}, {**args, "weights_sha256": sha256(*weights_files(args))})


def test_a_changed_argument_is_named_with_both_values():
    recorded = {"lr": 0.1, "test_domains": [0], "model_kwargs": {"moe_layers": [8, 10]}, "workers": 2, "resume": None}
    check_unchanged(recorded, {**recorded, "model_kwargs": {"moe_layers": (8, 10)}, "workers": 0, "resume": "auto"})
    with pytest.raises(ArgumentError, match=r"lr=0.2: the run to resume was started with 0.1"):
        check_unchanged(recorded, {**recorded, "lr": 0.2})
    with pytest.raises(ArgumentError, match=r"averaging='ema': .* started with None"):
        check_unchanged(recorded, {**recorded, "averaging": "ema"})
    with pytest.raises(
        ArgumentError, match=r"mixed_precision='bf16': .* by accelerate launch --mixed_precision no; use"
    ):
        check_unchanged(recorded, {**recorded, "mixed_precision": "bf16"})


def test_rows_of_tables_are_told_apart_by_settings_alone():
    named = {"dataset": "toy", "trial_seed": 1, "lr": 0.1, "output": "a", "workers": 3, "format": 1, "output_dir": "b"}
    assert settings({**named, "steps": 5, "checkpoint_freq": 2, "model_kwargs": {"depth": 3}}) == {
        "steps": 5,
        "eval_freq": 2,
        "depth": 3,
    }
    assert {"config", "resume", "filled_in", "versions"} <= NO_EFFECT_ON_RESULTS


def test_options_that_were_given_by_hand_are_settings_and_those_filled_in_are_not():
    args = {"lr": 0.1, "batch_size": 8, "weight_decay": 0.0, "num_classes": 3, "seed": 5, "hparams": {"lr": 9, "x": 1}}
    assert settings({**args, "filled_in": ["batch_size", "weight_decay", "num_classes", "seed"]}) == {"lr": 0.1, "x": 1}
    assert settings({**args, "filled_in": ["lr", "seed"]}) == {
        **{"lr": 9, "x": 1, "batch_size": 8, "weight_decay": 0.0, "num_classes": 3}
    }


def test_changed_options_are_those_that_a_user_gave():
    args = {"steps": 9, "lr": 0.1, "workers": 5, "test_envs": [1], "data_dir": "a", "hparams": {}, "model_kwargs": []}
    assert changed_options({**args, "filled_in": ["lr"], "domains": ["x"], **stamp()}) == {
        "steps": 9,
        "test_domains": [1],
        "data_dir": "a",
    }


def test_the_epochs_of_a_run_are_among_its_changed_options():
    assert changed_options({"epochs": 2.0, "steps": 37, "filled_in": ["steps"]}) == {"epochs": 2.0}


def test_values_that_mean_the_same_have_the_same_canonical_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alike = [1, 1.0, True], [(1, 2), [1, 2.0]], [[("a", 1)], [["a", 1.0]], {"a": True}], [None, {}, []]
    paths = ["local-dir:a/best", "local-dir:./a/best", f"local-dir:{tmp_path}/b/../a/best"]
    for values in (*alike, paths, ["text:a.pt", "text:b/../a.pt"]):
        assert len(set(map(canonical_json, values))) == 1
    assert len(set(map(canonical_json, (None, 0, 1, "1", [1], {"a": 1}, "a", "./a", 2**60, 2**60 + 1)))) == 10


ALIKE = [
    {"hparams": {"mixup_alpha": 1.0}, "model_kwargs": {"num_experts": 4.0, "moe_layers": (2, 3), "shared_expert": 1}},
    {
        "hparams": {"mixup_alpha": 1},
        "model_kwargs": [("shared_expert", True), ("num_experts", 4), ("moe_layers", [2, 3])],
    },
    {"lr": 1, "pretrained": 1, "initial_checkpoint": "./start.pt", "model": "local-dir:x/../a"},
    {"lr": 1.0, "pretrained": True, "initial_checkpoint": "start.pt", "model": "local-dir:a"},
]


@pytest.mark.parametrize("number", [0, 2])
def test_a_run_is_recognized_in_another_spelling(number):
    planned, recorded = ({**DEFAULTS, "num_classes": 2, **ALIKE[i]} for i in (number, number + 1))
    benchmark = get_benchmark("rotated_digits")
    filled = {name: value for name, value in benchmark_defaults(planned, benchmark).items() if planned[name] is None}
    assert differences(planned, {**recorded, **filled}, benchmark) == []
    check_unchanged({**recorded, **filled}, {**planned, **filled})


def test_a_moved_checkpoint_with_the_same_weights_is_the_same():
    recorded = {"initial_checkpoint": "a.pt", "head": "text:a.pt", "weights_sha256": "1"}
    check_unchanged(recorded, {"initial_checkpoint": "b.pt", "head": "text:b.pt", "weights_sha256": "1"})
    with pytest.raises(ArgumentError, match=r"^head=None"):
        check_unchanged({**recorded}, {**recorded, "head": None})
    with pytest.raises(ArgumentError, match=r"initial_checkpoint='b\.pt'"):
        check_unchanged({"initial_checkpoint": "a.pt"}, {"initial_checkpoint": "b.pt"})


def test_a_planned_run_of_some_epochs_is_recognized_by_these():
    benchmark = get_benchmark("rotated_digits")
    planned = {**DEFAULTS, "epochs": 2}
    recorded = {**planned, **benchmark_defaults(planned, benchmark), "epochs": 2.0, "steps": 37}
    assert differences(planned, recorded, benchmark) == []
    assert differences({**planned, "epochs": 3}, recorded, benchmark) == ["epochs: 2.0 there, 3 planned"]
    assert differences({**planned, "epochs": None}, recorded, benchmark) == ["steps: 37 there, 501 planned"]


def test_epochs_are_a_setting_and_steps_follow_from_them():
    assert settings({"epochs": 2.0, "steps": 37}) == {"epochs": 2.0}
    assert settings({"epochs": None, "steps": 37}) == {"steps": 37}
    assert settings({"hparams": '{"irm_lambda": 1}'}) == {"irm_lambda": 1}  # DomainBed's form
    assert settings({"hparams": None, "model_kwargs": None}) == {}


def test_averages_over_steps_and_arguments_of_the_model_are_other_methods():
    args = {"algorithm": "ERM", "model": "gmoe_tiny_patch16", "averaging": None, "model_kwargs": {}}
    others = [{"averaging": "swad"}, {"average_method": "diwa"}, *({"model_kwargs": {"top_k": k}} for k in (1, 2))]
    assert len({method_of(args | other) for other in ({}, *others)}) == 5
    kwargs = [{"moe_layers": (1, 2), "depth": 3}, {"depth": 3.0, "moe_layers": [1, 2]}]  # as given, and as recorded
    assert len({method_of({**args, "model_kwargs": value}) for value in kwargs}) == 1


def test_the_method_of_a_calibration_names_no_folder_of_this_machine():
    args = {"algorithm": "ERM", "model": "local-dir:/home/me/best", "averaging": None, "weights_sha256": "ab12"}
    assert method_of(args) == "ERM, weights ab12"
    backbone = {"model": "gmoe", "model_kwargs": {"backbone": "local-dir:/home/me/best", "depth": 2}}
    assert method_of(args | backbone) == 'ERM, gmoe, {"backbone": "weights ab12", "depth": 2.0}'
    assert method_of(args | {"model": "local-dir:a,b/best"}) == "ERM, weights ab12"
    encoder = {"model": "moge_tiny", "model_kwargs": {"metadata_encoder": "satclip:/home/me/x.ckpt"}}
    assert method_of(args | encoder) == 'ERM, moge_tiny, {"metadata_encoder": "weights ab12"}'
