"""Every test runs with strict promotion, checked shapes, and warnings as errors (pyproject.toml)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
