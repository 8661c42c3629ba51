"""The runtime of training: its plan, what feeds and steps the network, and how a run ends or goes on."""

from ..protocols.options import run_parser
from .assembly import Model, build_model
from .loaders import rehearse
from .log import RunLog
from .owner import owning
from .plan import RunPlan, make_plan
from .processes.launch import join_processes, set_up_logging
from .processes.peers import PeerWatch
from .progress import StepBar
from .resume import nothing_to_do, parse_resumable
from .run import Beginning, FineTuning, find_beginning, start
from .stopping import DivergenceCheck, Interrupted, Interruption, nan_if_not_finite
from .summary import describe

__all__ = [
    "Beginning",
    "DivergenceCheck",
    "FineTuning",
    "Interrupted",
    "Interruption",
    "Model",
    "PeerWatch",
    "RunLog",
    "RunPlan",
    "StepBar",
    "build_model",
    "describe",
    "find_beginning",
    "join_processes",
    "make_plan",
    "nan_if_not_finite",
    "nothing_to_do",
    "owning",
    "parse_resumable",
    "rehearse",
    "run_parser",
    "set_up_logging",
    "start",
]
