"""What UCX is told for each kind of path. Passed to the context itself: the process's environment is not touched."""

from __future__ import annotations

from baton.kvtransfer.config import AgentConfig

#: Shared memory needs endpoints without error handling (UCX leaves it out otherwise, and falls to emulation over tcp), networks need it.
SHM = "shm"
NETWORK = "network"

#: Not posix: a process killed while it starts leaves a file in /dev/shm behind; a sysv segment goes with its last process.
_SHARED = "sysv,cma"

_NETWORK = {"auto": "^self,sm", "tcp": "tcp"}

_MAPPED = frozenset({"sysv", "posix", "sm", "shm", "mm"})
_OF_THIS_HOST = _MAPPED | {"cma", "xpmem", "knem"}
_CUDA = frozenset({"cuda", "cuda_copy", "cuda_ipc", "gdr_copy"})


def shared(config: AgentConfig) -> dict[str, str]:
    """Of the context for senders and receivers on this host. No network device is in it, which could go: a choice of transports that the user made
    is cut down to those of one host."""
    ours = {"TLS": f"{_SHARED},cuda" if config.device else _SHARED}
    chosen = _chosen(config)
    if not chosen or "all" in chosen:
        return {**ours, **{name: value for name, value in config.ucx_options.items() if name != "TLS"}}
    if chosen[0].startswith("^"):
        left_out = {chosen[0][1:], *chosen[1:]}
        return {**config.ucx_options, "TLS": ",".join(name for name in ours["TLS"].split(",") if name not in left_out)}
    return {**config.ucx_options, "TLS": ",".join(name for name in chosen if name in _OF_THIS_HOST | _CUDA)}


def network(config: AgentConfig) -> dict[str, str]:
    """Of the context for senders and receivers on other hosts."""
    transports = _NETWORK[config.transport]
    ours = {"TLS": f"{transports},cuda" if config.device and not transports.startswith("^") else transports}
    ours["TCP_CONN_NB"] = "y"  # a host that does not answer must not hold up a queue
    # A message of ours (60 KiB) goes in one piece: UCX's fragments of 8 KiB, assembled again at the receiver, are five times slower.
    ours["TCP_TX_SEG_SIZE"] = "64K"
    # What the receiver takes from the kernel in one call, at most. Every call answers the sender's kernel: where bytes pile up because processors
    # are busy, calls of UCX's 64 KiB take twice the receiver's processor time. The buffer costs 0.4 MiB more a pair that has moved so much.
    ours["TCP_RX_SEG_SIZE"] = "512K"
    # Of bytes that nobody acknowledges (their device is gone, the wire is cut, the other process is suspended): the kernel's own limit is a quarter
    # of an hour, for which no room could be written there. As patient as a session's keepalive (baton.wire.channel).
    ours["TCP_USER_TIMEOUT"] = "20s"
    # UCX asks the other side for a number otherwise, to watch it by pings, which tcp needs not: it sees that a connection ends. Where the other side
    # has no route back, UCX 1.22 dies of the question (ucp_ep_set_lanes_failed reads the configuration of an endpoint that has none). Our own
    # greeting, for which UCX asks nothing (native/connection.cpp), is answered by ucp_ep_create, which only fails then.
    ours["RESOLVE_REMOTE_EP_ID"] = "off"
    if config.transport == "tcp":
        ours["ZCOPY_THRESH"] = "inf"  # closing an endpoint in the middle of a zero-copy send over tcp can crash UCX 1.22
    return {**ours, **config.ucx_options}


def has_network(config: AgentConfig) -> bool:
    """Whether other hosts may come, as far as the configuration goes."""
    chosen = _chosen(config)
    return config.transport != "shm" and (not chosen or not all(name in _OF_THIS_HOST | _CUDA for name in chosen))


def shares_memory(config: AgentConfig) -> bool:
    """Whether memory is allocated so that other processes of the host can map it."""
    chosen = _chosen(config)
    return config.transport != "tcp" and (not chosen or config.transport == "shm" or any(name in _MAPPED or name == "all" for name in chosen))


def _chosen(config: AgentConfig) -> list[str]:
    """The user's transports; none: ours."""
    return [name.strip() for name in config.ucx_options.get("TLS", "").split(",") if name.strip()]
