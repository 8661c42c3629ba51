"""Records: rows go out and come back unchanged, DomainBed's rows are understood, damaged ones are named."""

import json

import pytest

from tests.invented import ARGS, make_record
from timm_moe_dg.errors import RecordError
from timm_moe_dg.protocols.records import Record, read_records

# As DomainBed's train.py writes it: no task_loss, other arguments, keys sorted
DOMAINBED_ROW = json.dumps(
    {
        "args": {**ARGS, "uda_holdout_fraction": 0, "output_dir": "out", "skip_model_save": False},
        "env0_in_acc": 0.9,
        "env0_out_acc": 0.6,
        "env1_in_acc": 0.8,
        "env1_out_acc": 0.5,
        "env2_in_acc": 0.7,
        "env2_out_acc": 0.4,
        "epoch": 1.5,
        "hparams": {"lr": 5e-05, "batch_size": 32, "resnet18": False, "nonlinear_classifier": False},
        "loss": 0.5,
        "penalty": 0.03,
        "mem_gb": 3.5,
        "step": 300,
        "step_time": 0.125,
    },
    sort_keys=True,
)

SCORES = dict.fromkeys(("accuracy", "worst_accuracy", "f1_macro"), 0.5)


def test_out_losses_are_kept_by_domain():
    record = make_record(out_loss=(0.25, 1.5, float("inf")))
    assert json.loads(record.to_json())["env1_out_loss"] == 1.5
    assert Record.from_json(record.to_json()) == record
    with pytest.raises(RecordError, match="env1_out_loss"):
        Record.from_json(record.to_json().replace("env2_out_loss", "env3_out_loss"))


def test_keys_are_those_of_domainbed():
    row = json.loads(make_record().to_json())
    assert set(row) == set(json.loads(DOMAINBED_ROW)) - {"penalty"} | {"task_loss"}
    assert (row["env1_in_acc"], row["env2_out_acc"]) == (0.8, 0.4)


def test_rows_of_domainbed_are_read():
    record = Record.from_json(DOMAINBED_ROW)
    assert record.losses == {"loss": 0.5, "penalty": 0.03}
    assert record.in_acc == (0.9, 0.8, 0.7)
    assert record.test_domains == (1,)
    assert record.training_domains == (0, 2)
    assert record.to_json() == DOMAINBED_ROW


def test_ten_and_more_domains_stay_in_order():
    accuracies = tuple(domain / 100 for domain in range(12))
    record = make_record(in_acc=accuracies, out_acc=accuracies[::-1])
    assert Record.from_json(record.to_json()) == record


DAMAGE = [
    ({"roles": {"ood": {"accuracy": 1}}}, "lacks worst_accuracy, f1_macro"),
    ({"step": "300"}, "step='300': must be a number"),
    ({"args": None}, "args=None: must be a JSON object"),
    ({"args": [1]}, r"args=\[1\]: must be a JSON object"),
    ({"hparams": None}, "hparams=None: must be a JSON object"),
    ({"env0_in_acc": None}, "env0_in_acc=None: must be a number"),
    ({"env0_in_acc": True}, "env0_in_acc=True: must be a number"),
    ({"env999999999_in_acc": 0.5}, "expected env0_in_acc, env0_out_acc, env1_in_acc"),
    ({"loss": "high"}, "loss='high': must be a number"),
    ({"roles": {"ood": 5}}, r"roles\['ood'\]=5: must be a JSON object"),
    ({"roles": {"ood": {**SCORES, "accuracy": "x"}}}, "accuracy='x': must be a number"),
    ({"args.dataset": ["x"]}, r"args\['dataset'\]=\['x'\]: must be a name"),
    ({"args.algorithm": None}, r"args\['algorithm'\]=None: must be a name"),
    ({"args.model": ["x"]}, r"args: model=\['x'\]: must be a text"),
    ({"args.holdout_fraction": "0.2"}, "args: holdout_fraction='0.2': must be a number"),
    ({"args.momentum": None}, "args: momentum=None: must be a number"),
    ({"args.model_kwargs": [1]}, r"args: model_kwargs=\[1\]: must be a mapping"),
    ({"args.metadata_columns": [1]}, r"args: metadata_columns=\[1\]: must be a list of texts"),
    ({"args.mean": ["x"]}, r"args: mean=\['x'\]: must be a list of numbers"),
    ({"args.pretrained": 1.5}, "args: pretrained=1.5: must be a boolean"),
    ({"args.coverage_radius": []}, r"args: coverage_radius=\[\]: must be a number or a text"),
    ({"args.filled_in": 5}, "args: filled_in=5: must be a list of texts"),
    ({"args.initial_checkpoint": 5}, "args: initial_checkpoint=5: must be a text"),
    ({"args.versions": "1"}, r"args\['versions'\]='1': must be a JSON object"),
    ({"args.domain_facts": [["train", 1, "random"]]}, r"args\['domain_facts'\]=.*: must be role, group and split"),
    ({"args.test_envs": [3]}, r"args\['test_envs'\]: there is no domain 3"),
    ({"roles": {"ood": {**SCORES, "num_samples": 3}}}, "num_samples=3: must be a JSON object"),
    ({"roles": {"ood": {**SCORES, "group_accuracy": {"a": "1"}}}}, "a='1': must be a number"),
    ({"roles": {"ood": {**SCORES, "worst_group": 3}}}, "worst_group=3: must be a name"),
    ({"args.test_envs": None}, r"args\['test_envs'\]=None: must be a list of domain positions"),
    ({"args.test_envs": [[0]]}, r"args\['test_envs'\]=\[\[0\]\]: must be a list"),
    ({"args.trial_seed": [1]}, r"args\['trial_seed'\]=\[1\]: must be a whole number"),
    ({"args.domains": 5}, r"args\['domains'\]=5: must be a list of names"),
    ({"args.domains": [[1]]}, r"args\['domains'\]=\[\[1\]\]: must be a list of names"),
    ({"args.split_sizes": [1, 2, 3]}, r"args\['split_sizes'\]=\[1, 2, 3\]: must be a list of pairs of whole numbers"),
    ({"args.split_sizes": [[1, 2]]}, r"args\['split_sizes'\]: must have two numbers for each domain"),
]


@pytest.mark.parametrize(("changed", "message"), DAMAGE, ids=str)
def test_fields_have_their_types(changed, message):
    row = json.loads(DOMAINBED_ROW)
    for name, value in changed.items():
        place, _, key = name.rpartition(".")
        (row[place] if place else row)[key] = value
    with pytest.raises(RecordError, match=f"^(scores=.*)?{message}"):
        Record.from_json(json.dumps(row))


def test_missing_fields_are_named():
    row = json.loads(DOMAINBED_ROW)
    with pytest.raises(RecordError, match=r"^lacks step, epoch;"):
        Record.from_json(json.dumps({key: value for key, value in row.items() if key not in ("step", "epoch")}))
    with pytest.raises(RecordError, match=r"lacks args\['algorithm'\], args\['test_envs'\]"):
        Record.from_json(json.dumps(row | {"args": {"dataset": "PACS"}}))
    del row["env1_in_acc"]
    with pytest.raises(RecordError, match="expected env0_in_acc, env0_out_acc, env1_in_acc"):
        Record.from_json(json.dumps(row))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.jsonl"


def test_rows_of_a_file_come_back_and_share_their_arguments(path):
    records = [make_record(step=step) for step in (0, 300, 600)]
    records += [make_record(args={**records[0].args, "model_kwargs": {"x": value}}) for value in (1, True)]
    path.write_text("".join(record.to_json() + "\n" for record in records))
    again = read_records(path)
    assert again == records
    assert again[0].args is again[1].args is again[2].args
    assert [type(record.args["model_kwargs"]["x"]) for record in again[3:]] == [int, bool]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"{DOMAINBED_ROW}\n{DOMAINBED_ROW[:100]}".encode(), r"results\.jsonl, line 2: .*may be cut off"),
        (b"\xff\xfe\x00binary", r"results\.jsonl: is not UTF-8 text"),
        (b"[" * 200_000, "line 1: .*nested too deeply"),
        (b'{"a":' * 50_000, "line 1: .*nested too deeply"),
        (b'{"step": ' + b"9" * 5000 + b"}", "line 1: .*is not JSON"),
        (b"[1, 2]", "line 1: .*is not a JSON object"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_damaged_lines_are_named(path, content, message):
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_records(path)
