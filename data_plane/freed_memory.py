"""What this process frees stays its own, ready for the next step, where the C library allows it. Knows no tensors."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Have large pieces come from the heap, whose end is never given back.

    glibc maps a piece of a large tensor's size anew each time, and Linux blanks its pages as they are touched: for the
    logits of 64 rows that took longer than reading the output projection. To be called once weights have been loaded,
    since what that frees is better given back.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _MOST)
