"""summary.csv: the same for records that were read back, and a witness of their numbers."""

from dataclasses import replace

from tests.invented import make_record
from timm_moe_dg.protocols import Record
from timm_moe_dg.storage.summary_table import is_summarized, summary_table


def two_losses():
    return [replace(make_record(step=step), losses={"task": 1.5, "loss": 2.0, "aux": 0.5}) for step in (0, 3)]


def test_columns_keep_their_order_when_records_are_read_back():
    records = two_losses()
    again = [Record.from_json(record.to_json()) for record in records]
    assert summary_table(again) == summary_table(records)


def test_a_record_is_told_from_one_with_another_number(tmp_path):
    records = two_losses()
    path = tmp_path / "summary.csv"
    assert not is_summarized(path, records[0])
    path.write_text(summary_table(records))
    for record in records:
        assert is_summarized(path, record)
        assert is_summarized(path, Record.from_json(record.to_json()))
        assert not is_summarized(path, replace(record, epoch=record.epoch + 0.5))
        assert not is_summarized(path, replace(record, losses={**record.losses, "aux": 0.25}))
    path.write_bytes(b"\xff\x00\n")
    assert not is_summarized(path, records[0])
