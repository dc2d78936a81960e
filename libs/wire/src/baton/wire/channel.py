"""Options that every channel and server of Baton is opened with."""

from __future__ import annotations

#: A prompt of 1,000,000 token ids packs into about 3 MB; a report of one step is far smaller.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

#: Keepalive finds a peer that vanished without a FIN, or is frozen, within about 15 s; a dead process is seen at once by its reset.
#: gRPC's core waits for the longer of the two timeouts, and the ping's is a minute by default.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

_SIZES = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    *_SIZES,
    # A restarted peer is found again within a second, not after gRPC's default two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # The time that one attempt to connect may take, whatever its name says. Hundreds of clients that connect to a busy server at once, or a distant
    # host, take more than the backoff; a host that has vanished is not waited for longer than two lost packets (they are sent again after 1 s and
    # after 3 s). Less than the 5 s that a call of ours has: then it ends by what went wrong, not by its deadline.
    ("grpc.min_reconnect_backoff_ms", 4_000),
    # Two channels to one address stay two connections.
    ("grpc.use_local_subchannel_pool", 1),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_KEEPALIVE,
    *_SIZES,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Whoever connects and says nothing is held for 20 s, not for gRPC's default of two minutes.
    ("grpc.server_handshake_timeout_ms", 20_000),
    # Two servers on one port would share its connections at random.
    ("grpc.so_reuseport", 0),
]
