"""Facts about a run from its own files: state, options, selected records, and cautions for the reader."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from ..errors import ArgumentError, RecordError
from ..finetuning.jobs import Job, tail
from ..hub.folder import training_command, without_local_paths
from ..networks.build import ensemble_members
from ..protocols.options import Arguments
from ..protocols.records import Record, read_records
from ..protocols.run_identity import changed_options
from ..protocols.selection import (
    FEW,
    SELECTION_RULES,
    Headline,
    headlines,
    rule_title,
    selection_remark,
    validation_accuracy,
)
from ..results.new_site import near_chance
from ..results.runs import RESULTS, FinishedRun, domain_names
from ..storage.run_folder import BEST


class Choice(NamedTuple):
    """The record that a selection rule selects from one run, with the rule's title and the reported number."""

    title: str
    record: Record
    validation: float  # mean accuracy on the out-splits of the training domains, a share
    headline: Headline  # the reported accuracy


@dataclass(frozen=True)
class RunFacts:
    """A run, finished or not, as found in its folder."""

    run: FinishedRun
    state: str  # one of `finetuning.jobs.STATES`
    log: Path  # kept by a sweep; the file need not exist

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.run.folder.resolve().name

    @property
    def records(self) -> Sequence[Record]:
        """The evaluations."""
        return self.run.records

    @property
    def domains(self) -> list[str]:
        """Names of the domains."""
        return domain_names(self.records)

    @property
    def selected(self) -> Choice:
        """The choice of training-domain validation. Its network is in best/."""
        return self.choices[0]

    @property
    def choices(self) -> list[Choice]:
        """The choices of all rules that need one run only, training-domain validation first."""
        choices = []
        for rule in BEST:
            with suppress(RecordError):  # the run has no such scores
                record = SELECTION_RULES[rule](self.records)
                title, validation = rule_title(rule, [record]), validation_accuracy(record)
                choices.append(Choice(title, record, validation, headlines(record)[0]))
        return choices

    @property
    def validated(self) -> int | None:
        """Number of validation images of the training domains; None if not recorded."""
        return self.records[0].images(self.records[0].training_domains, out=True)

    @property
    def options(self) -> dict[str, object]:
        """Options that were set to another value than their default."""
        return set_options(self.run.args)

    @property
    def command(self) -> str:
        """The command that repeats the run."""
        return training_command(self.run.args, width=88)

    @property
    def progress(self) -> str:
        """The last evaluated step, and the number of steps."""
        return f"step {self.records[-1].step + 1} of {self.run.args.get('steps', 'an unknown number')}"


def read_run(folder: Path) -> RunFacts:
    """Reads a run. The last line of an unfinished run may be incomplete."""
    resolved = folder.resolve()  # "." has no name, and the log is named after the run
    job = Job(resolved.name, (), folder, resolved.parent / "logs" / f"{resolved.name}.log")
    state = job.state()
    records = read_records(folder / RESULTS, unfinished=state != "finished")
    if not records:
        raise ArgumentError.of("run", str(folder), "has no evaluation yet; wait for the first one")
    return RunFacts(FinishedRun(folder, records), state, job.log)


def set_options(args: Arguments) -> dict[str, object]:
    """Returns the options of a run that differ from their defaults, by name and without absolute paths."""
    return without_local_paths(dict(sorted(changed_options(args).items())))


def cautions(facts: RunFacts) -> list[str]:
    """Sentences that a reader should know before the numbers."""
    sentences = []
    if facts.state != "finished":
        sentences.append(f"This run is not finished ({facts.state}, {facts.progress}); its numbers will change.")
    if reason := divergence(facts):
        sentences.append(reason)
    if at_chance(facts):
        sentences.append(
            f"Selection is at chance: {100 * facts.selected.validation:.1f}% on the validation images of the training "
            f"domains, and guessing gives {100 / facts.run.args['num_classes']:.1f}%. The selected step means little."
        )
    if remark := selection_remark(facts.records):
        sentences.append(f"Selection: {remark}.")
    if facts.validated is not None and facts.validated < FEW:
        sentences.append(f"Selection rests on {facts.validated} validation images of the training domains.")
    if not (facts.run.folder / BEST["training_domain_validation"] / "model.safetensors").is_file():
        members = ensemble_members(facts.run.folder / BEST["training_domain_validation"])
        state = f"is an ensemble of {len(members)} networks" if members else "is not in the folder"
        sentences.append(f"The selected network (best/) {state}. Sections that need a single one are left out.")
    sentences.append(
        "This is one run with one seed, so a difference from another run may be chance. "
        "The report of a sweep compares several seeds."
    )
    return sentences


def at_chance(facts: RunFacts) -> bool:
    """Whether the selected validation accuracy is hardly above guessing, or NaN."""
    classes = facts.run.args.get("num_classes")
    if not classes:
        return False
    return not facts.selected.validation > near_chance(classes)  # `not >`, so that NaN counts too


def divergence(facts: RunFacts) -> str | None:
    """A sentence about a diverged run, whose log ends with the error or whose losses are not finite."""
    if facts.state != "finished" and facts.log.is_file():
        # The log of a run that diverges ends with this error.
        lines = [line for line in tail(facts.log).splitlines() if "DivergenceError" in line]
        if lines:
            return f"This run diverged: {lines[-1].strip()}"
    steps = [record.step for record in facts.records if not all(map(isfinite, record.losses.values()))]
    return f"This run diverged: its losses are not finite at step {steps[0]}." if steps else None
