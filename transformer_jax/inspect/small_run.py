"""Training runs of seconds, on sentences made for a lesson: each word is a token, and all is the library's own."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from numpy import ndarray

from transformer_jax.batch import EOS, PAD, UNK, unpacked
from transformer_jax.config import OptimizerConfig, TransformerConfig, with_vocabularies
from transformer_jax.data.segmenters import NO_BOS, SentencePieces
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.batches import stack
from transformer_jax.decoding.translator import Translator
from transformer_jax.inspect.distributions import cross_entropies, target_distributions
from transformer_jax.nn.transformer import Transformer
from transformer_jax.training.objective import make_objective
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import init_state, make_train_step


class SmallRun(NamedTuple):
    """A training run from its start to its end."""

    start: Translator  # with the random parameters
    trained: Translator
    cross_entropy: ndarray  # [updates] mean of the target tokens, in nats, against the smoothed target
    divergence: ndarray  # [updates] the same less the target's own entropy: the loss


def train_small(
    pairs: Sequence[tuple[str, str]],
    model: TransformerConfig,
    optimizer: OptimizerConfig,
    *,
    steps: int,
    rows: int,
    seed: int = 0,
) -> SmallRun:
    """`steps` updates, each on `rows` of the pairs drawn at random, or on all if there are no more than that."""
    tokenizer = word_tokenizer(pairs)
    sizes = {"source": tokenizer.source_vocab, "target": tokenizer.target_vocab}
    transformer = Transformer(with_vocabularies(model, **sizes))
    source = _padded(tokenizer.encode_source([source for source, _ in pairs]))
    target = _padded(tokenizer.encode_target([target for _, target in pairs]))
    objective = make_objective(transformer, label_smoothing=optimizer.label_smoothing)
    rate = make_schedule(optimizer, width=model.width, steps=steps)
    rule = make_optimizer(optimizer, width=model.width, steps=steps)
    update = make_train_step(objective, rule, learning_rate=rate)

    params = jax.jit(transformer.init)(jax.random.key(seed), unpacked(source[:1], target[:1]))
    state = init_state(jax.tree.map(jnp.copy, params), rule, seed=seed, ema=0.0)
    rng, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        drawn = rng.choice(len(pairs), size=min(rows, len(pairs)), replace=False)
        state, report = update(state, unpacked(source[drawn], target[drawn]))
        losses.append(report.sums.loss / report.sums.weight)

    asked = target_distributions(np.array([EOS]), vocab=sizes["target"], label_smoothing=optimizer.label_smoothing)
    divergence = np.array(jax.device_get(losses))
    return SmallRun(
        Translator(transformer, params, tokenizer),
        Translator(transformer, state.params, tokenizer),
        cross_entropy=divergence + cross_entropies(asked, asked)[0],
        divergence=divergence,
    )


def word_tokenizer(pairs: Sequence[tuple[str, str]]) -> Tokenizer:
    """Each word between spaces is a token; each side has its own vocabulary."""
    return Tokenizer(*(SentencePieces(_words([pair[side] for pair in pairs]), name="words") for side in (0, 1)))


def _words(lines: Sequence[str]) -> bytes:
    model = io.BytesIO()
    words = {word for line in lines for word in line.split()}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="word",
        vocab_size=len(words) + 3,
        character_coverage=1.0,
        normalization_rule_name="identity",
        pad_id=PAD,
        eos_id=EOS,
        unk_id=UNK,
        bos_id=NO_BOS,
        minloglevel=2,
    )
    return model.getvalue()


def _padded(ids: Sequence[Sequence[int]]) -> ndarray:
    return stack([list(one) for one in ids], rows=len(ids), length=max(map(len, ids)))
