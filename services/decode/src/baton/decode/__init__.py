"""The decode server (and the plain server): receives KV pages and streams the answer."""

from baton.decode.config import DecodeSettings
from baton.decode.errors import DecodeError, PairRefusedError, SessionEndedError
from baton.decode.importer import Importer
from baton.decode.peers import PeerSet

__all__ = ["DecodeError", "DecodeSettings", "Importer", "PairRefusedError", "PeerSet", "SessionEndedError"]
