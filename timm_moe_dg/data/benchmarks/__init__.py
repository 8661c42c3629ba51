"""The table of benchmarks: where their images lie, and how they are trained by default."""

from .benchmark import Benchmark
from .table import BENCHMARKS, get_benchmark, register_benchmark

__all__ = ["BENCHMARKS", "Benchmark", "get_benchmark", "register_benchmark"]
