"""The persistent compilation cache: a program that was compiled once starts at once the next time."""

import os
import pathlib

import jax

CACHE = pathlib.Path("~/.cache/transformer_jax")


def keep_compiled_programs() -> None:
    """Keeps compiled programs in JAX_COMPILATION_CACHE_DIR or ~/.cache/transformer_jax, however small they are.

    Where that directory can't be made, nothing is kept.
    """
    directory = pathlib.Path(os.environ.get("JAX_COMPILATION_CACHE_DIR") or CACHE.expanduser())
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
