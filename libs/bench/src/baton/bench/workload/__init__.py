"""Workloads: pure, seeded, printable."""

from baton.bench.workload.base import Workload
from baton.bench.workload.catalogue import WorkloadOptions, build_workload
from baton.bench.workload.chat import ChatWithDocuments
from baton.bench.workload.fixed import FixedLengths
from baton.bench.workload.mooncake import MooncakeTrace
from baton.bench.workload.sharegpt import ShareGPT
from baton.bench.workload.turns import MultiTurn

__all__ = ["ChatWithDocuments", "FixedLengths", "MooncakeTrace", "MultiTurn", "ShareGPT", "Workload", "WorkloadOptions", "build_workload"]
