"""Every test runs with strict promotion, checked shapes, and warnings as errors (pyproject.toml)."""

import os
import shutil
import tempfile

PROGRAMS = tempfile.mkdtemp(prefix="transformer_jax-programs-")

# These are in the environment so that the commands which tests run have them too. Nearly all time goes into compiling
# tiny models: LLVM need not try hard, and what took long is compiled once.
os.environ |= {
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": PROGRAMS,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

from jaxtyping import install_import_hook

# Before the package is imported: each public function's shapes are then checked at every call.
install_import_hook("transformer_jax", "beartype.beartype")

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    """An implicit broadcast of ranks or change of dtype in the library is an error."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def pytest_unconfigure():
    shutil.rmtree(PROGRAMS, ignore_errors=True)
