"""Services as child processes: start, wait until healthy, notice a loss, stop all."""

from baton.cli.services.follow import LogFollower
from baton.cli.services.process import ReadyRecord, Service, ServiceSpec
from baton.cli.services.supervisor import StopAskedError, Supervisor

__all__ = ["LogFollower", "ReadyRecord", "Service", "ServiceSpec", "StopAskedError", "Supervisor"]
