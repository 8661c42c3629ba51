"""HTML reports of runs and sweeps, each in one self-contained file."""

from .network_facts import ReportSettings
from .pages import report

__all__ = ["ReportSettings", "report"]
