"""One line a state change: structlog, as JSON or for a terminal. Records of the standard library's loggers take the same road."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from baton.servicekit.groups import LogSettings

#: Chatty libraries: their debug lines are never ours.
_QUIET = ("asyncio", "grpc", "opentelemetry", "urllib3")
#: Warns of trace headers that are none, with what is in them: any client could fill the log with its own words.
_CLIENTS_WORDS = "opentelemetry.trace"


def configure_logs(settings: LogSettings, *, service: str, instance_id: str, stream: TextIO | None = None) -> None:
    """Routes all logging of this process to `stream` (standard error by default). Call once, before the first line; a second call replaces it.

    Every line carries service, instance_id, a UTC timestamp, level, and the current span's trace_id and span_id; `structlog.contextvars`
    and `logger.bind(room=...)` add more.
    """
    out = stream or sys.stderr
    as_json = settings.format == "json" or (settings.format == "auto" and not out.isatty())
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Bound(service, instance_id),
        _add_trace,
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(as_json, out)))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.getLogger(_CLIENTS_WORDS).setLevel(logging.ERROR)


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of a module: `log = get_logger(__name__)`; call as `log.info("room opened", room=room)`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def _renderers(as_json: bool, out: TextIO) -> list[Processor]:
    drop = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if as_json:
        return [drop, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return [drop, structlog.dev.ConsoleRenderer(colors=out.isatty())]


class _Bound:
    """Adds who is speaking; what a line says itself wins."""

    def __init__(self, service: str, instance_id: str) -> None:
        self._service = service
        self._instance_id = instance_id

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        event.setdefault("instance_id", self._instance_id)
        return event


def _add_trace(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event.setdefault("trace_id", format(span.trace_id, "032x"))
        event.setdefault("span_id", format(span.span_id, "016x"))
    return event
