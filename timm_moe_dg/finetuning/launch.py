"""The processes of a run: joining them, checking that launch settings took effect, and losing one of them."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils.environment import parse_flag_from_env
from torch import distributed

from ..cli.arguments import available_cpus
from ..errors import ArgumentError, MoeDgError, ProcessLostError
from ..protocols.options import RunOptions
from .progress import wanted_trackers
from .sharding import check_sharding, fsdp_hidden, is_sharded

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}  # PyTorch's names -> accelerate's

_ON_CPU = "on CPU set ACCELERATE_USE_CPU=true and use accelerate launch --multi_gpu --num_processes N --num_machines 1"
_WORLD_SIZES = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")  # accelerate's names
_PLUGINS = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
_UNSUPPORTED = (
    "the launcher's plugin is not supported; launch without it (--use_deepspeed and the like), or with --use_fsdp "
    "--fsdp_version 2"
)
_logger = logging.getLogger(__name__)


def join_processes(options: RunOptions) -> Accelerator:
    """Joins the other processes, checks that launch settings took effect, and logs the resources of the run."""
    with fsdp_hidden():
        accelerator = Accelerator(
            mixed_precision=wanted_precision(options.amp_dtype),
            # Evaluations alone have a loader of accelerate
            dataloader_config=DataLoaderConfiguration(non_blocking=True),
            log_with=wanted_trackers(options) or None,  # accelerate warns of an empty list
            project_dir=options.output,  # trackers ask for it here; `start_trackers` sets the run folder
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(minutes=options.process_timeout)),
                # Saves a copy of all gradients. static_graph stays off, since a graph may change from step to step: the
                # discriminator's steps of DANN have no backward pass through the network.
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ],
        )
    check_plugins(os.environ)
    check_world_size(os.environ, accelerator.num_processes)
    check_precision(accelerator.mixed_precision, accelerator.device.type)
    check_distribution(accelerator.distributed_type, accelerator.gradient_accumulation_steps)
    if is_sharded():
        launched = {"num_processes": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
        check_sharding(options, **launched)
    if accelerator.device.type == "cpu" and (options.cpu_threads or not threads_given(os.environ)):
        share = available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(options.cpu_threads or max(1, share))
    _logger.info(
        f"processes {accelerator.num_processes}, device {accelerator.device}, threads {torch.get_num_threads()}, "
        f"mixed precision {accelerator.mixed_precision}, seed {options.seed}"
        f"{', network divided by FSDP2' if is_sharded() else ''}"
    )
    if accelerator.num_processes > 1:
        limit = f"{options.process_timeout:g} min"
        _logger.info(f"the run ends if a process waits more than {limit} for another one (--process-timeout)")
    return accelerator


def leave_processes(accelerator: Accelerator, *, keep_group: bool) -> None:
    """Ends the trackers, and the process group unless it is not ours."""
    if not keep_group:
        accelerator.end_training()
        return
    for tracker in accelerator.trackers:
        tracker.finish()


@contextmanager
def lost_process_explained(options: RunOptions, accelerator: Accelerator) -> Iterator[None]:
    """Turns a failed exchange between processes into a `ProcessLostError` that says what to do."""
    try:
        yield
    except RuntimeError as error:
        # Errors of gloo have no class of their own, but quote a file of its source
        is_exchange = isinstance(error, distributed.DistError) or "gloo" in str(error)
        if isinstance(error, MoeDgError) or not is_exchange:
            raise
        raise ProcessLostError(
            f"num_processes={accelerator.num_processes}: another process ended, or did not answer for "
            f"{options.process_timeout:g} min (--process-timeout); see its own message, then start all processes again "
            f"with --resume ({str(error).partition('. ')[0]})"
        ) from error


def check_world_size(environment: Mapping[str, str], num_processes: int) -> None:
    """Checks that a run has as many processes as it was launched with."""
    # `accelerate launch --cpu --num_processes 2` starts one process. `--multi_gpu` without accelerators starts two that
    # do not know of each other. Both would run to the end and report something else than was asked for.
    requested = next((environment[name] for name in _WORLD_SIZES if name in environment), None)
    if requested is not None and int(requested) != num_processes:
        remedy = f"but this process is in a world of {num_processes}; {_ON_CPU}"
        raise ArgumentError.of("num_processes", int(requested), remedy)
    # accelerate's launcher exports an address as soon as more than one process is asked for
    if requested is None and "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        remedy = f"more were asked for, but accelerate launch --cpu starts one; {_ON_CPU} (for one, unset MASTER_ADDR)"
        raise ArgumentError.of("num_processes", num_processes, remedy)


def threads_given(environment: Mapping[str, str]) -> bool:
    """Whether the user has set OMP_NUM_THREADS, which torch follows."""
    if not {"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & environment.keys():
        return "OMP_NUM_THREADS" in environment
    import psutil  # imports modules of Unix, so that it stays out of the package's own import

    # The launchers set it to 1 if it is not there, so that the launcher's own environment has to be asked
    try:
        is_set_outside = "OMP_NUM_THREADS" in psutil.Process().parent().environ()
        return is_set_outside or environment.get("OMP_NUM_THREADS", "1") != "1"
    except (psutil.Error, AttributeError):  # the launcher has ended, or belongs to another user
        return False


def wanted_precision(amp_dtype: str | None) -> str | None:
    """Returns accelerate's name of --amp-dtype. None leaves the choice to the launcher."""
    if amp_dtype != "auto":
        return PRECISIONS[amp_dtype] if amp_dtype else None
    # Not on a CPU, where bfloat16 may take longer than float32 (docs/results/speed.md)
    return "bf16" if not parse_flag_from_env("ACCELERATE_USE_CPU") and has_bfloat16() else "no"


def has_bfloat16() -> bool:
    """Whether there is a GPU of NVIDIA or AMD that computes in bfloat16, rather than emulates it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def check_precision(mixed_precision: str, device: str) -> None:
    """Refuses float16 on CPU, where accelerate would silently train in full precision, and bfloat16 on old GPUs."""
    if mixed_precision == "fp16" and device == "cpu":
        raise ArgumentError.of("amp_dtype", "float16", "needs an accelerator; on CPU use bfloat16 or none")
    if mixed_precision == "bf16" and device == "cuda" and not has_bfloat16():
        raise ArgumentError.of("amp_dtype", "bfloat16", "this GPU has no such type; use float16 or none")


def check_plugins(environment: Mapping[str, str]) -> None:
    """Refuses plugins of the launcher, which accelerate silently ignores on CPU."""
    for name in _PLUGINS:
        if environment.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise ArgumentError.of("distributed_type", name, _UNSUPPORTED)


def check_distribution(distributed_type: str, gradient_accumulation_steps: int) -> None:
    """Checks that accelerate wraps the network in no other way, and that it does not divide losses."""
    if distributed_type not in _DISTRIBUTED:
        raise ArgumentError.of("distributed_type", str(distributed_type), _UNSUPPORTED)
    if gradient_accumulation_steps != 1:
        remedy = "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS; to cut a step into parts use --grad-accum-steps"
        raise ArgumentError.of("gradient_accumulation_steps", gradient_accumulation_steps, remedy)
