"""Fetching models: pinned bytes in, a Hugging Face folder out."""

from baton.cli.model.cache import ModelCache
from baton.cli.model.catalogue import CATALOGUE, ModelSource, source_of
from baton.cli.model.fetch import fetch_model, is_current

__all__ = ["CATALOGUE", "ModelCache", "ModelSource", "fetch_model", "is_current", "source_of"]
