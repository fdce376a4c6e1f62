"""Several models as one: the mean of what they expect next."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.config import EnsembleMean


def mean_log_probs(members: Sequence[Float[Array, "B K V"]], mean: EnsembleMean) -> Float[Array, "B K V"]:
    """One distribution from those of the members, all as log-probabilities; of one member its own, untouched.

    The mean of log-probabilities is that of no distribution: it is normalised, so that log-probabilities of sentences
    are what they say.
    """
    if len(members) == 1:
        return members[0]
    stacked = jnp.stack(list(members))
    match mean:
        case EnsembleMean.PROBABILITIES:
            return jax.nn.logsumexp(stacked, axis=0) - jnp.log(float(len(members)))
        case EnsembleMean.LOG_PROBABILITIES:
            return jax.nn.log_softmax(stacked.mean(axis=0))
