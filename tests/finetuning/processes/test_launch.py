"""The number of processes asked for against the number there is."""

import logging

import pytest
from accelerate.utils import DistributedType

from timm_moe_dg.errors import ArgumentError
from timm_moe_dg.finetuning.processes.launch import (
    check_distribution,
    check_plugins,
    check_precision,
    check_world_size,
    set_up_logging,
)

ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({}, 1),
        (ACCELERATE, 1),
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2),
        ({"WORLD_SIZE": "1"}, 1),
        ({"MASTER_ADDR": "node1"}, 1),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 4),
    ],
)
def test_as_asked(environment, processes):
    check_world_size(environment, processes)


@pytest.mark.parametrize(
    ("environment", "processes"),
    [
        ({**ACCELERATE, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 1),
        ({"ACCELERATE_NUM_PROCESSES": "2"}, 1),
        ({"PMI_SIZE": "4"}, 1),
        ({**ACCELERATE, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1),
    ],
    ids=["two strangers", "accelerate variable", "mpi", "--cpu --num_processes 2"],
)
def test_not_as_asked(environment, processes):
    with pytest.raises(ArgumentError, match=r"num_processes=.*ACCELERATE_USE_CPU=true"):
        check_world_size(environment, processes)


def test_half_precision_that_would_silently_be_full():
    check_precision("fp16", "cuda")
    check_precision("bf16", "cpu")
    with pytest.raises(ArgumentError, match=r"amp_dtype='float16'.*bfloat16"):
        check_precision("fp16", "cpu")


def test_sharded_networks_and_divided_losses_are_refused():
    for kind in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        check_distribution(kind, 1)
    with pytest.raises(ArgumentError, match=r"distributed_type='.*FSDP': .* choose from NO, MULTI_CPU, MULTI_GPU"):
        check_distribution(DistributedType.FSDP, 1)
    with pytest.raises(ArgumentError, match=r"gradient_accumulation_steps=4: .*--grad-accum-steps"):
        check_distribution(DistributedType.NO, 4)


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_a_plugin_that_would_be_left_out_in_silence_is_refused(name):
    check_plugins({f"ACCELERATE_USE_{name}": "false", "ACCELERATE_USE_CPU": "true"})
    with pytest.raises(ArgumentError, match=rf"distributed_type='{name}': .* launch without it \(--use_fsdp"):
        check_plugins({f"ACCELERATE_USE_{name}": "true"})


@pytest.mark.parametrize(
    ("environment", "level"),
    [({}, "INFO"), ({"RANK": "0"}, "INFO"), ({"RANK": "1"}, "ERROR"), ({"PMI_RANK": "1"}, "ERROR")],
)
def test_one_process_shows_messages(environment, level, monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    logger = logging.getLogger("timm_moe_dg")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    set_up_logging()
    assert logging.getLevelName(logger.level) == level
