"""Choices of experts and their balance in plain Python, number by number, from the equations of their papers."""

import math
from collections.abc import Sequence

Row = list[float]


def scores(logits: Row, kind: str) -> Row:
    """Softmax over experts, or the sigmoid of each logit (DeepSeek-V3, equation 15)."""
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in logits]
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def weights(values: Row, chosen: set[int], normalize: bool) -> Row:
    """Combine weights of all experts, 0 for those that are not chosen (DeepSeek-V3, equations 13 and 14)."""
    total = sum(values[expert] for expert in chosen) if normalize else 1.0
    return [values[expert] / total if expert in chosen else 0.0 for expert in range(len(values))]


def by_tokens(values: list[Row], top_k: int, bias: Row) -> list[set[int]]:
    """The K experts with the largest score plus bias (DeepSeek-V3, equation 16)."""
    return [set(sorted(range(len(row)), key=lambda expert: -(row[expert] + bias[expert]))[:top_k]) for row in values]


def by_experts(values: list[Row], top_k: int) -> list[set[int]]:
    """Each expert takes its n c / e best tokens, where c is the mean number of experts (Zhou et al., 2022)."""
    num_experts = len(values[0])
    size = max(1, len(values) * top_k // num_experts)
    chosen: list[set[int]] = [set() for _ in values]
    for expert in range(num_experts):
        for token in sorted(range(len(values)), key=lambda token: -values[token][expert])[:size]:
            chosen[token].add(expert)
    return chosen


def by_thresholds(values: list[Row], thresholds: Row) -> list[set[int]]:
    """All experts whose score exceeds their threshold, or the best one (Expert Threshold, our fallback)."""
    return [
        {expert for expert, value in enumerate(row) if value > thresholds[expert]} or {row.index(max(row))}
        for row in values
    ]


def asked_thresholds(values: list[Row], top_k: int) -> Row:
    """The smallest score that each expert would take by expert choice."""
    chosen = by_experts(values, top_k)
    return [
        min(row[expert] for row, experts in zip(values, chosen, strict=True) if expert in experts)
        for expert in range(len(values[0]))
    ]


def moved_bias(bias: Row, counts: Sequence[int], speed: float) -> Row:
    """Steps of one size toward experts with few tokens, with mean 0 (DeepSeek-V3, section 2.1.2; torchtitan)."""
    mean = sum(counts) / len(counts)
    signs = [(mean > count) - (mean < count) for count in counts]
    return [value + speed * (sign - sum(signs) / len(signs)) for value, sign in zip(bias, signs, strict=True)]


def z_loss(logits: list[Row]) -> float:
    """ST-MoE, equation 5."""
    return sum(math.log(sum(map(math.exp, row))) ** 2 for row in logits) / len(logits)


def image_balance(values: list[Row], chosen: list[set[int]], top_k: int, num_images: int) -> float:
    """Mean over images of DeepSeek-V3's equations 17 to 20, without alpha."""
    size, num_experts, total = len(values) // num_images, len(values[0]), 0.0
    for first in range(0, len(values), size):
        rows, taken = values[first : first + size], chosen[first : first + size]
        for expert in range(num_experts):
            f = num_experts / (top_k * size) * sum(expert in experts for experts in taken)
            total += f * sum(row[expert] / sum(row) for row in rows) / size
    return total / num_images


def domain_balance(values: list[Row], sizes: Sequence[int], items: int) -> float:
    """Mean over domains of the squared coefficient of variation of the experts' total probability."""
    losses, first = [], 0
    for size in sizes:
        rows = values[first : first + size * items]
        first += size * items
        totals = [sum(row[expert] / sum(row) for row in rows) for expert in range(len(values[0]))]
        mean = sum(totals) / len(totals)
        losses.append(sum((total - mean) ** 2 for total in totals) / len(totals) / mean**2)
    return sum(losses) / len(losses)
