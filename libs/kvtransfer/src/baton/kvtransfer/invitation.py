"""The invitation: what a sender needs to write into one inbox. Versioned, checksummed bytes that the two services carry as they like."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.kvtransfer.envelope import seal, unseal
from baton.kvtransfer.errors import IncompatiblePeer, InvalidArgument, PeerUnreachable
from baton.kvtransfer.identity import Identity

_MAGIC = b"BKIV"
_VERSION = 2
_WINDOW = struct.Struct("<QQI")
_NUMBERS = struct.Struct("<QI")
_BACKEND, _TRANSPORT, _SENDER, _IDENTITY, _NUMBERS_TAG, _WORKER, _FINGERPRINT, _DEVICE, _DEVICE_SCRATCH = range(1, 10)
_WINDOWS = {"pool": 16, "table": 17, "bell": 18, "scratch": 19}
_NETWORK = {"worker": 32, "pool": 33, "table": 34, "bell": 35, "scratch": 36}


@dataclass(frozen=True, slots=True)
class Window:
    """Remote memory: its address in the receiver, its size and its packed remote key."""

    address: int
    num_bytes: int
    key: bytes


@dataclass(frozen=True, slots=True)
class Way:
    """A second way to the same memory: the address of another worker of the inbox, and the windows' keys for who comes to it."""

    worker: bytes
    pool: bytes
    table: bytes
    bell: bytes
    scratch: bytes


#: Nobody can come that way: the receiver had no network device when it opened the inbox.
NO_WAY = Way(b"", b"", b"", b"", b"")


@dataclass(frozen=True, slots=True)
class Invitation:
    """backend, transport: the receiver's configuration. nonce: of this inbox; random. worker: UCX's address of the inbox's worker.

    pool: the pages. table: inbox header and doorbells. bell: the word that wakes the receiver. scratch: where a probe may write.
    network: where `worker` and the windows' keys are for senders on the receiver's host: those for senders that come over a network. None: everybody
    comes to `worker`.
    device: how a CUDA pool can be mapped by another process, device_scratch likewise (empty: host memory, or memory that cannot be shared).
    """

    backend: str
    transport: str
    sender_id: str
    identity: Identity
    nonce: int
    num_doorbells: int
    worker: bytes
    pool: Window
    table: Window
    bell: Window
    scratch: Window
    network: Way | None = None
    device: bytes = b""
    device_scratch: bytes = b""
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        fields = {
            _BACKEND: self.backend.encode(),
            _TRANSPORT: self.transport.encode(),
            _SENDER: self.sender_id.encode(),
            _IDENTITY: self.identity.encode(),
            _NUMBERS_TAG: _NUMBERS.pack(self.nonce, self.num_doorbells),
            _WORKER: self.worker,
            _DEVICE: self.device,
            _DEVICE_SCRATCH: self.device_scratch,
            _FINGERPRINT: _pack_pairs(self.fingerprint),
        }
        for name, tag in _WINDOWS.items():
            window: Window = getattr(self, name)
            fields[tag] = _WINDOW.pack(window.address, window.num_bytes, len(window.key)) + window.key
        if self.network is not None:
            fields |= {tag: getattr(self.network, name) for name, tag in _NETWORK.items()}
        return seal(_MAGIC, _VERSION, fields)

    def over_network(self) -> Invitation:
        """For a sender on another host: `worker` and the windows' keys are those it needs. Raises PeerUnreachable."""
        way = self.network
        if way is None:
            return self
        if not way.worker:
            raise PeerUnreachable(f"{self.identity.instance_id} had no network device when it opened this inbox: a new inbox may have one")
        keys = {name: replace(getattr(self, name), key=getattr(way, name)) for name in _WINDOWS}
        return replace(self, worker=way.worker, network=None, **keys)

    @classmethod
    def decode(cls, data: bytes) -> Invitation:
        """Raises InvalidArgument for damaged bytes, IncompatiblePeer for another version. Looks at nothing but `data`."""
        fields = unseal("invitation", _MAGIC, _VERSION, data)
        try:
            nonce, num_doorbells = _NUMBERS.unpack(fields[_NUMBERS_TAG])
            return cls(
                backend=fields[_BACKEND].decode(),
                transport=fields[_TRANSPORT].decode(),
                sender_id=fields[_SENDER].decode(),
                identity=Identity.decode(fields[_IDENTITY]),
                nonce=nonce,
                num_doorbells=num_doorbells,
                worker=fields[_WORKER],
                network=Way(**{name: fields[tag] for name, tag in _NETWORK.items()}) if fields.keys() & _NETWORK.values() else None,
                device=fields[_DEVICE],
                device_scratch=fields[_DEVICE_SCRATCH],
                fingerprint=_unpack_pairs(fields[_FINGERPRINT]),
                **{name: _unpack_window(name, fields[tag]) for name, tag in _WINDOWS.items()},
            )
        except (KeyError, struct.error, UnicodeDecodeError) as error:
            raise InvalidArgument(f"invitation lacks a field or has a malformed one: {error!r}") from error


def require_same(ours: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Raises IncompatiblePeer that names every entry in which the two fingerprints differ, with both values."""
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if differing:
        pairs = "; ".join(f"{name}: {ours.get(name)!r} here, {theirs.get(name)!r} at the peer" for name in differing)
        raise IncompatiblePeer(f"the pools of the two sides differ ({pairs}); serve the same model with the same settings on both")


def _unpack_window(name: str, data: bytes) -> Window:
    address, num_bytes, key_length = _WINDOW.unpack_from(data)
    key = data[_WINDOW.size :]
    if len(key) != key_length or address + num_bytes >= 1 << 64:
        raise InvalidArgument(f"invitation: window {name!r} at {address:#x} of {num_bytes} bytes has a key of {len(key)} bytes, says {key_length}")
    return Window(address, num_bytes, key)


def _pack_pairs(pairs: Mapping[str, str]) -> bytes:
    packed = b""
    for item in (text.encode() for pair in sorted(pairs.items()) for text in pair):
        packed += struct.pack("<I", len(item)) + item
    return packed


def _unpack_pairs(data: bytes) -> dict[str, str]:
    texts: list[str] = []
    position = 0
    while position < len(data):
        (length,) = struct.unpack_from("<I", data, position)
        position += 4
        if length > len(data) - position:
            raise InvalidArgument(f"invitation: fingerprint entry of {length} bytes is longer than what is left")
        texts.append(data[position : position + length].decode())
        position += length
    if len(texts) % 2:
        raise InvalidArgument("invitation: fingerprint has a name without a value")
    return dict(zip(texts[::2], texts[1::2], strict=True))
