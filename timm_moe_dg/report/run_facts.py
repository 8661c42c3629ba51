"""What a run's own files say about it: state, options, selected records, and what should be doubted."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError, RecordError
from ..hub.measured import Headline, headline
from ..hub.origin import training_command, without_local_paths
from ..protocols.options import Arguments
from ..protocols.records import Record, read_records
from ..protocols.run_identity import changed_options
from ..protocols.selection import OOD_RULES, SELECTION_RULES, has_ood_validation, validation_accuracy
from ..results.runs import FinishedRun, domain_names
from ..results.tables import TITLES
from ..storage.run_folder import BEST
from ..sweeping.jobs import Job, tail

RESULTS = "results.jsonl"


class Choice(NamedTuple):
    """What a selection rule picks of one run.

    Attributes:
        title: The rule's.
        record: The evaluation.
        validation: Mean accuracy on the training domains' out-splits, share.
        headline: The number that the run is judged by, as its card has it.
    """

    title: str
    record: Record
    validation: float
    headline: Headline

    @property
    def reported(self) -> float:
        """That number, a share."""
        return self.headline.value


@dataclass(frozen=True)
class RunFacts:
    """A run as its files have it, finished or not.

    Attributes:
        run: Its folder and records.
        state: One of `sweeping.jobs.STATES`.
        log: Where a sweep wrote what it printed; need not exist.
    """

    run: FinishedRun
    state: str
    log: Path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.run.folder.resolve().name

    @property
    def records(self) -> Sequence[Record]:
        """Its evaluations."""
        return self.run.records

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return domain_names(self.records)

    @property
    def selected(self) -> Choice:
        """What training-domain validation picks, whose network is in best/."""
        return self.choices[0]

    @property
    def choices(self) -> list[Choice]:
        """What each rule picks that one run is enough for."""
        picked = [(rule, SELECTION_RULES[rule](self.records)) for rule in BEST if self._scored_for(rule)]
        return [Choice(TITLES[rule], one, validation_accuracy(one), headline(one)) for rule, one in picked]

    def _scored_for(self, rule: str) -> bool:
        return rule not in OOD_RULES or all(has_ood_validation(record, OOD_RULES[rule]) for record in self.records)

    @property
    def given(self) -> dict[str, object]:
        """Options that were set to something else than their default."""
        return given(self.run.args)

    @property
    def command(self) -> str:
        """The command that repeats it."""
        return training_command(self.given, width=88)

    @property
    def progress(self) -> str:
        """How far it is."""
        return f"step {self.records[-1].step + 1} of {self.run.args.get('steps', 'an unknown number')}"


def read_run(folder: Path) -> RunFacts:
    """Reads a run; of an unfinished one, the line that is being written may be cut off.

    Raises:
        ArgumentError: There is no evaluation in it.
        RecordError: Its records are damaged.
    """
    whole = folder.resolve()
    job = Job(whole.name, (), folder, whole.parent / "logs" / f"{whole.name}.log")
    state = job.state()
    records = _records(folder / RESULTS, state == "finished")
    if not records:
        remedy = "holds no evaluation yet; wait for the run's first one"
        raise ArgumentError.of("run", str(folder), remedy)
    return RunFacts(FinishedRun(folder, records), state, job.log)


def _records(path: Path, finished: bool) -> list[Record]:
    try:
        return read_records(path)
    except RecordError:
        if finished:
            raise
        lines = path.read_text(errors="replace").splitlines()
        return [Record.from_json(line) for line in lines[:-1]]


def given(args: Arguments) -> dict[str, object]:
    """Returns the options by which a run was started, see `changed_options`, without absolute paths."""
    return without_local_paths(dict(sorted(changed_options(args).items())))


def doubts(facts: RunFacts) -> list[str]:
    """Says what a reader should know before believing the numbers, a sentence each; none is a good sign."""
    found = []
    if facts.state != "finished":
        found.append(f"This run is not finished ({facts.state}, {facts.progress}); its numbers will change.")
    if reason := divergence(facts):
        found.append(reason)
    if at_chance(facts):
        found.append(
            f"Selection is at chance: {100 * facts.selected.validation:.1f}% on the validation images of the training "
            f"domains, where guessing gives {100 / facts.run.args['num_classes']:.1f}%. What was selected means little."
        )
    if not (facts.run.folder / BEST["training_domain_validation"] / "model.safetensors").is_file():
        found.append("The selected network (best/) is not in the folder: sections that need it are left out.")
    found.append("One run is one seed: a difference from another run may be chance. The report of a sweep compares.")
    return found


def at_chance(facts: RunFacts) -> bool:
    """Whether the selected record's validation accuracy is hardly above that of guessing, or no number."""
    classes = facts.run.args.get("num_classes")
    if not classes:
        return False
    chance = 1 / classes
    return not facts.selected.validation > chance + min(0.05, 0.5 * chance)


def divergence(facts: RunFacts) -> str | None:
    """A sentence about a run that diverged: its log ends so, or a loss is no finite number."""
    if facts.state != "finished" and facts.log.is_file():
        lines = [line for line in tail(facts.log).splitlines() if "DivergenceError" in line]
        if lines:
            return f"This run diverged: {lines[-1].strip()}"
    bad = [record.step for record in facts.records if not all(map(isfinite, record.losses.values()))]
    return f"This run diverged: its losses are no finite numbers at step {bad[0]}." if bad else None
