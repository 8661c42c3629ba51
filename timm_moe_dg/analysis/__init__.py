"""What a trained MoGE model does: which experts it uses where, and how good each is for whom."""

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
