"""The encoder–decoder Transformer of *Attention Is All You Need* in JAX and Flax.

Everything here is a plain function of parameters and arrays, or a Flax module, and usable alone.
"""

from transformer_jax.batch import Batch, unpacked
from transformer_jax.config import Config, SearchConfig, TransformerConfig
from transformer_jax.decoding.filters import Filters
from transformer_jax.decoding.sampling import Sampling
from transformer_jax.decoding.search import Hypotheses, beam_search, greedy, sample
from transformer_jax.decoding.translator import Request, Translation, Translator
from transformer_jax.errors import UserError
from transformer_jax.nn.attention import MultiHeadAttention, attention_weights, weighted_values
from transformer_jax.nn.layers import DecoderLayer, EncoderLayer, FeedForward
from transformer_jax.nn.masks import attention_mask, causal_mask
from transformer_jax.nn.positions import sinusoids
from transformer_jax.nn.stacks import Decoder, Encoder, stack_layers, unstack_layers
from transformer_jax.nn.transformer import Transformer

__all__ = [
    "Batch",
    "Config",
    "Decoder",
    "DecoderLayer",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "Filters",
    "Hypotheses",
    "MultiHeadAttention",
    "Request",
    "Sampling",
    "SearchConfig",
    "Transformer",
    "TransformerConfig",
    "Translation",
    "Translator",
    "UserError",
    "attention_mask",
    "attention_weights",
    "beam_search",
    "causal_mask",
    "greedy",
    "sample",
    "sinusoids",
    "stack_layers",
    "unpacked",
    "unstack_layers",
    "weighted_values",
]
