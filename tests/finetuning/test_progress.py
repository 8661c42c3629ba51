"""What a run prints: means since the last evaluation, and the table."""

import torch

from tests.invented import make_record
from timm_moe_dg.finetuning.progress import StepMeter, domain_table


def test_meter_means_and_forgets():
    meter = StepMeter()
    for value in (1.0, 2.0, 6.0):
        meter.add({"loss": torch.tensor(value), "aux_loss": torch.tensor(2 * value)})
    means, seconds = meter.take()
    assert {name: value.item() for name, value in means.items()} == {"loss": 3.0, "aux_loss": 6.0}
    assert seconds > 0
    meter.restart()
    meter.add({"loss": torch.tensor(5.0)})
    assert meter.take()[0] == {"loss": torch.tensor(5.0)}


def test_table_has_a_row_for_each_domain_and_marks_the_test_domain():
    table = domain_table(make_record(), ["art", "cartoon", "photo"])
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    assert rows["art"] == ["train", "0.9000", "0.6000"]
    assert rows["cartoon"] == ["test", "0.8000", "0.5000"]
    assert rows["photo"] == ["train", "0.7000", "0.4000"]
    assert "step 300" in table
    assert "task_loss 0.2500" in table
    assert "(mean of out acc) 0.5000, test domain (in acc) 0.8000" in table
