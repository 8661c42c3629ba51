"""Training runs: the plan, the model and its loaders, and how a run ends or resumes."""

from ..protocols.options import run_parser
from .assembly import Model, build_model
from .launch import join_processes, lost_process_explained
from .loaders import rehearse
from .log import RunLog
from .plan import RunPlan, describe, make_plan
from .progress import StepBar, tracker_errors_logged
from .resume import nothing_to_do, parse_resumable
from .run import FineTuning, ResumePoint, find_resume_point, owning, start
from .stopping import DivergenceCheck, Interrupted, Interruption, nan_if_not_finite

__all__ = [
    "DivergenceCheck",
    "FineTuning",
    "Interrupted",
    "Interruption",
    "Model",
    "ResumePoint",
    "RunLog",
    "RunPlan",
    "StepBar",
    "build_model",
    "describe",
    "find_resume_point",
    "join_processes",
    "lost_process_explained",
    "make_plan",
    "nan_if_not_finite",
    "nothing_to_do",
    "owning",
    "parse_resumable",
    "rehearse",
    "run_parser",
    "start",
    "tracker_errors_logged",
]
