"""Facts about the runs of a sweep: tables with seeds, paired tests, and unfinished runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..errors import RecordError
from ..finetuning.jobs import Job
from ..protocols.records import SCORED_ROLES
from ..protocols.selection import images
from ..results.comparison import PairedTest, cell_texts, paired_tests
from ..results.new_site import NewSite, new_site
from ..results.papers import paper_columns
from ..results.runs import FinishedRun, RowKey, domain_names, find_runs
from ..results.tables import SINGLE_SOURCE, Table, make_tables
from .pictures import Missing, attempt
from .run_facts import RunFacts, at_chance, divergence, read_run, set_options


class DotCell(NamedTuple):
    """Mean and standard error of a cell, with a dot for each seed."""

    text: str
    dots: Sequence[tuple[float, str]]  # position in percent of the table's scale, label


class ComparedTable(NamedTuple):
    """One table with tests of the differences between its rows."""

    table: Table
    columns: Sequence[str]  # titles of the columns with a number in at least one row, and of the papers' figures
    empty: Sequence[str]  # titles of the other columns
    rows: Mapping[str, Sequence[DotCell]]  # title -> cells, in the order of `columns`
    scale: tuple[float, float]  # accuracies in percent at the left and right end of the dots' scale
    tests: Sequence[PairedTest]  # one for every two rows
    images: Mapping[str, str]  # domain, or role of the data's own test domains -> numbers of images in the runs


class Unfinished(NamedTuple):
    """An unfinished run, named by its folder."""

    name: str
    state: str  # one of `finetuning.jobs.STATES`
    progress: str
    divergence: str | None  # a sentence


@dataclass(frozen=True)
class SweepFacts:
    """A sweep as found in its folder."""

    folder: Path
    runs: Sequence[RunFacts]  # finished
    unfinished: Sequence[Unfinished]
    compared: Sequence[ComparedTable] | Missing  # the tables, or the reason why there are none
    sites: Mapping[str, NewSite | Missing]  # data set -> what its runs predict for a new site

    @property
    def options(self) -> dict[str, object]:
        """Options with the same value in all runs, which is not their default."""
        first, *others = [set_options(run.run.args) for run in self.runs]
        return {name: value for name, value in first.items() if all(run.get(name) == value for run in others)}

    @property
    def at_chance(self) -> list[Path]:
        """Folders of the runs whose selection is at chance."""
        return [run.run.folder for run in self.runs if at_chance(run)]

    @property
    def cautions(self) -> list[str]:
        """Sentences that a reader should know before the tables."""
        sentences = []
        if self.unfinished:
            number = len(self.unfinished)
            sentences.append(f"Unfinished runs: {number} of {number + len(self.runs)}. The tables leave them out.")
        sentences += [f"{run.name}: {run.divergence}" for run in self.unfinished if run.divergence]
        sentences += [f"{run.name}: {reason}" for run in self.runs if (reason := divergence(run))]
        if self.at_chance:
            sentences.append(
                f"Selection is at chance in {len(self.at_chance)} of {len(self.runs)} runs, so their selected steps "
                "mean little. These runs are marked in the list of all runs."
            )
        early = [run.name for run in self.runs if len(run.records) > 1 and run.selected.record.step == 0]
        if early:
            names = ", ".join([*early[:3], f"{len(early) - 3} more"][: len(early)])
            sentences.append(f"The selected network is that of step 0, which has taken one step: {names}.")
        if self.runs and len({run.run.seeds[0] for run in self.runs}) == 1:
            sentences.append("All runs have the same trial seed, so no difference can be told from chance.")
        return sentences


def read_sweep(folder: Path) -> SweepFacts:
    """Reads all runs below a folder."""
    finished, folders = find_runs([folder])
    unfinished = [_unfinished(path) for path in folders]
    known = {run.folder for run in finished} | set(folders)
    # A run that ended before its first evaluation has no folder, only a log.
    logs = [log for log in sorted(folder.rglob("logs/*.log")) if log.parent.parent / log.stem not in known]
    unfinished += [Unfinished(log.stem, _state_of_log(log), "no evaluation yet", None) for log in logs]
    by_data = {name: [run for run in finished if run.dataset == name] for name in sorted({r.dataset for r in finished})}
    sites = {name: attempt(partial(new_site, runs)) for name, runs in by_data.items()}
    tables = attempt(lambda: _tables(finished))
    return SweepFacts(folder, [read_run(run.folder) for run in finished], unfinished, tables, sites)


def _unfinished(folder: Path) -> Unfinished:
    facts = attempt(lambda: read_run(folder))
    if isinstance(facts, Missing):
        return Unfinished(folder.name, "incomplete", facts.reason, None)
    return Unfinished(facts.name, facts.state, facts.progress, divergence(facts))


def _state_of_log(log: Path) -> str:
    """State of a run without records."""
    return Job(log.stem, (), log.parent.parent / log.stem, log).state()


def _tables(runs: Sequence[FinishedRun]) -> list[ComparedTable]:
    tables = make_tables(runs)
    if not tables:
        raise RecordError(f"runs={len(runs)} finished: not enough for a table of any selection rule")
    return [_with_dots(table) for table in tables]


def _with_dots(table: Table) -> ComparedTable:
    percents, texts = 100 * table.scores, cell_texts(table)
    # One scale for all cells of a table, so that dots in different cells can be compared.
    low, high = _scale(list(percents.dropna()))
    dots: dict[tuple[RowKey, int], list[tuple[float, str]]] = {}
    for (row, position, seed), value in percents.dropna().items():
        dot = ((value - low) / (high - low) * 100, f"seed {seed}: {value:.1f}")
        dots.setdefault((row, position), []).append(dot)
    figures, columns, empty = paper_columns(table), list[str](), list[str]()
    rows: dict[str, list[DotCell]] = {str(row): [] for row in table.rows}
    for position, title in enumerate(table.columns):
        if (texts[position] == "missing").all():
            empty.append(title)
            continue
        columns += [title, f"{title} (papers)"] if title in figures else [title]
        for row in table.rows:
            rows[str(row)].append(DotCell(texts[position][row], dots.get((row, position), ())))
            rows[str(row)] += [DotCell(figures[title][row], ())] if title in figures else []
    return ComparedTable(table, columns, empty, rows, (low, high), paired_tests(table), _images(table))


def _images(table: Table) -> dict[str, str]:
    """Numbers of the images that a table's accuracies are computed on, as far as runs recorded them."""
    numbers: dict[str, set[int | None]] = {}
    single_source = table.rule == SINGLE_SOURCE
    for record in (run.records[0] for runs in table.runs.values() for run in runs):
        names = dict(enumerate(domain_names([record])))
        domains = names if single_source else record.test_domains
        counts = {names[domain]: record.images([domain], out=single_source) for domain in domains}
        own = {role: images(scores) for role, scores in record.roles.items() if role in SCORED_ROLES}
        for name, number in (own or counts).items():
            numbers.setdefault(name, set()).add(number)
    known = {name: sorted(filter(None, several)) for name, several in numbers.items()}
    return {name: " or ".join(map(str, several)) for name, several in sorted(known.items()) if several}


def _scale(percents: Sequence[float]) -> tuple[float, float]:
    """Two multiples of five around all values, with a margin."""
    if not percents:
        return 0.0, 100.0
    return max(0.0, (min(percents) - 1) // 5 * 5), min(100.0, -(-(max(percents) + 1) // 5) * 5)
