"""What the kernels take on a GPU, by which an engine can refuse a model before it reads one weight of it."""

from __future__ import annotations

#: Tokens of a page, a power of two.
MAX_PAGE_SIZE = 256
#: Of queries, keys and values.
MAX_HEAD_DIM = 256
#: Columns of a norm: a row is held in registers.
MAX_HIDDEN = 32768
#: Of one router.
MAX_EXPERTS = 1024
#: What the depth of a matrix product is a multiple of.
DEPTH_STEP = 16
