"""Memory of the process, as the C library hands it out."""

import ctypes

ARENA_MAX, MMAP_THRESHOLD, TRIM_THRESHOLD = -8, -3, -1  # malloc.h of glibc
LARGEST = 2**31 - 1


def keep_freed_memory() -> None:
    """Has the C library keep what is freed for the next array, instead of giving it back to the system.

    On a CPU a training step takes hundreds of megabytes and frees them. To fetch those from the system page by page is
    up to a fifth of the step (`benchmarks/train.py`: "ours, memory given back"). The process is never smaller than it
    once was. To be called before JAX has threads; where the C library is another one, nothing is done.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return
    mallopt(ARENA_MAX, 1)  # only the first arena can grow without end, and be kept
    mallopt(MMAP_THRESHOLD, LARGEST)
    mallopt(TRIM_THRESHOLD, LARGEST)
