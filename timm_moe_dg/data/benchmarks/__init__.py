"""The benchmarks, as a table: what each is, where its images lie, and how it is trained by default."""

from .benchmark import Benchmark
from .table import BENCHMARKS, get_benchmark, register_benchmark

__all__ = ["BENCHMARKS", "Benchmark", "get_benchmark", "register_benchmark"]
