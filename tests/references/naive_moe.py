"""Selection and capacity token by token, slow and obvious."""


def naive_top_k(scores: list[float], top_k: int) -> list[int]:
    """Indices of the K largest scores, the lowest index first among equals."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top_k]


def naive_drops(expert_indices: list[list[int]], priority: list[float], capacity: int) -> list[list[bool]]:
    """Batch prioritized routing: all first choices by priority, then all second choices, until an expert is full."""
    order = sorted(range(len(priority)), key=lambda token: (-priority[token], token))
    taken: dict[int, int] = {}
    dropped = [[False] * len(row) for row in expert_indices]
    for choice in range(len(expert_indices[0])):
        for token in order:
            expert = expert_indices[token][choice]
            taken[expert] = taken.get(expert, 0) + 1
            dropped[token][choice] = taken[expert] > capacity
    return dropped
