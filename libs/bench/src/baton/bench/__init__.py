"""Measuring: a load generator, what its samples say, and ratios of two things measured in turns."""

from baton.bench.arrivals import ArrivalOptions
from baton.bench.compare_runs import compare_runs
from baton.bench.errors import BenchError, BenchFileError, RequestFailedError, SettingError
from baton.bench.generator import Limits
from baton.bench.markdown import comparison_markdown, summary_markdown
from baton.bench.measures import Objectives
from baton.bench.ratio import Comparison, compare
from baton.bench.runfile import load_run
from baton.bench.serving import RequestTiming, ServingClient
from baton.bench.session import Contestant, Plan, measure
from baton.bench.summary import summarise
from baton.bench.targets import Asking, open_target
from baton.bench.tokens import load_counter
from baton.bench.workload import WorkloadOptions, build_workload

__all__ = [
    "ArrivalOptions",
    "Asking",
    "BenchError",
    "BenchFileError",
    "Comparison",
    "Contestant",
    "Limits",
    "Objectives",
    "Plan",
    "RequestFailedError",
    "RequestTiming",
    "ServingClient",
    "SettingError",
    "WorkloadOptions",
    "build_workload",
    "compare",
    "compare_runs",
    "comparison_markdown",
    "load_counter",
    "load_run",
    "measure",
    "open_target",
    "summarise",
    "summary_markdown",
]
