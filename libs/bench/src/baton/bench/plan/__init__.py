"""What fleets that are not here would do: a simulator of gateway, prefill, decode and links, and its calibration from measurements."""

from baton.bench.plan.calibration import Calibration
from baton.bench.plan.calibration import load as load_calibration
from baton.bench.plan.calibration import save as save_calibration
from baton.bench.plan.costs import Costs, PathCosts, StepCosts
from baton.bench.plan.fitting import calibrate
from baton.bench.plan.fleet import FleetShape
from baton.bench.plan.job import ServerLimits
from baton.bench.plan.live import Effort, measure_stages
from baton.bench.plan.load import ClosedLoad, Lengths, Load, OpenLoad, drawn, replayed
from baton.bench.plan.predict import Link, Prediction, predict
from baton.bench.plan.simulation import simulate
from baton.bench.plan.sizing import Demand, Sized, Sizer
from baton.bench.plan.sources import from_decide, from_runs
from baton.bench.plan.text import calibration_markdown, predictions_markdown, sized_markdown

__all__ = [
    "Calibration",
    "ClosedLoad",
    "Costs",
    "Demand",
    "Effort",
    "FleetShape",
    "Lengths",
    "Link",
    "Load",
    "OpenLoad",
    "PathCosts",
    "Prediction",
    "ServerLimits",
    "Sized",
    "Sizer",
    "StepCosts",
    "calibrate",
    "calibration_markdown",
    "drawn",
    "from_decide",
    "from_runs",
    "load_calibration",
    "measure_stages",
    "predict",
    "predictions_markdown",
    "replayed",
    "save_calibration",
    "simulate",
    "sized_markdown",
]
