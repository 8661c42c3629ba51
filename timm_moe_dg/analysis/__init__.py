"""What a trained MoGE model does: which experts it uses where, and how good each is for whom."""

from .domains import DomainMap, domain_map, domains_at
from .experts import ExpertMatrix, ExpertUsage, expert_usage, forced_expert_matrix

__all__ = [
    "DomainMap",
    "ExpertMatrix",
    "ExpertUsage",
    "domain_map",
    "domains_at",
    "expert_usage",
    "forced_expert_matrix",
]
