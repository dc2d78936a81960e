"""What prefill and decode servers share: the engine's thread beside the RPC front, and the Worker contract."""

from baton.workerkit.errors import HostStoppedError, RefusedError, WorkerError
from baton.workerkit.fingerprint import as_mapping, differences, fingerprint_to_wire
from baton.workerkit.front import Description, WorkerFront
from baton.workerkit.gpu import GpuMetrics
from baton.workerkit.groups import EngineSettings, SglangSettings, TransferSettings
from baton.workerkit.host import EngineHost, HostedEngine
from baton.workerkit.intake import DecodePeer, Limits, PrefillPeer
from baton.workerkit.joining.settings import JoinSettings
from baton.workerkit.metrics import StepMetrics
from baton.workerkit.page_hash import HostPageHash, PageHash, PagesDigest
from baton.workerkit.progress import ProgressWatch
from baton.workerkit.reaper import Reaper
from baton.workerkit.refusing import RefusingInference
from baton.workerkit.servicer import WorkerServicer

__all__ = [
    "DecodePeer",
    "Description",
    "EngineHost",
    "EngineSettings",
    "GpuMetrics",
    "HostPageHash",
    "HostStoppedError",
    "HostedEngine",
    "JoinSettings",
    "Limits",
    "PageHash",
    "PagesDigest",
    "PrefillPeer",
    "ProgressWatch",
    "Reaper",
    "RefusedError",
    "RefusingInference",
    "SglangSettings",
    "StepMetrics",
    "TransferSettings",
    "WorkerError",
    "WorkerFront",
    "WorkerServicer",
    "as_mapping",
    "differences",
    "fingerprint_to_wire",
]
