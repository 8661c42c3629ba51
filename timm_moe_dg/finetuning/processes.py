"""The processes of a run: joining them, settings of the launcher, losing one, and ending together."""

import logging
import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils.environment import parse_flag_from_env
from torch import distributed

from ..cli.arguments import available_cpus, refuse_autocast
from ..errors import ArgumentError, FolderInUseError, MoeDgError, ProcessLostError, RunInterruptedError
from ..protocols.options import RunOptions
from ..protocols.run_identity import launched_processes
from .plan import wanted_trackers

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16"}  # PyTorch's names -> accelerate's
SIGNALS = (signal.SIGTERM, signal.SIGINT)
Item = TypeVar("Item")

_ON_CPU = "on CPU set ACCELERATE_USE_CPU=true and use accelerate launch --multi_gpu --num_processes N --num_machines 1"
_DISTRIBUTED = ("NO", "MULTI_CPU", "MULTI_GPU")  # accelerate's names
_PLUGINS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
_UNSUPPORTED = "the launcher's plugin is not supported; launch without it (--use_fsdp, --use_deepspeed and the like)"
_running = threading.Lock()
_logger = logging.getLogger(__name__)


@contextmanager
def process_state_kept(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Restores random numbers, environment variables, torch's settings and accelerate's state at its end.

    Within, each call chooses its own precision: accelerate's state is empty, and torch has its defaults.

    Raises:
        FolderInUseError: Another call is in progress in this process. Both would share these states.
        ArgumentError: The caller is within torch.autocast.
    """
    refuse_autocast()
    if not _running.acquire(blocking=False):
        remedy = "another call trains or evaluates in this process; wait until it has ended, or start a second process"
        raise FolderInUseError.of("output", str(Path(folder)), remedy)
    with ExitStack() as stack:
        stack.callback(_running.release)
        for state in (PartialState, AcceleratorState, GradientState):
            stack.callback(_restore, state._shared_state, dict(state._shared_state))  # there is no public way
            state._shared_state.clear()
        stack.enter_context(random_numbers_kept())
        stack.callback(_restore, os.environ, dict(os.environ))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())  # the caller may have switched off gradients
        yield


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restores the states of Python's, numpy's and torch's random numbers at its end."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that set_seed changes)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _restore(table: MutableMapping[str, Any], saved: dict[str, Any]) -> None:
    for name in table.keys() - saved.keys():
        del table[name]
    table.update(saved)


def join_processes(options: RunOptions) -> Accelerator:
    """Joins the other processes, checks that launch settings took effect, and logs the resources of the run."""
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
    check_launch(options, accelerator)
    if accelerator.device.type == "cpu" and (options.cpu_threads or not threads_given(os.environ)):
        share = available_cpus() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(options.cpu_threads or max(1, share))
    _logger.info(
        f"processes {accelerator.num_processes}, device {accelerator.device}, threads {torch.get_num_threads()}, "
        f"mixed precision {accelerator.mixed_precision}, seed {options.seed}"
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
    requested = launched_processes(environment)
    if requested is not None and requested != num_processes:
        remedy = f"but this process is in a world of {num_processes}; {_ON_CPU}"
        raise ArgumentError.of("num_processes", requested, remedy)
    # accelerate's launcher exports an address as soon as more than one process is asked for
    if requested is None and "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_ADDR" in environment:
        remedy = f"more were asked for, but accelerate launch --cpu starts one; {_ON_CPU} (for one, unset MASTER_ADDR)"
        raise ArgumentError.of("num_processes", num_processes, remedy)


def check_launch(options: RunOptions, accelerator: Accelerator) -> None:
    """Refuses settings of the launcher that accelerate would ignore in silence, or that the run cannot have."""
    kind, precision, device = accelerator.distributed_type, accelerator.mixed_precision, accelerator.device.type
    plugin = next((name for name in _PLUGINS if parse_flag_from_env(f"ACCELERATE_USE_{name}")), None)
    parts = "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS; to cut a step into parts use --grad-accum-steps"
    refusals: list[tuple[bool, str, object, str]] = [  # whether it is refused, argument, value, remedy
        (plugin is not None, "distributed_type", plugin, _UNSUPPORTED),
        (kind not in _DISTRIBUTED, "distributed_type", str(kind), _UNSUPPORTED),
        (precision == "fp16" and device == "cpu", "amp_dtype", "float16", "needs an accelerator; use bfloat16 or none"),
        (precision == "bf16" and device == "cuda" and not has_bfloat16(), "amp_dtype", "bfloat16",
         "this GPU has no such type; use float16 or none"),
        # accelerate would divide losses by them
        (accelerator.gradient_accumulation_steps != 1, "gradient_accumulation_steps",
         accelerator.gradient_accumulation_steps, parts),
    ]  # fmt: skip
    for is_refused, argument, value, remedy in refusals:
        if is_refused:
            raise ArgumentError.of(argument, value, remedy)
    check_world_size(os.environ, accelerator.num_processes)


def threads_given(environment: Mapping[str, str]) -> bool:
    """Whether the user has set OMP_NUM_THREADS, which torch follows. Launchers set it to 1 if it is not there."""
    is_launched = bool({"ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID"} & environment.keys())
    return "OMP_NUM_THREADS" in environment and not (is_launched and environment["OMP_NUM_THREADS"] == "1")


def wanted_precision(amp_dtype: str | None) -> str | None:
    """Returns accelerate's name of --amp-dtype. None leaves the choice to the launcher."""
    if amp_dtype != "auto":
        return PRECISIONS[amp_dtype] if amp_dtype else None
    # Not on a CPU, where bfloat16 may take longer than float32 (docs/results/speed.md)
    return "bf16" if not parse_flag_from_env("ACCELERATE_USE_CPU") and has_bfloat16() else "no"


def has_bfloat16() -> bool:
    """Whether there is a GPU of NVIDIA or AMD that computes in bfloat16, rather than emulates it."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


class Interrupted(BaseException):
    """Raised at a safe point after SIGTERM or Ctrl-C. Like KeyboardInterrupt, it is no error."""


class Interruption:
    """Catches SIGTERM and Ctrl-C while it is entered as a context. A second Ctrl-C ends the process at once.

    Outside of the main thread, which alone gets signals, nothing is caught.
    """

    def __init__(self, num_processes: int = 1, timeout: timedelta | None = None) -> None:
        self._signal = 0  # number of the signal that came
        # Over gloo, between CPUs: asking the accelerator would wait for it. Any: torch has no type for groups.
        self._group: Any = distributed.new_group(backend="gloo", timeout=timeout) if num_processes > 1 else None

    def __enter__(self) -> Self:
        numbers = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def error(self, message: str) -> RunInterruptedError:
        """Makes the error of a run that the signal ended, with its exit status."""
        error = RunInterruptedError(message)
        error.exit_code = 128 + self._signal
        return error

    def should_stop(self) -> bool:
        """Whether any process got a signal. Every process has to call it, and all get the same answer."""
        if self._group is not None:
            largest = torch.tensor(self._signal)
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self._group)
            self._signal = int(largest)
        return bool(self._signal)

    def until_stopped(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields items until a process gets a signal, and then raises `Interrupted`."""
        for item in items:
            if self.should_stop():
                raise Interrupted
            yield item

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            # print may not be entered twice, as it would be if the signal came during a print
            os.write(2, b"\nending after this step; Ctrl-C again ends at once\n")
