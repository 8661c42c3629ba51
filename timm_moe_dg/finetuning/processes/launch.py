"""Checks that launch settings took effect: processes, precision, CPU threads and messages."""

import logging
import os
from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.utils import get_int_from_env

from ...cli.arguments import available_cpus
from ...errors import ArgumentError
from ...protocols.options import RunOptions

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}  # PyTorch's names -> accelerate's

_ON_CPU = "on CPU set ACCELERATE_USE_CPU=true and use accelerate launch --multi_gpu --num_processes N --num_machines 1"
_WORLD_SIZES = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")  # as accelerate calls them
_PLUGINS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_UNSUPPORTED = (
    "the launcher's plugin is not supported, since averages, checkpoints and methods need the whole network in every "
    "process; launch without it (--use_fsdp and the like), and see --grad-checkpointing; choose from "
    f"{', '.join(_DISTRIBUTED)}"
)


def join_processes(options: RunOptions) -> Accelerator:
    """Joins the other processes and says what the run has to work with.

    Raises:
        ArgumentError: That is not what it was launched with; see `check_launch`.
    """
    accelerator = Accelerator(mixed_precision=PRECISIONS[options.amp_dtype] if options.amp_dtype else None)
    check_launch(accelerator)
    if accelerator.device.type == "cpu":
        share = available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(options.cpu_threads or max(1, share))
    accelerator.print(
        f"processes {accelerator.num_processes}, device {accelerator.device}, threads {torch.get_num_threads()}, "
        f"mixed precision {accelerator.mixed_precision}, seed {options.seed}"
    )
    return accelerator


def check_launch(accelerator: Accelerator) -> None:
    """Checks that launch settings took effect.

    Raises:
        ArgumentError: It has not; see the other checks.
    """
    check_plugins(os.environ)
    check_world_size(os.environ, accelerator.num_processes)
    check_precision(accelerator.mixed_precision, accelerator.device.type)
    check_distribution(accelerator.distributed_type, accelerator.gradient_accumulation_steps)


def check_world_size(environment: Mapping[str, str], num_processes: int) -> None:
    """Makes sure that a run has the processes that it was launched with.

    `accelerate launch --cpu --num_processes 2` starts one process, and `--multi_gpu` without accelerators starts two
    that do not know of each other; both would run to the end and report something else than was asked for.

    Args:
        environment: The process's environment variables.
        num_processes: How many processes the run has.

    Raises:
        ArgumentError: The two differ.
    """
    requested = next((environment[name] for name in _WORLD_SIZES if name in environment), None)
    if requested is not None and int(requested) != num_processes:
        raise ArgumentError.of(
            "num_processes", int(requested), f"but this process is in a world of {num_processes}; {_ON_CPU}"
        )
    # accelerate's launcher exports an address as soon as more than one process is asked for
    if requested is None and "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        raise ArgumentError.of(
            "num_processes",
            num_processes,
            f"more were asked for, but accelerate launch --cpu starts one; {_ON_CPU} (for one, unset MASTER_ADDR)",
        )


def check_precision(mixed_precision: str, device: str) -> None:
    """Makes sure that float16 is not asked for on CPU, where accelerate would silently train in full precision.

    Raises:
        ArgumentError: It is.
    """
    if mixed_precision == "fp16" and device == "cpu":
        raise ArgumentError.of("amp_dtype", "float16", "needs an accelerator; on CPU use bfloat16 or none")


def check_plugins(environment: Mapping[str, str]) -> None:
    """Makes sure that no plugin was asked for, which accelerate would leave out in silence on CPU.

    Args:
        environment: The process's environment variables, in which the launcher says what was asked for.

    Raises:
        ArgumentError: One was.
    """
    for name in _PLUGINS:
        if environment.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ArgumentError.of("distributed_type", name, _UNSUPPORTED)


def check_distribution(distributed_type: str, gradient_accumulation_steps: int) -> None:
    """Makes sure that every process holds the whole network, and that accelerate does not divide losses itself.

    Args:
        distributed_type: One of accelerate's.
        gradient_accumulation_steps: What accelerate was told.

    Raises:
        ArgumentError: The network would be sharded, or run by a backend that nobody has tried; or losses be divided.
    """
    if distributed_type not in _DISTRIBUTED:
        raise ArgumentError.of("distributed_type", str(distributed_type), _UNSUPPORTED)
    if gradient_accumulation_steps != 1:
        remedy = (
            "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS; to cut a step's images into parts use --grad-accum-steps"
        )
        raise ArgumentError.of("gradient_accumulation_steps", gradient_accumulation_steps, remedy)


def set_up_logging() -> None:
    """Shows the package's messages once, from the main process.

    Rank comes from the environment; the process group does not exist yet.
    """
    logging.basicConfig(format="%(message)s")
    level = logging.ERROR if get_int_from_env(RANKS, 0) else logging.INFO
    logging.getLogger("timm_moe_dg").setLevel(level)
