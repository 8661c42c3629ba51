"""The scores of an evaluation as a table on the screen."""

from math import isnan

from ...protocols.assessment import Scores
from .evaluated import Evaluated


def score_table(found: Evaluated) -> str:
    """Formats the scores: a row for each domain, those held out first, then what they come to together."""
    together = f"together ({found.counted_name})"
    name = max(len("domain"), *(len(domain.name) for domain in found.domains))
    role = max(len("role"), *map(len, found.parts))
    inside, outside = found.split_accuracies
    lines = [
        f"{'domain':<{name}}  {'role':<{role}}   images  accuracy  in-split  out-split  F1-macro     ECE",
        *(
            f"{found.domains[at].name:<{name}}  {found.parts[at]:<{role}}  "
            + _row(found.found.domains[at], inside[at], outside[at])
            for at in found.order
        ),
        f"{together}: {_sentence(found.found.overall)}",
    ]
    if len(found.counted) > 1:
        worst = found.found.domains[found.found.worst]
        name_of_worst = found.domains[found.found.worst].name
        lines.append(f"average of {len(found.counted)} domains {found.found.average:.4f}")
        lines.append(f"worst domain {name_of_worst} {worst.accuracy:.4f} ({worst.images} images)")
    return "\n".join(lines)


def _row(scores: Scores, inside: float, outside: float) -> str:
    columns = f"{_number(scores.accuracy, 8)}  {_number(inside, 8)}  {_number(outside, 9)}"
    return f"{scores.images:7d}  {columns}  {_number(scores.f1_macro, 8)}  {_number(scores.ece, 6)}"


def _sentence(scores: Scores) -> str:
    return (
        f"{scores.images} images, accuracy {_number(scores.accuracy)}, F1-macro {_number(scores.f1_macro)}, "
        f"ECE {_number(scores.ece)}"
    )


def _number(value: float, width: int = 0) -> str:
    return f"{'-' if isnan(value) else f'{value:.4f}':>{width}}"
