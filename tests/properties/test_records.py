"""Records come back from results.jsonl unchanged. Damaged records are refused, or make a table."""

import json
from math import nan

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.invented import ARGS, invented_records, make_record, write_run
from timm_moe_dg.errors import FormatError, RecordError
from timm_moe_dg.protocols.records import Record, read_records
from timm_moe_dg.results.runs import find_runs
from timm_moe_dg.results.tables import make_tables
from timm_moe_dg.storage.files import append_line

pytestmark = pytest.mark.slow  # up to two seconds each


NUMBERS = st.floats() | st.integers(-(2**70), 2**70)
WORDS = st.text(max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
LOSSES = st.dictionaries(st.from_regex(r"[a-z_]{1,8}_loss", fullmatch=True), NUMBERS, max_size=3)


@st.composite
def records(draw):
    """A record of any numbers, with arguments of any text."""
    domains = draw(st.integers(2, 4))
    columns = st.tuples(*[NUMBERS] * domains)
    further = draw(st.dictionaries(WORDS, JSON, max_size=2))
    args = {**further, **ARGS, "test_envs": [draw(st.integers(0, domains - 1))], "dataset": draw(WORDS)}
    args = {name: value for name, value in args.items() if name not in ("format", "versions")}
    names = ("accuracy", "worst_accuracy", "f1_macro")
    scores = st.fixed_dictionaries({**dict.fromkeys(names, NUMBERS), "worst_group": st.none() | WORDS})
    return make_record(
        step=draw(st.integers(0, 10**9)),
        losses=draw(LOSSES),
        epoch=draw(NUMBERS),
        step_time=draw(NUMBERS),
        mem_gb=draw(NUMBERS),
        in_acc=draw(columns),
        out_acc=draw(columns),
        out_loss=draw(st.just(()) | columns),
        args=args,
        hparams=draw(st.dictionaries(WORDS, JSON, max_size=2)),
        roles=draw(st.dictionaries(st.sampled_from(["id", "ood", "ood_val"]), scores, max_size=2)),
        averaged=draw(st.booleans()),
    )


@given(st.lists(records(), min_size=1, max_size=3))
def test_records_come_back_as_they_were_written(tmp_path, written):
    path = tmp_path / "results.jsonl"
    path.unlink(missing_ok=True)
    for record in written:
        append_line(path, record.to_json())
    records = read_records(path)
    # As text NaN equals NaN, and 1 differs from 1.0
    assert [json.dumps(vars(record), sort_keys=True) for record in records] == [
        json.dumps(vars(record), sort_keys=True) for record in written
    ]
    assert [record.to_json() for record in records] == path.read_text().splitlines()


@given(records(), st.floats(0, 1, exclude_max=True))
def test_a_record_that_is_cut_off_anywhere_is_refused(record, share):
    line = record.to_json()
    with pytest.raises(RecordError):
        Record.from_json(line[: int(share * len(line))])


LINE = invented_records([1])[0].to_json()


ARGUMENTS = [*json.loads(LINE)["args"], "holdout_fraction", "averaging", "domains"]


@given(
    st.dictionaries(st.sampled_from([*json.loads(LINE), "roles", "averaged"]), JSON) | st.just({}),
    st.dictionaries(st.sampled_from(ARGUMENTS), JSON),
)
@example({"averaged": 0.5}, {})
@example({}, {"test_envs": []})
@example({}, {"test_envs": [1, 1]})
@example({"step": nan}, {})
def test_a_record_of_any_fields_and_arguments_is_refused_or_makes_a_table(tmp_path, fields, args):
    row = json.loads(LINE)
    tabulate(tmp_path, json.dumps({**row, "args": {**row["args"], **args}, **fields}).encode())


def tabulate(folder, line):
    """Makes tables of a finished run with one record; a damaged record may be refused by name."""
    run = folder / "run"
    if not run.exists():
        write_run(run, invented_records([1]))
    (run / "results.jsonl").write_bytes(line + b"\n")
    try:
        runs = find_runs([folder])[0]
    except (RecordError, FormatError):
        return
    make_tables(runs)
