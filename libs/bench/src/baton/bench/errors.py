"""What a measurement can fail with.

BenchError
├── SettingError        the caller's mistake: a value out of range, an unknown name
├── BenchFileError      a workload, trace or run file that is not of its kind
├── CalibrationError    measurements that are too few, or that the formulas of costs do not describe
├── EnergyError         a GPU's energy counter that cannot be read; measuring goes on without it and says so
└── RequestFailedError  the server broke one request; the generator turns it into a sample with a cause
"""


class BenchError(Exception):
    """Base of every failure of this package."""


class SettingError(BenchError):
    """The caller's mistake. The message names the field, the value and what is allowed."""


class BenchFileError(BenchError):
    """A file that is not of the kind it should be. The message names the file and where in it."""


class CalibrationError(BenchError):
    """Measurements that costs cannot be fitted to. The message says which kind, by how much, and what to measure instead."""


class EnergyError(BenchError):
    """What a GPU uses cannot be measured. The message names the library or the device, and the remedy where there is one."""


class RequestFailedError(BenchError):
    """One request failed. `cause` is a bounded word for counting; `detail` is the server's own text."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail


def require(holds: bool, field: str, value: object, allowed: str) -> None:
    """Raises SettingError that names field, value and what is allowed, unless it `holds`."""
    if not holds:
        raise SettingError(f"{field} is {value!r}, but must be {allowed}")
