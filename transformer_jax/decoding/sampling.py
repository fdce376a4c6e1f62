"""Drawing tokens at random instead of searching for the best ones.

The noise of a draw is a function of the sentence's key, the number of the sample and the position alone, so samples do
not depend on what is drawn beside them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32


class Sampling(NamedTuple):
    """Which tokens may be drawn. The rules apply in this order, each to the probabilities which the one before left,
    normalised again; the most probable token always may be drawn. The defaults are the model's own distribution.
    """

    temperature: float = 1.0  # what log-probabilities are divided by
    top_k: int = 0  # the k most probable (Fan et al., 2018); 0: all
    top_p: float = 1.0  # the fewest that have this much of the probability (Holtzman et al., 2020)
    min_p: float = 0.0  # those at least this times as probable as the most probable one (Nguyen et al., 2024)
    epsilon: float = 0.0  # those at least this probable (Hewitt et al., 2022)


PLAIN_SAMPLING = Sampling()


@jax.jit
def sentence_keys(seed: int | Int[Array, ""], hashes: UInt32[Array, "B"] | UInt32[np.ndarray, "B"]) -> Key[Array, "B"]:
    """A key for each sentence, from the seed and a number that belongs to the sentence; the same on every device."""
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, hashes)


def draw(
    log_probs: Float[Array, "B K V"], keys: Key[Array, "B"], position: Int[Array, "B"], sampling: Sampling
) -> Int[Array, "B K"]:
    """A token for each sample of each sentence; PAD where no token is possible."""
    _, samples, vocab = log_probs.shape
    return jnp.argmax(truncated(log_probs, sampling) + gumbel(keys, position, samples, vocab), axis=2)


def truncated(log_probs: Float[Array, "B K V"], sampling: Sampling) -> Float[Array, "B K V"]:
    """Logits of the distribution that is drawn from."""
    logits = log_probs
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[2]))[0][:, :, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1.0:
        logits = at_least(logits, nucleus_edge(jax.nn.softmax(logits), sampling.top_p))
    if sampling.min_p:
        logits = at_least(logits, sampling.min_p * jax.nn.softmax(logits).max(axis=2, keepdims=True))
    if sampling.epsilon:
        logits = at_least(logits, jnp.full((1, 1, 1), sampling.epsilon, jnp.float32))
    return logits


def nucleus_edge(probs: Float[Array, "B K V"], mass: float) -> Float[Array, "B K 1"]:
    """The least probability in the smallest set of most probable tokens that has at least this mass."""
    falling = jnp.flip(jnp.sort(probs, axis=2), axis=2)
    before = jnp.cumsum(falling, axis=2) - falling
    return jnp.where(before < mass, falling, jnp.inf).min(axis=2, keepdims=True)


def at_least(logits: Float[Array, "B K V"], least: Float[Array, "#B #K 1"]) -> Float[Array, "B K V"]:
    """Only tokens of this probability or more, and the most probable one."""
    probs = jax.nn.softmax(logits)
    least = jnp.minimum(least, probs.max(axis=2, keepdims=True))
    return jnp.where(probs < least, -jnp.inf, logits)


def gumbel(keys: Key[Array, "B"], position: Int[Array, "B"], samples: int, vocab: int) -> Float[Array, "B K V"]:
    """Noise with which the argmax of logits is a draw from their softmax."""

    def of_sample(key, position, sample):
        return jax.random.gumbel(jax.random.fold_in(jax.random.fold_in(key, sample), position), (vocab,), jnp.float32)

    return jax.vmap(jax.vmap(of_sample, (None, None, 0)), (0, 0, None))(keys, position, jnp.arange(samples))
