"""Pictures of a model at work: attention, positions, distributions, search, training.

`trace` gives every intermediate of a forward pass as an array. The other modules are each about one thing to see: pure
functions that compute what is drawn, and functions that draw it and return a matplotlib `Figure`. Drawing needs the
extra `inspect` (matplotlib); `trace` does not.

    python3 -m transformer_jax.inspect --model runs/phrases --text "in 35 weeks" --out pictures
"""
