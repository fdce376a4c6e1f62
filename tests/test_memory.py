"""What is freed is there for the next array, without a visit to the system."""

import platform
import subprocess
import sys

import pytest

PAGES = """
import resource, threading, numpy as np
from transformer_jax.memory import keep_freed_memory

def pages(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        np.ones(2**23)  # 64 MB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keeps}:
    keep_freed_memory()
thread = threading.Thread(target=lambda: print(pages(1), pages(10)))  # as XLA's, which are not the main one
thread.start()
thread.join()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_pages_of_what_was_freed_are_used_again():
    def pages(*, keeps: bool) -> list[int]:
        program = PAGES.format(keeps=keeps)
        done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        return [int(number) for number in done.stdout.split()]

    once, again = pages(keeps=True)
    assert again < once / 10
    once, again = pages(keeps=False)
    assert again > 5 * once
