"""The runtime of training: its plan, what feeds and steps the network, and how a run ends or goes on."""

from .assembly import Model, build_model
from .launch import join_processes, set_up_logging
from .plan import RunPlan, make_plan
from .resume import is_finished, parse_resumable, run_parser
from .run import Beginning, FineTuning, find_beginning, start
from .stopping import EXIT_CODE, DivergenceCheck, Interrupted, Interruption, nan_if_not_finite

__all__ = [
    "EXIT_CODE",
    "Beginning",
    "DivergenceCheck",
    "FineTuning",
    "Interrupted",
    "Interruption",
    "Model",
    "RunPlan",
    "build_model",
    "find_beginning",
    "is_finished",
    "join_processes",
    "make_plan",
    "nan_if_not_finite",
    "parse_resumable",
    "run_parser",
    "set_up_logging",
    "start",
]
