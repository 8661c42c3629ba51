"""Analysis and pictures of trained networks: experts, discovered domains, scores, learning curves."""

from .geography import DomainMap, ExpertMatrix, ExpertUsage, domain_map, domains_at, expert_usage, forced_expert_matrix

__all__ = [
    "DomainMap",
    "ExpertMatrix",
    "ExpertUsage",
    "domain_map",
    "domains_at",
    "expert_usage",
    "forced_expert_matrix",
]
