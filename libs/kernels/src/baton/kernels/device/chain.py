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
