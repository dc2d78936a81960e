# distutils: language = c++
# cython: language_level=3
"""Binding of the native core. Long calls run without the GIL. Nothing here decides anything: see ucx/ for that."""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.memory cimport make_shared, shared_ptr
from libcpp.string cimport string
from libcpp.utility cimport pair
from libcpp.vector cimport vector

from baton.kvtransfer.errors import UCXError

include "native/binding/declarations.pxi"

set_error_type(UCXError)

include "native/binding/core.pxi"
include "native/binding/sending.pxi"
include "native/binding/receiving.pxi"
