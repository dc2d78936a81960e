# distutils: language = c++
# cython: language_level=3
"""Asks, at random moments, whether the interpreter's lock is free: how long taking it takes. Only the benchmark uses this."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *now)
    int nanosleep(const timespec *pause, timespec *left)
    enum: CLOCK_MONOTONIC


cdef long long now_ns() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec * 1000000000LL + now.tv_nsec


cdef class LockSampler:
    """`run` in a thread of its own until `stop`; then `samples`."""

    cdef vector[long long] moments
    cdef vector[long long] waits
    cdef cbool stopping

    def run(self, int mean_pause_us):
        cdef uint64_t state = 0x9E3779B97F4A7C15
        cdef timespec pause
        cdef long long start, end
        pause.tv_sec = 0
        with nogil:
            while not self.stopping:
                state ^= state << 13
                state ^= state >> 7
                state ^= state << 17
                pause.tv_nsec = state % (2000 * mean_pause_us)  # random, so that it does not fall into step with what it watches
                nanosleep(&pause, NULL)
                start = now_ns()
                with gil:
                    end = now_ns()
                self.moments.push_back(start)
                self.waits.push_back(end - start)

    def stop(self):
        self.stopping = True

    @property
    def samples(self):
        """-> (nanoseconds of the monotonic clock at which it asked, nanoseconds that it waited)."""
        return list(self.moments), list(self.waits)
