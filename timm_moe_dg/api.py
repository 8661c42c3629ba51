"""Training, evaluation and prediction from Python: the commands as functions.

Keywords are the options of the command, with the same names, defaults and checks. The functions raise the exceptions of
`errors`, and leave the process as they found it.
"""

import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn

from .cli.arguments import (
    ImportOptions,
    TrainedModelOptions,
    call_text,
    checked,
    declared,
    describe_keywords,
    fields_of,
    refuse_autocast,
)
from .cli.tool import OPTION, import_modules, needs_train
from .cli.values import holds_network, run_folder
from .errors import ArgumentError, MoeDgError, OptionError
from .networks.trained import load_trained
from .protocols.options import RunOptions, run_parser
from .protocols.records import Record, read_records
from .storage.run_folder import ARGUMENTS, DONE, RESULTS

if TYPE_CHECKING:
    from pandas import DataFrame

    from . import parameters

Source: TypeAlias = "Run | str | os.PathLike[str] | nn.Module"  # of a network
P = ParamSpec("P")
R = TypeVar("R")
_logger = logging.getLogger(__name__)
_FEATURE = "training from Python"


def _takes(table: Callable[[], Callable[P, object]]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Tells type checkers that a function has the parameters of a class, which the program never reads."""
    return lambda function: function


class Run:
    """The folder of a run, also of one in progress. It can stand wherever a path can.

    Args:
        path: Folder that `finetune` wrote.

    Raises:
        ArgumentError: The folder is not that of a run.

    >>> timm_moe_dg.Run("output/missing")
    Traceback (most recent call last):
    timm_moe_dg.errors.ArgumentError: path='output/missing': is not the folder of a run; give one that holds args.yaml
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        _check_path("path", path)
        self.path = run_folder(os.fspath(path))
        if not (self.path / ARGUMENTS).is_file():
            remedy = f"is not the folder of a run; give one that holds {ARGUMENTS}"
            raise ArgumentError.of("path", os.fspath(path), remedy)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def is_finished(self) -> bool:
        """Whether the run has taken all of its steps."""
        return (self.path / DONE).exists()

    @property
    def records(self) -> "DataFrame":
        """The evaluations: a row for each evaluation and domain.

        The columns are step, epoch, averaged, domain, role ("test" for domains held out), in_acc and out_acc
        (accuracies on both splits), out_loss, step_time in seconds, and the mean losses of the steps since the last
        evaluation.
        """
        with needs_train(_FEATURE):
            from pandas import DataFrame
        records = read_records(self.path / RESULTS, unfinished=not self.is_finished)
        return DataFrame([row for record in records for row in _record_rows(record)])

    def model(self) -> nn.Module:
        """Loads the best network so far, as `timm.create_model` does, in evaluation mode."""
        with needs_train(_FEATURE):
            from .finetuning.processes import random_numbers_kept
        with random_numbers_kept():  # those of the first weights
            return load_trained(f"local-dir:{self.path / 'best'}")


@_takes(lambda: parameters.Finetune)
def finetune(**options: Any) -> Run | None:
    """Fine-tunes any timm model with some domains held out; the command `timm-moe-dg finetune`.

    An interrupt (Ctrl-C, or the stop button of a notebook) writes a checkpoint. The message says how to go on.

    Returns:
        The run, or None for a dry run.

    Raises:
        OptionError: An option that does not exist.
        ArgumentError: An option with a value that cannot work.
        FolderInUseError: Another process writes to the run folder, or another call trains in this process.
        RunInterruptedError: The run was interrupted.

    >>> size = {"patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "moe_layers": (1,)}
    >>> options = {"model": "gmoe_tiny_patch16", "model_kwargs": size, "img_size": 16, "steps": 3, "workers": 0}
    >>> run = timm_moe_dg.finetune(dataset="rotated_digits", test_domains=["rot_75"], **options)
    processes 1, ...
    >>> run.is_finished, run.model().num_classes
    (True, 10)
    >>> run.records[run.records.role == "test"].domain.unique().tolist()
    ['rot_75']
    """
    with needs_train(_FEATURE):
        from .finetuning.loop import finetune as run_loop
        from .finetuning.messages import RunLog
        from .finetuning.resume import nothing_to_do, parse_resumable
    values, modules = _checked_options("finetune", RunOptions, options)
    filled = parse_resumable(run_parser(), (), values)
    if text := nothing_to_do(filled):
        _logger.warning(text)
        return Run(Path(filled.output, filled.experiment or ""))
    words = [f"{OPTION}={module}" for module in modules]
    with _frames_released(), RunLog(words, call_text("finetune", options)) as log:
        path = run_loop(filled, log)
    if filled.dry_run:
        return None
    run = Run.__new__(Run)  # unchecked, since processes on other machines may not see the folder
    run.path = path
    return run


@_takes(lambda: parameters.Compare)
def compare(**options: Any) -> "DataFrame | None":
    """Compares rows on one data set, and says which one to take; the command `timm-moe-dg compare`.

    `options={"steps": 60}` holds options of `finetune` for every trained row.

    Returns:
        A line for each row, in percent and points: its accuracy on each held-out domain, mean, standard_error, low and
        high (95% at a new site), gmacs, parameters, the difference to dense and its test (`pair_` and a name), and
        `recommended`. `attrs["verdict"]` holds the sentences. None for a dry run, or if runs are left.

    >>> timm_moe_dg.compare(dataset="folder", data_dir="missing", rows=["dense", "gmoe"])
    Traceback (most recent call last):
    timm_moe_dg.errors.DataError: ...
    """
    with needs_train(_FEATURE):
        from .comparisons.compare import CompareOptions
        from .comparisons.compare import compare as run_comparison
        from .results.answer import answer_frame
    values, modules = _checked_options("compare", CompareOptions, options)
    answer = run_comparison(CompareOptions(**values), {}, modules)
    if answer is None:
        return None
    frame = answer_frame(answer)
    frame.attrs["verdict"] = answer.verdict
    return frame


@_takes(lambda: parameters.Evaluate)
def evaluate(run_or_model: Source, **options: Any) -> "DataFrame":
    """Scores a model by domain; the command `timm-moe-dg evaluate`.

    Args:
        run_or_model: A finished run, its folder, the name of a model as the command takes it, or a network in
            evaluation mode, which has no calibration. A run is scored on its own data and splits by default.
        **options: Those of the command, as below.

    Returns:
        A row for each domain, with the columns of per_domain.csv: domain, test (1 for domains that were not trained
        on), images, accuracy, f1_macro, ece, balanced_accuracy, sensitivity, specificity, auc, in_accuracy,
        out_accuracy, role and ece_uncalibrated (without the temperature).

    >>> size = {"img_size": 16, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "moe_layers": (1,)}
    >>> network = timm.create_model("gmoe_tiny_patch16", num_classes=10, **size).eval()
    >>> scores = timm_moe_dg.evaluate(network, dataset="rotated_digits", workers=0)
    >>> scores.set_index("domain").images[:2].to_dict()
    {'rot_0': 300, 'rot_15': 300}
    """
    with needs_train(_FEATURE):
        from pandas import DataFrame

        from .inference.evaluate import EvaluateOptions
        from .inference.evaluate import evaluate as run_evaluation
        from .inference.evaluated import domain_rows
    values, network = _model_options("evaluate", EvaluateOptions, run_or_model, options)
    with _frames_released():
        evaluation = run_evaluation(EvaluateOptions(**values, network=network))
    columns, *rows = domain_rows(evaluation.scores)
    return DataFrame(rows, columns=columns)


@_takes(lambda: parameters.Predict)
def predict(
    run_or_model: Source,
    images: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    **options: Any,
) -> "DataFrame":
    """Predicts the classes of image files; the command `timm-moe-dg predict`.

    Args:
        run_or_model: As for `evaluate`.
        images: Files, folders (searched to any depth), patterns, lists or tar files, one or several.
        **options: Those of the command, as below.

    Returns:
        A row for each image, with the columns of predictions.csv: path, class, probability, for top_k the further
        classes class_2, probability_2 and so on, status, and the further columns. An image that cannot be decoded
        has no class. If `output` is a folder, the numbers of the finished parts in it.

    >>> from PIL import Image
    >>> Image.new("RGB", (16, 16)).save("image.png")
    >>> network = timm.create_model("gmoe_tiny_patch16", num_classes=3).eval()
    >>> timm_moe_dg.predict(network, "image.png", workers=0).columns.tolist()
    ['path', 'class', 'probability', 'status']
    """
    with needs_train(_FEATURE):
        from pandas import DataFrame

        from .finetuning.processes import random_numbers_kept
        from .inference.image_rows import check_images
        from .inference.predict import PredictOptions, predict_parts
        from .inference.predict import predict as run_prediction
        from .inference.predictor import answer_columns, load_model
    sources = [images] if isinstance(images, str | os.PathLike) or not isinstance(images, Iterable) else list(images)
    if not sources or not all(isinstance(source, str | os.PathLike) for source in sources):
        raise ArgumentError.of("images", images, "give files, folders or patterns, as a text, a path or a list of them")
    values, network = _model_options("predict", PredictOptions, run_or_model, options)
    filled = PredictOptions(**values, images=[os.fspath(source) for source in sources])
    refuse_autocast()
    check_images(filled.images)
    with random_numbers_kept():
        model = load_model(filled, network)
        if filled.folder is not None:
            return DataFrame({"part": predict_parts(filled, model, filled.folder).finished()})
        return DataFrame(run_prediction(filled, model), columns=["path", *answer_columns(filled)])


@_takes(lambda: parameters.PredictPart)
def predict_part(
    run_or_model: Source,
    rows: "DataFrame | Mapping[str, Sequence[object]]",
    **options: Any,
) -> "DataFrame":
    """Predicts a table of images, such as a batch of Ray Data. The command predicts each part with the same code.

    Args:
        run_or_model: As for `evaluate`. Give a network if you call the function many times.
        rows: Columns path, and optionally lon and lat in degrees (nan: unknown) with the further columns that the model
            reads, or location for a model with location ids.
        **options: As below.

    Returns:
        A row for each image, with the columns of the command's Parquet files: path, lon, lat, class, probability, the
        further classes of `top_k`, status, and the further `columns`.

    >>> from PIL import Image
    >>> Image.new("RGB", (16, 16)).save("image.png")
    >>> network = timm.create_model("moge_tiny", num_classes=3).eval()
    >>> table = timm_moe_dg.predict_part(network, {"path": ["image.png"], "lon": [13.4], "lat": [52.5]}, workers=0)
    >>> table.columns.tolist()
    ['path', 'lon', 'lat', 'class', 'probability', 'status']
    """
    with needs_train(_FEATURE):
        from pandas import DataFrame

        from .data.readers.csv_tables import text_table
        from .finetuning.processes import random_numbers_kept
        from .inference.image_rows import rows_of
        from .inference.predictor import PartOptions, Predictor, load_model
    values, network = _model_options("predict_part", PartOptions, run_or_model, options)
    filled = PartOptions(**values)
    refuse_autocast()
    with random_numbers_kept():
        predictor = Predictor(filled, load_model(filled, network))
        names = [name for name in ("path", *predictor.names.all) if name in rows]
        table = text_table(Path("rows"), {name: rows[name] for name in names})
        table.require(["path"], "name the images there")
        images = rows_of(table, predictor.names, "")
        (part,) = predictor.parts([(0, images)])
    return DataFrame({name: list(column) for name, column in part.table.items()})


def read_runs(folder: str | os.PathLike[str]) -> "DataFrame":
    """Reads the evaluations of all runs below a folder, with settings and scores as columns.

    `timm_moe_dg.results.runs.read_runs` describes the columns.

    >>> timm_moe_dg.read_runs("output/missing")
    Traceback (most recent call last):
    timm_moe_dg.errors.RecordError: ...
    """
    with needs_train(_FEATURE):
        from .results.runs import read_runs as read
    _check_path("folder", folder)
    return read(folder)


def _checked_options(function: str, table: Any, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns checked options by name and the names of the user's modules, which are imported."""
    values = checked(fields_of(table, ImportOptions), options, function, strict=True)
    modules = values.pop("imports", [])
    import_modules(modules)
    return values, modules


def _model_options(
    function: str, table: Any, run_or_model: object, options: Mapping[str, Any]
) -> tuple[dict[str, Any], nn.Module | None]:
    """Returns checked options by name, and the network if one was given in place of a name."""
    if "model" in options:
        raise OptionError.of("model", options["model"], "the first argument is the model; leave this one out")
    if isinstance(run_or_model, nn.Module):
        network, name = run_or_model, type(run_or_model).__name__
        if any(module.training for module in network.modules()):
            raise ArgumentError.of("run_or_model", name, "is in training mode; call its method eval() first")
        if given := [option for option in declared(TrainedModelOptions) if options.get(option) is not None]:
            raise ArgumentError.of(given[0], options[given[0]], "describes a model by name; leave it out for a network")
        if not hasattr(network, "pretrained_cfg"):
            raise ArgumentError.of("run_or_model", name, "is not a model of timm; give one, or the folder of a run")
        if (dtype := next(network.parameters()).dtype) != torch.float32:
            raise ArgumentError.of("run_or_model", name, f"has weights in {dtype}; call its method float() first")
    elif isinstance(run_or_model, str | os.PathLike):
        network, name = None, _checked_name(os.fspath(run_or_model))
    else:
        remedy = "give a run, its folder, the name of a model, or a network"
        raise ArgumentError.of("run_or_model", run_or_model, remedy)
    return _checked_options(function, table, {**options, "model": name})[0], network


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError.of(name, value, "give one folder, as a text or a path")


def _checked_name(name: str) -> str:
    """Checks that the name of a folder is that of a finished run, or of a network in timm's format."""
    folder = Path(name)
    if (folder / ARGUMENTS).is_file() and not (folder / DONE).exists():
        remedy = f"the run has not finished; go on with finetune(resume={name!r}), or give {str(folder / 'best')!r}, "
        raise ArgumentError.of("run_or_model", name, f"{remedy}its best network so far")
    if folder.is_dir() and not any(map(holds_network, (folder, folder / "best"))):
        raise ArgumentError.of("run_or_model", name, "is not the folder of a run or of a network; give one of these")
    return name


def _record_rows(record: Record) -> Iterator[dict[str, object]]:
    count = len(record.in_acc)
    names = record.args.get("domains") or range(count)
    for domain, name in enumerate(names):
        yield {
            "step": record.step,
            "epoch": record.epoch,
            "averaged": record.averaged,
            "domain": name,
            "role": "test" if domain in record.test_domains else "train",
            "in_acc": record.in_acc[domain],
            "out_acc": record.out_acc[domain],
            "out_loss": record.out_loss[domain] if record.out_loss else float("nan"),
            "step_time": record.step_time,
            **record.losses,
        }


@contextmanager
def _frames_released() -> Iterator[None]:
    """Lets an error release the network and the loaders' workers, although a notebook keeps its traceback."""
    try:
        yield
    except MoeDgError as error:
        traceback.clear_frames(error.__traceback__)
        raise


describe_keywords(finetune, RunOptions)
with suppress(ModuleNotFoundError):  # without the extra, calling them says what to install
    from .comparisons.compare import CompareOptions
    from .inference.evaluate import EvaluateOptions
    from .inference.predict import PredictOptions
    from .inference.predictor import PartOptions

    describe_keywords(compare, CompareOptions)
    describe_keywords(evaluate, EvaluateOptions, skip=["model"])
    describe_keywords(predict, PredictOptions, skip=["model"])
    describe_keywords(predict_part, PartOptions, skip=["model"])
