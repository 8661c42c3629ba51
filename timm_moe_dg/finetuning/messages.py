"""What a run says: its plan, progress and evaluations, on the screen, in log.txt and in trackers."""

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from math import isnan
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import yaml
from accelerate import Accelerator
from accelerate.utils import get_int_from_env
from tabulate import tabulate
from tqdm.auto import tqdm
from tqdm.notebook import tqdm as notebook_bar

from ..algorithms.hparams import warn_late
from ..cli.arguments import call_text, option_words
from ..cli.text import one_line
from ..cli.tool import OPTION, command, named_imports, program
from ..data.bands import wavelength
from ..data.inspection import digest
from ..data.splits import NO_DOMAIN
from ..errors import MoeDgError, RunInterruptedError
from ..protocols.evaluation import describe_role
from ..protocols.options import Arguments
from ..protocols.records import OOD_VALIDATION, Record, RoleScores
from ..protocols.selection import summary, validates_on_test_groups, worst_groups
from ..storage.files import explained
from ..storage.run_folder import LOG, RunFolder
from .plan import MAX_CLASSES, RunPlan, class_counts, steps_per_epoch

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_package = logging.getLogger("timm_moe_dg")
_logger = logging.getLogger(__name__)


def is_main_rank() -> bool:
    """Whether the environment names this process as the first one, or names none."""
    return not get_int_from_env(_RANKS, 0)


class _Escaped(logging.Formatter):
    """Escapes the names in a message, and keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(one_line, super().format(record).split("\n")))


class _Screen(logging.Handler):
    """Prints messages above the progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> NoReturn:  # noqa: N802 (logging's name)
        # By default logging prints a traceback and goes on, for example on a full disk
        with explained(Path(self.baseFilename)):
            raise


class RunLog(MemoryHandler):
    """Shows the package's messages, and writes them to log.txt once the run folder exists.

    Only the main process writes, and the others show nothing but errors. Progress bars are not logged. The command line
    is logged and not shown, or `call`, the Python call in its place.
    """

    def __init__(self, words: Sequence[str], call: str | None = None) -> None:
        super().__init__(capacity=sys.maxsize)
        self._words, self._call = words, call
        self.folder: RunFolder | None = None  # of the run, which sets it before it exists
        # Rank comes from the environment: the process group does not exist yet
        self._is_main = is_main_rank()
        self._screen = _Screen()
        self._screen.setFormatter(_Escaped())
        started = call or f"{program('finetune.py')} {shlex.join(words)}"
        self._log(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {started}")

    def __enter__(self) -> Self:
        self._level = _package.level
        _package.setLevel(logging.INFO if self._is_main else logging.ERROR)
        _package.addHandler(self._screen)
        _package.addHandler(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _package.removeHandler(self)
        _package.removeHandler(self._screen)
        _package.setLevel(self._level)
        if error is not None and not isinstance(error, RunInterruptedError):  # logged by the run
            # The screen gets it from the tool
            self._log(f"{type(error).__name__}: {error}" if isinstance(error, MoeDgError) else repr(error))
        if self.target is not None:
            self.target.close()

    def go_on(self, plan: RunPlan, num_processes: int) -> str:
        """Returns the command or call that continues a run."""
        path, algorithm = str(plan.folder.path), plan.options.algorithm
        imports = named_imports(self._words)
        method_words = {"algorithm": algorithm} if ":" in algorithm else {}  # a run folder names no code
        if self._call:
            return call_text("finetune", {"resume": path, **method_words, **({"imports": imports} if imports else {})})
        launched = num_processes > 1 or "ACCELERATE_MIXED_PRECISION" in os.environ
        precision = plan.folder.args.get("mixed_precision")
        flags = f" --mixed_precision {precision}" if precision else ""
        launcher = f"accelerate launch{flags}" if launched else "python"
        words = [path, *(word for pair in method_words.items() for word in option_words(*pair))]
        words += [word for name in imports for word in (OPTION, name)]
        return f"{command('finetune', launcher)} --resume {shlex.join(words)}"

    def shouldFlush(self, record: logging.LogRecord) -> bool:  # noqa: N802 (logging's name)
        """Whether messages can be written. Until its first evaluation the run has no folder, or one to be replaced."""
        folder = self.folder
        if self.target is None and self._is_main and folder is not None and folder.records and folder.path.is_dir():
            self.target = _LogFile(folder.path / LOG, encoding="utf-8", errors="backslashreplace")
            self.target.setFormatter(_Escaped())
        return self.target is not None

    def _log(self, text: str) -> None:
        self.handle(logging.LogRecord(_package.name, logging.INFO, __file__, 0, text, None, None))


def describe(plan: RunPlan) -> str:
    """Describes a run before it starts: a table of the domains and their roles, the training, the output folder."""
    options, training = plan.options, set(plan.training)
    warn_late(plan.hparams, options.steps)
    images = sum(len(domain) for domain in plan.domains)
    width = max(len("domain"), *map(len, plan.names))
    lines = [
        f"data: {options.dataset}, {len(plan.domains)} domains, {images} images, {len(plan.classes)} classes",
        f"  {'domain':<{width}}  {'role':<9}  in-split  out-split",
    ]
    for position, (domain, split) in enumerate(zip(plan.domains, plan.splits, strict=True)):
        role = describe_role(domain, position not in training)
        lines.append(f"  {domain.name:<{width}}  {role:<10} {len(split.inside):8}  {len(split.outside):9}")
    smallest = min(plan.training, key=lambda position: len(plan.splits[position].inside))
    per_epoch = steps_per_epoch(plan.splits, plan.training, options.batch_size)
    if options.dry_run:
        lines += _describe_classes(plan)
    if not options.image_bands.is_rgb:
        lines.append(f"images: {options.in_chans} bands, {plan.domains[0].bands.scaling}")
        if options.bands:
            lines.append(f"bands: {', '.join(f'{name} ({wavelength(name):g} nm)' for name in options.bands)}")
    lines += [
        f"held out: {', '.join(plan.names[position] for position in options.test_domains) or NO_DOMAIN}",
        f"training: {options.model}, {options.algorithm}; {options.steps} steps of {len(training)} x "
        f"{options.batch_size} images, evaluated every {options.eval_freq}; {per_epoch:.1f} steps are an "
        f"epoch, one pass over {plan.names[smallest]}, the smallest training domain; "
        f"{options.steps / per_epoch:.1f} epochs in all",
    ]
    if options.linear_steps:
        probed = "classifier and routers" if options.linear_routers else "classifier"
        lines.append(f"first {options.linear_steps} steps: {probed} alone")
    if options.dry_run:
        rates = f"learning rate {options.lr:g} ({options.sched or 'constant'}), weight decay {options.weight_decay:g}"
        lines.append(f"optimizer: {options.opt}, {rates}")
    return "\n".join(map(one_line, [*lines, f"output: {plan.folder.path}"]))


def _describe_classes(plan: RunPlan) -> list[str]:
    """A table of classes by role. Of many classes the rarest in training are shown."""
    counts = class_counts(plan.domains, plan.splits, plan.training)
    shown = sorted(np.argsort(counts[:, 0], kind="stable")[:MAX_CLASSES].tolist())
    rows = [[one_line(plan.classes[index]), *counts[index]] for index in shown]
    headers = ("class", "training", "validation", "held out")
    table = tabulate([*rows, ["all", *counts.sum(0)]], headers, tablefmt="plain", disable_numparse=[0])
    left_out = [f"the {MAX_CLASSES} rarest of {len(counts)} classes"] if len(counts) > MAX_CLASSES else []
    return [f"  {line}" for line in [*table.splitlines(), *left_out]]


def step_bar(steps: range, name: str, *, hidden: bool = False) -> "tqdm[int]":
    """Makes a progress bar over steps, for notebooks and terminals. A log has the evaluations alone."""
    hidden = hidden or not (sys.stderr.isatty() or issubclass(tqdm, notebook_bar))
    return tqdm(steps, name, steps.stop, initial=steps.start, unit="step", disable=hidden, file=sys.stderr)


def domain_table(record: Record, names: Sequence[str]) -> str:
    """Formats an evaluation as a text table with one row for each domain."""
    losses = "  ".join(f"{name} {value:.4f}" for name, value in record.losses.items())
    width = max(len("domain"), *map(len, names))
    lines = [
        f"step {record.step}  epoch {record.epoch:.1f}  {losses}  {record.step_time:.3f} s/step",
        f"  {'domain':<{width}}  {'role':<5}  in acc  out acc",
    ]
    for domain, (name, inside, outside) in enumerate(zip(names, record.in_acc, record.out_acc, strict=True)):
        role = "test" if domain in record.test_domains else "train"
        lines.append(f"  {name:<{width}}  {role:<5}  {_share(inside):>6}  {_share(outside):>7}")
    labels = {OOD_VALIDATION: f"{OOD_VALIDATION} (held-out groups: oracle)"} if validates_on_test_groups(record) else {}
    lines += [role_line(labels.get(role, role), scores) for role, scores in record.roles.items()]
    return "\n".join(map(one_line, [*lines, f"  {summary(record)}"]))


def _share(value: float) -> str:
    return "-" if isnan(value) else f"{value:.4f}"


def role_line(role: str, scores: RoleScores) -> str:
    """Formats the scores of one role of `Record.roles`, and the number of images of each group, in one line."""
    numbers = ", ".join(f"{group} {number}" for group, number in scores["num_samples"].items())
    return one_line(
        f"  {role}: accuracy {scores['accuracy']:.4f}, worst group {scores['worst_accuracy']:.4f} "
        f"({', '.join(worst_groups(scores))}), F1-macro {scores['f1_macro']:.4f}; images: {numbers}"
    )


@contextmanager
def logging_disabled(level: int) -> Iterator[None]:
    """Leaves out log messages up to a level."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def tracker_errors_logged() -> Iterator[None]:
    """Turns a tracker's disk error into a warning: no result of a run depends on its trackers."""
    try:
        yield
    except OSError as error:
        _logger.warning(f"the trackers cannot write ({error}); the run goes on")


def start_trackers(accelerator: Accelerator, folder: Path, args: Arguments, first_step: int) -> None:
    """Starts the accelerator's trackers, which write into the run folder.

    Entries of an earlier process from `first_step` on are replaced.
    """
    accelerator.project_configuration.logging_dir = str(folder / "tensorboard")
    run_id = digest(bytes(folder.resolve()))  # runs of two sweeps share their names
    options = {
        "tensorboard": {"purge_step": first_step},
        "wandb": {"name": folder.name, "id": run_id, "resume": "allow", "dir": str(folder), "config": dict(args)},
    }
    accelerator.init_trackers("timm_moe_dg", init_kwargs=options)
    for tracker in accelerator.trackers:
        if tracker.name == "tensorboard":
            # accelerate would pass the arguments to add_hparams, which takes no lists
            tracker.writer.add_text("args", f"```yaml\n{yaml.safe_dump(dict(args))}```")
