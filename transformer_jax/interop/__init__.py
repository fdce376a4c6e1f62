"""Other systems' models in and out: `python3 -m transformer_jax.interop import|export`, explained in docs/interop.md.

Each system is a module: its `read` makes a `Model` of what lies at a path, its `write` the other way round.
Nothing else in the library imports this package.
"""
