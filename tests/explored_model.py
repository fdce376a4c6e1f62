"""A tiny model with random parameters and words for tokens, for the tests of the explorer."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import unpacked
from transformer_jax.config import Positions, SearchConfig, TransformerConfig, Tying, with_vocabularies
from transformer_jax.decoding.translator import Translator
from transformer_jax.inspect.small_run import word_tokenizer
from transformer_jax.nn.transformer import Transformer

SCRIPT = "</script><script>document.title='run'</script>"  # one word
PAIRS = (
    ("a cat sees the dog", "le chien voit un chat"),
    (f"{SCRIPT} <b> {{{{script}}}} &amp; naïve", f"un {SCRIPT} <i> voit chien"),
)
SEARCH = SearchConfig(beam_size=3, top_beams=2, extra_length=2)
SEED = 10  # of parameters with which some hypotheses end and some are given up


def build() -> Translator:
    """Three heads, two layers and one, relative positions, values wider than keys."""
    config = TransformerConfig(
        encoder_layers=2,
        decoder_layers=1,
        width=12,
        heads=3,
        key_width=4,
        value_width=5,
        feed_forward=16,
        positions=Positions.RELATIVE,
        relative_distance=2,
        tying=Tying.DECODER,
    )
    tokenizer = word_tokenizer(PAIRS)
    model = Transformer(with_vocabularies(config, source=tokenizer.source_vocab, target=tokenizer.target_vocab))
    ids = jnp.ones((1, 2), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), unpacked(ids, ids))
    rng = np.random.default_rng(SEED)
    return Translator(
        model, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.5).astype(np.float32), shapes), tokenizer
    )
