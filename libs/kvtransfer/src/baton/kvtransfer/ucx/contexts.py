"""The UCX contexts of an agent: one for shared memory, one for networks. The latter is replaced when the machine's network devices change."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from baton.kvtransfer import _native
from baton.kvtransfer.config import AgentConfig, net_devices, overruled
from baton.kvtransfer.errors import UCXError
from baton.kvtransfer.ucx import devices, options

log = logging.getLogger("baton.kvtransfer")
T = TypeVar("T")

_NO_DEVICE = -14


class UcxContext:
    """A native context that can be known weakly. What is native and made from it keeps the native one."""

    __slots__ = ("__weakref__", "native")

    def __init__(self, options_: dict[str, str], device: int) -> None:
        self.native = _native.Context(options_, device)


class Contexts:
    """`shared` never grows old: there is no device in it. The context for networks is kept as long as UCX would find the same devices; those before
    it live on with the inboxes and peers that were made from them, and go with the last of these."""

    def __init__(self, config: AgentConfig, device: int) -> None:
        """Raises UCXError where UCX finds nothing to go over."""
        self.device = device
        self.has_network = options.has_network(config)
        self._config = config
        self._chosen = net_devices(config)
        self._lock = threading.Lock()
        self._network: UcxContext | None = None
        self._found: frozenset[str] = frozenset()
        self._warn_of_overruled()
        self.shared = self._make(options.shared(config)) if options.shares_memory(config) else None
        if self.shared is None:
            self.network()

    def any(self) -> UcxContext:
        """Where memory is registered first."""
        return self.shared or self.network()

    def network(self) -> UcxContext:
        """For what is made now. Raises UCXError."""
        with self._lock:
            found = devices.find(self._chosen)
            if self._network is None or found != self._found:
                if self._network is not None:
                    log.info("network devices were %s, are %s: a new UCX context", _words(self._found), _words(found))
                self._network = None
                self._network = self._make(options.network(self._config))
                self._found = found
            return self._network

    def _make(self, settings: dict[str, str]) -> UcxContext:
        try:
            return UcxContext(settings, self.device)
        except UCXError as error:
            if not is_without_network(error):
                raise
            asked = f"TLS={settings.get('TLS', 'all')}, NET_DEVICES={self._chosen or 'all'}"
            here = f"network devices that are up here: {_words(devices.find())}"
            raise UCXError(
                error.function, error.status, f"{error.reason}: nothing to go over with {asked} (ucx_options, UCX_NET_DEVICES); {here}"
            ) from error

    def _warn_of_overruled(self) -> None:
        settings = [options.shared(self._config)] if options.shares_memory(self._config) else []
        settings += [options.network(self._config)] if self.has_network else []
        if names := sorted({name for ours in settings for name in overruled(ours, self._config)}):
            log.warning("not used, since an agent chooses these itself: %s; use AgentConfig's transport and ucx_options", ", ".join(names))

    def over_network(self, make: Callable[[UcxContext], T]) -> T:
        """`make` something with workers; again, with a new context, where a device of this one went unseen. Raises what `make` does."""
        context = self.network()
        try:
            return make(context)
        except UCXError as error:
            if error.function != "ucp_worker_create":
                raise
            log.warning("%s: a new UCX context", error)
        with self._lock:
            if self._network is context:
                self._network = None
        return make(self.network())


def is_without_network(error: UCXError) -> bool:
    """Whether UCX found no network device at all."""
    return error.function == "ucp_init" and error.status == _NO_DEVICE


def _words(found: frozenset[str]) -> str:
    return ", ".join(sorted(name.partition("#")[0] for name in found)) or "none"
