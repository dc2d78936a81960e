"""What UCX is told for each kind of path. Passed to the context itself: the process's environment is not touched."""

from __future__ import annotations

from collections.abc import Mapping

from baton.kvtransfer.config import AgentConfig

#: Shared memory needs endpoints without error handling (UCX leaves it out otherwise, and falls to emulation over tcp), networks need it.
SHM = "shm"
NETWORK = "network"

#: Not posix: a process killed while it starts leaves a file in /dev/shm behind; a sysv segment goes with its last process.
_SHARED = "sysv,cma"

_RECEIVING = {"auto": "^self,posix", "shm": _SHARED, "tcp": "tcp"}
_SENDING = {SHM: _SHARED, NETWORK: "^self,sm"}


def receiving(config: AgentConfig) -> Mapping[str, str]:
    return _complete(config, _RECEIVING[config.transport])


def sending(config: AgentConfig, path: str) -> Mapping[str, str]:
    if path == NETWORK and config.transport == "tcp":
        return _complete(config, "tcp")
    return _complete(config, _SENDING[path])


def shares_memory(config: AgentConfig) -> bool:
    """Whether memory is allocated so that other processes of the host can map it."""
    chosen = config.ucx_options.get("TLS")
    if config.transport != "auto" or chosen is None:
        return config.transport != "tcp"
    return not chosen.startswith("^") and any(name in chosen for name in ("sysv", "posix", "sm", "shm", "all"))


def _complete(config: AgentConfig, transports: str) -> Mapping[str, str]:
    ours = {"TLS": f"{transports},cuda" if config.device and not transports.startswith("^") else transports}
    if transports != _SHARED:
        ours["TCP_CONN_NB"] = "y"  # a host that does not answer must not hold up a queue
        # A message of ours (60 KiB) goes in one piece: UCX's fragments of 8 KiB, assembled again at the receiver, are five times slower.
        ours["TCP_TX_SEG_SIZE"] = "64K"
        if config.transport == "tcp":
            ours["ZCOPY_THRESH"] = "inf"  # closing an endpoint in the middle of a zero-copy send over tcp can crash UCX 1.22
    return {**ours, **config.ucx_options}
