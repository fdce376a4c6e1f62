"""What a hypothesis may be continued with, and what it costs: rules on the log-probabilities of its next token.

Each is a pure function of log-probabilities [B, K, V] and the tokens so far, where −∞ forbids a token. None ever makes
a log-probability positive, so sums go on falling, on which the bound of the search rests.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.batch import EOS, PAD


class Filters(NamedTuple):
    """Which rules there are. The defaults are no rule, and no operation in the compiled program.

    The tokens of a forced prefix are not subject to them, but count as tokens that are there already. The start of the
    decoder does not.
    """

    min_length: int = 0  # tokens, EOS counted, before which no hypothesis ends
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0  # no n-gram of this length comes twice
    suppressed: tuple[int, ...] = ()  # ids that are never generated

    @property
    def change_sums(self) -> bool:
        """Whether hypotheses are ranked by other sums than their log-probabilities."""
        return self.repetition_penalty != 1.0


NO_FILTERS = Filters()


def filtered(
    log_probs: Float[Array, "B K V"], tokens: Int[Array, "B K T"], position: Int[Array, "B"], filters: Filters
) -> Float[Array, "B K V"]:
    """Log-probabilities after `position` tokens, behind which there are only pads, under all rules."""
    vocab = log_probs.shape[2]
    if filters.repetition_penalty != 1.0:
        log_probs = penalized(log_probs, marked(tokens, vocab), filters.repetition_penalty)
    if filters.no_repeat_ngram:
        log_probs = without(log_probs, repeating(tokens, position, filters.no_repeat_ngram, vocab))
    if filters.suppressed:
        log_probs = log_probs.at[:, :, jnp.array(filters.suppressed)].set(-jnp.inf)
    if filters.min_length > 1:
        log_probs = log_probs.at[:, :, EOS].add(jnp.where(position + 1 < filters.min_length, -jnp.inf, 0.0)[:, None])
    return log_probs


def penalized(log_probs: Float[Array, "B K V"], present: Bool[Array, "B K V"], penalty: float) -> Float[Array, "B K V"]:
    """Log-probabilities of present tokens × penalty (Keskar et al., 2019, section 4.1); above 1 it makes them rarer.

    The form which Hugging Face's beam search has. CTRL divides logits, which only a model knows, and whose zero means
    nothing; log-probabilities are never positive, so they are always multiplied.
    """
    return jnp.where(present, log_probs * penalty, log_probs)


def repeating(tokens: Int[Array, "B K T"], position: Int[Array, "B"], size: int, vocab: int) -> Bool[Array, "B K V"]:
    """Which tokens would end an n-gram of `size` tokens that is there already (Paulus et al., 2018, section 2.5)."""
    last = position[:, None, None] - (size - 1)  # where the tokens begin which the next one would make an n-gram of
    same = jnp.broadcast_to(jnp.arange(tokens.shape[2])[None, None] < last, tokens.shape)  # an n-gram begins here
    for offset in range(size - 1):
        own = jnp.take_along_axis(tokens, jnp.maximum(last + offset, 0), axis=2)  # if last < 0, nothing is before it
        same &= shifted(tokens, offset) == own
    return marked(jnp.where(same, shifted(tokens, size - 1), PAD), vocab)


def without(log_probs: Float[Array, "B K V"], forbidden: Bool[Array, "#B #K V"]) -> Float[Array, "B K V"]:
    return jnp.where(forbidden, -jnp.inf, log_probs)


def forced(
    log_probs: Float[Array, "B K V"], model: Float[Array, "B K V"], token: Int[Array, "B"]
) -> Float[Array, "B K V"]:
    """Nothing but `token` of each sentence, at the price that the model sets; PAD forces nothing."""
    only = jnp.arange(log_probs.shape[2])[None, None] == token[:, None, None]
    return jnp.where((token == PAD)[:, None, None], log_probs, jnp.where(only, model, -jnp.inf))


def shifted(tokens: Int[Array, "B K T"], places: int) -> Int[Array, "B K T"]:
    """At each place the token which comes so many places later; pads behind the end."""
    return jnp.pad(tokens, ((0, 0), (0, 0), (0, places)), constant_values=PAD)[:, :, places:]


def marked(ids: Int[Array, "B K N"], vocab: int) -> Bool[Array, "B K V"]:
    """The ids that are there. Pads mark PAD, which is never allowed anyway."""
    return jax.vmap(jax.vmap(lambda some: jnp.zeros(vocab, bool).at[some].set(True)))(ids)
