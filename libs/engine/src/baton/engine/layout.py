"""The shape of a KV pool in memory, as plain numbers: what the engine, the transfer library and a peer must agree on."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Axes of the pool, outermost first: [layer][k|v][page][token in page][kv head][head dim].
LAYOUT_NAME = "layer-kv-page-token-head-dim"


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layer-major: one layer's keys (or values) for a run of pages are one run of bytes.

    itemsize: bytes of one number (4 for float32, 2 for bfloat16).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    itemsize: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer's keys (values take as many again)."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def plane_bytes(self) -> int:
        """Bytes of all pages of one layer's keys: the distance from a layer's keys to its values."""
        return self.num_pages * self.page_bytes

    @property
    def pool_bytes(self) -> int:
        return 2 * self.num_layers * self.plane_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def offset(self, layer: int, values: bool, page: int) -> int:
        """Byte offset in the pool of `page` of `layer`'s keys (or values)."""
        return (2 * layer + int(values)) * self.plane_bytes + page * self.page_bytes

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def of_rank(self, degree: int) -> KVLayout:
        """The part of one of `degree` equal ranks, which must divide the KV heads: as many pages, each with that rank's heads only."""
        assert self.num_kv_heads % degree == 0, f"{degree} ranks do not divide {self.num_kv_heads} KV heads"
        return replace(self, num_kv_heads=self.num_kv_heads // degree)
