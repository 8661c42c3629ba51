"""Scores of a trained network on a data set, by domain."""

import argparse
import logging
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accelerate import Accelerator
from torch import distributed, nn

from ..cli.arguments import LoaderOptions, TrainedModelOptions, model_keywords, option
from ..cli.text import one_line
from ..cli.values import LOCAL, key_value, position_or_name, positive_int
from ..data import (
    BENCHMARKS,
    Domain,
    EvaluationImages,
    Split,
    drop_unreadable,
    evaluation_loader,
    evaluation_only,
    get_benchmark,
)
from ..data.bands import Bands, band_settings
from ..data.inspection import fingerprint, with_readable
from ..data.splits import domain_positions, group_squares, hold_out, image_groups, make_splits
from ..errors import ArgumentError, MoeDgError
from ..finetuning.messages import role_line
from ..finetuning.processes import check_world_size, leave_processes, process_state_kept
from ..networks.averages import evaluation_view, load_predictor
from ..networks.bands import bands_of, check_bands
from ..networks.build import Network, check_name, warn_of_other_values
from ..networks.calibration import calibrate, find_calibration
from ..networks.trained import WithFeatures, match_classes, takes_metadata, unknown_metadata, warn_of_unknown_metadata
from ..protocols.evaluation import SPLITS, Recognized, collect_outputs, recognize, restrict, unseen_domains
from ..protocols.options import DATA, DEFAULTS, SPLITTING, options_with
from ..protocols.run_identity import method_of
from ..storage.files import all_or_nothing
from ..storage.run_folder import run_arguments, save_calibration, warn_of_unfinished
from .evaluated import FILES, Evaluated, save_features, score_table, write_files

HELD_OUT, ALL = "held-out", "all"
_logger = logging.getLogger(__name__)
CHANGING = ("img_size", "coverage_radius", "expert_mode", "initial_checkpoint")  # options of another network
RUN_OPTIONS = options_with(DATA)  # options of finetune.py; their default is the run's value


# fmt: off
@dataclass(frozen=True, kw_only=True)
class EvaluationDataOptions:
    """The data and its splits. For the model of a run, None stands for the run's value."""

    dataset: str | None = option(None, metavar="NAME", help="data set; finetune --list-datasets names all")
    data_dir: str | None = option(None, metavar="DIR", help="folder of the images")
    metadata_columns: Sequence[str] | None = option(None, nargs="+", metavar="COLUMN",
        help="MoGE: numeric columns of metadata.csv that the model reads, beside coordinates")
    in_chans: int | None = option(None, type=positive_int, metavar="N", help="number of bands (default otherwise: 3)")
    bands: Sequence[str] | None = option(None, nargs="+", metavar="BAND", help="names of the bands of the images")
    test_domains: Sequence[int | str] | None = option(None, "--test-envs", type=position_or_name, nargs="+",
        metavar="DOMAIN", help="domains that the model was not trained on, by name or position")
    domains: Sequence[int | str] | None = option(None, type=position_or_name, nargs="+", metavar="DOMAIN",
        help="domains of the overall scores: names, held-out, or all (default: held-out, if known)")
    calibrate: bool = option(False,
        help="fit the model's temperature on the validation images of its training domains first, and store it with it")
    split: str = option("all", choices=SPLITS, help="part of each domain to score (default: %(default)s)")
    trial_seed: int | None = option(None, type=int, metavar="N",
        help="repetition, which decides the splits (default otherwise: 0)")
    holdout_fraction: float | None = option(None, type=float, metavar="X",
        help="share of each domain's images for validation (default otherwise: 0.2)")
    split_by_photograph: bool | None = option(None, action=argparse.BooleanOptionalAction,
        help="keep all versions of a photograph in the same split (default otherwise: the data set's)")
    group_column: str | None = option(None, metavar="COLUMN|PATTERN",
        help="keep images of a group in the same split, as in finetune (default otherwise: off)")
    columns: Mapping[str, str] | None = option(None, type=key_value, nargs="*", metavar="NAME=COLUMN",
        help="your names of columns of metadata.csv, as in finetune")
    skip_unreadable: bool | None = option(None, action=argparse.BooleanOptionalAction,
        help="leave out damaged images (default otherwise: stop at the first)")


@dataclass(frozen=True, kw_only=True)
class EvaluationOutputOptions:
    """The files of an evaluation."""

    output: str | None = option(None, metavar="DIR",
        help="folder for tables and pictures (default: print the table only)")
    save_features: str | None = option(None, metavar="FILE", help="NPZ file for the classifier's inputs")
    force: bool = option(False, help="replace existing files")
# fmt: on


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(TrainedModelOptions, EvaluationDataOptions, LoaderOptions, EvaluationOutputOptions):
    """All options of an evaluation."""

    network: nn.Module | None = None  # in place of that of `model`, whose name is then for messages alone


@dataclass(frozen=True, kw_only=True)
class FilledEvaluateOptions(EvaluateOptions):
    """All options of an evaluation, with those of the run filled in that were not given."""

    dataset: str
    in_chans: int


class Evaluation(NamedTuple):
    """The result of an evaluation."""

    options: FilledEvaluateOptions  # with positions of domains instead of names
    scores: Evaluated
    files: Sequence[str]  # names of the files in `options.output`
    is_main_process: bool

    def text(self) -> str:
        """Returns the printed table."""
        options, scores = self.options, self.scores
        heading = f"{options.model} on {options.dataset}, {options.split} images of each domain"
        lines = [one_line(heading), score_table(scores)]
        if options.split != "out":
            lines += [role_line(role, numbers).strip() for role, numbers in scores.roles.items()]
        return "\n".join([*lines, *([f"written to {options.output}: {', '.join(self.files)}"] if self.files else [])])


class _Data(NamedTuple):
    domains: Sequence[Domain]
    recognized: Sequence[Recognized] | None  # the run's domains among them; None if the run recorded no names
    test_domains: Sequence[int]  # positions of the domains that the model was not trained on
    counted: Sequence[int]  # positions of the domains of the overall scores

    @property
    def roles(self) -> list[str]:
        """Each domain's part in training as the run says; empty if it says nothing."""
        if self.recognized is None:
            return []
        return [part.role(domain) for domain, part in zip(self.domains, self.recognized, strict=True)]


def evaluate(options: EvaluateOptions) -> Evaluation:
    """Scores a model on all processes, and writes the requested files on the main process.

    The state of the process is that of before at the end.
    """
    if options.save_features and Path(options.save_features).suffix != ".npz":
        raise ArgumentError.of("save_features", options.save_features, "give a file that ends in .npz")
    filled = _fill_in(options)
    with ExitStack() as stack:
        stack.enter_context(process_state_kept(options.output or ""))
        grouped = distributed.is_initialized()
        accelerator = Accelerator()
        stack.callback(leave_processes, accelerator, keep_group=grouped)
        check_world_size(os.environ, accelerator.num_processes)
        is_main = accelerator.is_main_process
        with _output_places(options) if is_main else nullcontext((None, None)) as (folder, features):
            data = _read_data(filled)
            filled = replace(filled, test_domains=data.test_domains, domains=data.counted)
            scores = _evaluate_network(filled, data, accelerator)
            if folder:
                names = ("model", "initial_checkpoint", *RUN_OPTIONS, "split", "expert_mode", "coverage_radius")
                write_files(scores, folder, {name: vars(filled)[name] for name in names})
            if features:
                save_features(scores, features)
            files = sorted(path.name for path in folder.iterdir()) if folder else []
        return Evaluation(filled, scores, files, is_main)


def _fill_in(options: EvaluateOptions) -> FilledEvaluateOptions:
    """Fills in options that were not given, from the run that the model belongs to."""
    run = run_arguments(options.model)
    # Positions of the run's domains mean nothing in other data; `_read_data` finds these domains
    defaults = {**DEFAULTS, "dataset": None, **run, "test_domains": None}
    if options.dataset not in (None, run.get("dataset")):
        reads_columns = get_benchmark(options.dataset).takes_metadata_columns
        defaults |= dict.fromkeys(["data_dir", "columns", *([] if reads_columns else ["metadata_columns"])])
    values = vars(options) | {name: defaults.get(name) for name in RUN_OPTIONS if vars(options)[name] is None}
    if values["dataset"] is None:
        if options.network is None:
            check_name(options.model)  # a misspelled folder is more likely than a model without data
        raise ArgumentError.of("dataset", None, f"give --dataset, one of {', '.join(BENCHMARKS)}")
    if values["split_by_photograph"] is None:
        values["split_by_photograph"] = get_benchmark(values["dataset"]).split_by_photograph
    return FilledEvaluateOptions(**values | band_settings(values["bands"], values["in_chans"]))


def _read_data(options: FilledEvaluateOptions) -> _Data:
    """Reads the data, and finds the run's domains and those that the options name in it."""
    run = run_arguments(options.model)
    place = (options.data_dir, options.metadata_columns or (), Bands.of(options.bands or options.in_chans))
    read = get_benchmark(options.dataset).read
    domains: Sequence[Domain] = read(*place, evaluating=True, columns=options.columns)
    digests = fingerprint(domains) if run.get("domain_digests") else []
    if options.skip_unreadable:
        domains, _ = drop_unreadable(domains, options.workers)
        digests = with_readable(digests, domains) if digests else []
    recognized = recognize(run, domains, digests)
    untrained = [index for index, domain in enumerate(recognized) if not domain.trained] if recognized else []
    if options.test_domains is None:
        named: Sequence[int] = untrained if recognized else evaluation_only(domains)
    else:
        named = _find_domains(options, "test_domains", domains)
        if trained := [domains[index].name for index in named if recognized and recognized[index].trained]:
            raise ArgumentError.of("test_domains", trained, "the run trained on these; use --domains to score them")
    # Those that the run did not train on are none of training, whether they are named or not
    test_domains = untrained if recognized else named
    domains = hold_out(domains, test_domains)
    data = _Data(domains, recognized, test_domains, [])
    if options.domains == [ALL] or (options.domains is None and not test_domains):
        counted: Sequence[int] = range(len(domains))
    elif options.domains in (None, [HELD_OUT]):
        counted = unseen_domains(domains, named, data.roles) or named
    else:
        counted = _find_domains(options, "domains", domains)
    if not counted:
        raise ArgumentError.of("domains", HELD_OUT, "no domain is marked as held out; name some with --test-domains")
    return data._replace(counted=list(counted))


def _find_domains(options: EvaluateOptions, name: str, domains: Sequence[Domain]) -> list[int]:
    """Positions of the domains that an option names, without repetition."""
    names, given = [domain.name for domain in domains], vars(options)[name]
    positions = domain_positions(given, names, name, [domain.group for domain in domains])
    return list(dict.fromkeys(positions))


def _split(options: FilledEvaluateOptions, data: _Data) -> list[Split]:
    """Splits the domains as the run did."""
    domains, recognized = data.domains, data.recognized
    # A split depends on the domain's position in the run's data
    places = [*range(len(domains))] if recognized is None else [domain.position for domain in recognized]
    # Groups that several domains share are split by name, so that new domains would change the run's own splits
    run_domains = [index for index, place in enumerate(places) if place is not None or not options.group_column]
    if not run_domains:  # new data may have no such groups
        options, run_domains = replace(options, group_column=None), [*range(len(domains))]
    positions = [index if (place := places[index]) is None else place for index in run_domains]
    training = [number for number, index in enumerate(run_domains) if index not in data.test_domains]
    parts = make_splits([domains[index] for index in run_domains], training, vars(options), positions=positions)
    splits = dict(zip(run_domains, parts, strict=True))
    recorded = run_arguments(options.model).get("domain_digests") or () if options.group_column else ()
    intact = {domain.position for domain in recognized or () if not domain.changed}
    for index, domain in enumerate(recognized or ()):
        # Which of its images were trained on cannot be told, nor if another domain may have had the same groups
        if domain.trained and (domain.changed or (recorded and not intact.issuperset(range(len(recorded))))):
            splits[index] = Split(np.arange(len(domains[index])), np.arange(0))
    if new := [index for index in range(len(domains)) if index not in splits]:
        groups = image_groups(domains, vars(options)) or []
        trained = [index for index in run_domains if index not in data.test_domains]
        seen = {groups[index][row] for index in trained for part in vars(splits[index]).values() for row in part}
        splits |= {index: _unseen(domains[index], groups[index], seen) for index in new}
    return [splits[index] for index in range(len(domains))]


def _unseen(domain: Domain, groups: Sequence[str], seen: Container[str]) -> Split:
    """Leaves out the images of a new domain whose groups the run has trained on or validated with."""
    rows = np.flatnonzero([group not in seen for group in groups])
    if number := len(domain) - len(rows):
        reason = "are of groups that the run trained on or validated with, and are left out"
        _logger.warning(f"{number} of {len(domain)} images of the new domain {domain.name!r} {reason}")
    return Split(rows, rows[:0])


def _evaluate_network(options: FilledEvaluateOptions, data: _Data, accelerator: Accelerator) -> Evaluated:
    """Loads the network and predicts every image; all processes take part."""
    named = options.network is None and ":" not in options.model  # a timm model, which has no saved size
    size = options.img_size or (get_benchmark(options.dataset).image_size if named else None)
    network: Network = options.network or load_predictor(options.model, **{**model_keywords(options), "img_size": size})
    if options.network is None:
        warn_of_unfinished(options.model)
    check_bands(network, Bands.of(options.bands or options.in_chans))
    data = data._replace(domains=[replace(domain, bands=bands_of(network)) for domain in data.domains])
    warn_of_other_values(network, data.domains)
    domains, splits, positions = match_classes(network, data.domains, _split(options, data))
    with_metadata = takes_metadata(network, domains, options.metadata_columns)
    unknown = sum(map(len, domains))
    for rows in (np.asarray(domain.metadata) for domain in domains if with_metadata):
        unknown -= int((~unknown_metadata(rows, options.metadata_columns or ())).sum())
    warn_of_unknown_metadata(network, unknown, sum(map(len, domains)))
    network = network.to(accelerator.device)
    if options.calibrate:
        _calibrate(options, network, data._replace(domains=domains), splits, accelerator)
    calibration = find_calibration(options.model, network) if options.network is None else None
    view = evaluation_view(network, size)
    scored = restrict(splits, options.split)
    images = EvaluationImages(domains, scored, view, with_metadata=with_metadata)
    on_cpu = accelerator.device.type == "cpu"
    loader = evaluation_loader(images, batch_size=options.batch_size, workers=options.workers, pin_memory=not on_cpu)
    described = WithFeatures(network) if options.output or options.save_features else network
    temperature = calibration.temperature if calibration else 1.0
    batches = accelerator.prepare(loader)
    answers = collect_outputs(described, batches, positions, accelerator.gather_for_metrics, temperature)
    name = run_arguments(options.model).get("model", options.model)
    squares: list[list[int]] = []
    with suppress(MoeDgError):  # new data may have no such groups
        squares = group_squares(scored, image_groups(domains, vars(options)) or []) if options.group_column else []
    return Evaluated(name, images, answers, data.test_domains, data.counted, data.roles, squares)


def _calibrate(
    options: FilledEvaluateOptions, network: Network, data: _Data, splits: Sequence[Split], accelerator: Accelerator
) -> None:
    """Calibrates a network on the main process, and stores the calibration in the network's folder."""
    given = {name: vars(options)[name] for name in CHANGING if vars(options)[name] is not None}
    if options.network is not None or not options.model.startswith(LOCAL):
        raise ArgumentError.of("calibrate", True, "stores a file with the model; give the folder of a run")
    if given:
        name, value = given.popitem()
        raise ArgumentError.of(name, value, "changes the model that --calibrate stores with; leave it out")
    run = run_arguments(options.model)
    for name in SPLITTING:
        if (value := vars(options)[name]) != run.get(name, value):
            remedy = f"is {run[name]!r} in the run, which trained on images that would validate; leave it out"
            raise ArgumentError.of(name, value, remedy)
    if accelerator.is_main_process:
        training = [index for index in range(len(data.domains)) if index not in data.test_domains]
        held_out = unseen_domains(data.domains, data.test_domains, data.roles)
        settings = {name: vars(options)[name] for name in ("metadata_columns", "batch_size", "workers")}
        settings["method"] = method_of(run)
        calibration = calibrate(network, data.domains, splits, training, held_out, **settings)
        save_calibration(calibration, Path(options.model.removeprefix(LOCAL)))
    accelerator.wait_for_everyone()


@contextmanager
def _output_places(options: EvaluateOptions) -> Iterator[tuple[Path | None, Path | None]]:
    """Yields a folder for results and a file for features, or None; both are complete at the end or do not exist.

    Features of the same folder are moved together with the scores, and those of another folder after them.
    """
    file = Path(options.save_features) if options.save_features else None
    together = bool(file and options.output and file.parent.resolve() == Path(options.output).resolve())
    names = [*FILES, *([file.name] if file and together else [])]
    with ExitStack() as stack:
        parent = folder = None
        if file and not together:
            parent = stack.enter_context(all_or_nothing(file.parent, [file.name], overwrite=options.force))
        if options.output:
            folder = stack.enter_context(all_or_nothing(options.output, names, overwrite=options.force))
        place = folder if together else parent
        yield folder, place / file.name if file and place else None
