"""Memory that was freed is not blanked anew, in a process of its own, since nothing sets this back."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from blockplane.data_plane.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(1 << 26, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

num_pages = (1 << 26) // resource.getpagesize()
assert min(faults(), faults()) >= 0.9 * num_pages, "it is as it always was"
keep_freed_memory()
faults()
assert faults() < 0.1 * num_pages
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own ways")
def test_freed_memory_is_used_again_as_it_is():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
