"""The prefill server: computes prompts and writes their KV pages into decode slots."""

from baton.prefill.bootstrap import BootstrapServicer
from baton.prefill.config import PrefillSettings
from baton.prefill.errors import BadPublicationError, PrefillError
from baton.prefill.exporter import Exporter

__all__ = ["BadPublicationError", "BootstrapServicer", "Exporter", "PrefillError", "PrefillSettings"]
