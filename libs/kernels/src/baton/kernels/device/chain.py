"""The device side of chained launches."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def await_predecessor(chained: tl.constexpr):  # type: ignore[no-untyped-def]
    """First thing in a kernel, before any memory is touched: lets the next launch be set up, then waits until the one before is done.

    Every launch that may be set up early waits here for its predecessor, so all that ran before is done too.
    """
    if chained:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def allow_successor():  # type: ignore[no-untyped-def]
    """The first half of `await_predecessor`, of a chained launch that has something to do before `await_written`."""
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_written():  # type: ignore[no-untyped-def]
    """The second half."""
    tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_lines(pointers):  # type: ignore[no-untyped-def]
    """What lies at `pointers`, one a 128-byte line, begins to come into the second-level cache. Right before `await_written` only for what no
    launch writes, such as weights: it is ordered with nothing."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
