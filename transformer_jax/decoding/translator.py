"""Text → translations, with a model, its parameters and its tokenizer.

The results are those of one sentence at a time, whatever is translated beside it: sentences are sorted by length,
searched in batches of few shapes, and put back into their order.
"""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.batch import EOS, PAD, Batch, segments_and_positions, unpacked
from transformer_jax.config import Config, LengthPenalty, Positions, SearchConfig, with_vocabularies
from transformer_jax.config_check import check_search
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.batches import SentenceBatch, sentence_batches, stack
from transformer_jax.decoding.parts import Part, parts_of_lines
from transformer_jax.decoding.search import Hypotheses, beam_search, length_penalty
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import checkpoint_steps, load_config, load_parameters, spaced, tokenizer_path

log = logging.getLogger(__name__)


class Translation(NamedTuple):
    text: str
    score: float  # log_prob / LP(L), L = len(tokens)
    log_prob: float  # the sum over the tokens
    tokens: tuple[int, ...]  # EOS included
    finished: bool  # whether it ends with EOS; if not, it was cut at the output limit


BLANK = Translation("", 0.0, 0.0, (), True)  # the translation of a line without text


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
    """Translates lines with one set of parameters.

    Translators of equal models share their compiled programs, so one can be made for every evaluation of a run.
    """

    model: Transformer
    params: Any
    tokenizer: Tokenizer
    max_length: int = 256  # source tokens, EOS counted, that the model is given at once

    @classmethod
    def load(cls, workdir: str, checkpoint: str | None = None) -> "Translator":
        """The model of a run directory.

        `checkpoint` is one of those in `run_directory.choose_steps`; None: the average which the run's config asks
        for, of as many checkpoints as there are.

        Raises:
          UserError: if it is not there or its parts don't belong together.
        """
        config, tokenizer = load_config(workdir), Tokenizer.load(tokenizer_path(workdir))
        model = Transformer(
            with_vocabularies(config.model, source=tokenizer.source_vocab, target=tokenizer.target_vocab)
        )
        checkpoint = checkpoint or _default_checkpoint(config, workdir)
        return cls(model, jax.device_put(load_parameters(workdir, checkpoint)), tokenizer, config.data.max_length)

    def translate(
        self,
        lines: Sequence[str],
        search: SearchConfig,
        *,
        name: str = "input",
        progress: Callable[[int], object] = lambda lines: None,
    ) -> list[list[Translation]]:
        """The n-best list of each line: at most `search.top_beams`, and at least one if the model is finite.

        Lines without text are not translated. Longer ones than the model's limit are translated in parts and joined,
        with a warning that names `name` and the line. `progress` is told how many more lines are done.

        Raises:
          UserError: if the search is not one: more translations than beams, for instance.
        """
        check_search(search)
        parts = parts_of_lines(lines, self.tokenizer, limit=min(self.max_length, self._positions), name=name)
        lengths = [len(part.tokens) for part in parts]
        progress(len(lines) - len({part.line for part in parts}))
        parts_left = np.bincount([part.line for part in parts], minlength=len(lines))
        found: list[list[Translation]] = [[] for _ in parts]
        tokens = search.tokens // search.beam_size
        for batch in sentence_batches(lengths, tokens=tokens, longest=self._positions):
            sources = [parts[index].tokens for index in batch.sentences]
            for index, n_best in zip(batch.sentences, self._search(sources, batch, search), strict=True):
                found[index] = n_best
                parts_left[parts[index].line] -= 1
                progress(int(parts_left[parts[index].line] == 0))
        return self._joined(parts, found, lines=len(lines), search=search, name=name)

    def best(self, lines: Sequence[str], search: SearchConfig) -> list[str]:
        """The text of the best translation of each line; none is empty text."""
        return [n_best[0].text if n_best else "" for n_best in self.translate(lines, search)]

    def score(
        self, sources: Sequence[str], targets: Sequence[str | Sequence[int]], search: SearchConfig
    ) -> list[Translation]:
        """Given translations, text or tokens as in `Translation.tokens`, with the score which `search` gives them.

        It is computed by the model's parallel forward pass, not by its step-by-step one.

        Raises:
          UserError: for a pair longer than a learned table of positions.
        """
        targets = [self._tokens(target) for target in targets]
        pairs = list(zip(self.tokenizer.encode_source(sources), targets, strict=True))
        _check_lengths(pairs, self._positions)
        log_probs = np.zeros(len(pairs))
        lengths = [max(map(len, pair)) for pair in pairs]
        for batch in sentence_batches(lengths, tokens=search.tokens, longest=self._positions):
            source, target = (
                stack([pairs[index][side] for index in batch.sentences], rows=batch.rows, length=batch.length)
                for side in (0, 1)
            )
            found = target_log_probs(self.model, self.params, unpacked(source, target))
            log_probs[batch.sentences] = np.asarray(found)[: len(batch.sentences)]
        return [
            Translation(text, score(log_prob, len(tokens), search), log_prob, tokens, tokens[-1:] == (EOS,))
            for text, log_prob, tokens in zip(self._texts(targets), log_probs.tolist(), targets, strict=True)
        ]

    @property
    def _positions(self) -> int:
        """The most positions that the model has; only a learned table has an end."""
        config = self.model.config
        return config.max_positions if config.positions == Positions.LEARNED else sys.maxsize

    def _search(
        self, sources: Sequence[list[int]], batch: SentenceBatch, search: SearchConfig
    ) -> list[list[Translation]]:
        """The n-best list of each source."""
        most = min(batch.length + search.extra_length, self._positions)
        limits = np.zeros(batch.rows, np.int32)
        limits[: len(sources)] = [min(len(tokens) + search.extra_length, most) for tokens in sources]
        hypotheses = search_batch(
            self.model,
            self.params,
            stack(sources, rows=batch.rows, length=batch.length),
            limits,
            length=most,
            beam_size=search.beam_size,
            top_beams=search.top_beams,
            penalty=LengthPenalty(search.penalty),
            alpha=search.alpha,
        )
        hypotheses = jax.device_get(hypotheses)
        return [self._n_best(Hypotheses(*(field[row] for field in hypotheses))) for row in range(len(sources))]

    def _n_best(self, hypotheses: Hypotheses) -> list[Translation]:
        """The entries of one sentence that exist, their fields without the batch axis."""
        count = int((hypotheses.lengths > 0).sum())
        tokens = [
            tuple(row[:length].tolist())
            for row, length in zip(hypotheses.tokens[:count], hypotheses.lengths[:count], strict=True)
        ]
        columns = (field[:count].tolist() for field in (hypotheses.scores, hypotheses.log_probs))
        return list(map(Translation, self._texts(tokens), *columns, tokens, hypotheses.finished[:count].tolist()))

    def _joined(
        self, parts: list[Part], found: list[list[Translation]], *, lines: int, search: SearchConfig, name: str
    ) -> list[list[Translation]]:
        """The n-best list of each line from those of its parts."""
        of_line: list[list[list[Translation]]] = [[] for _ in range(lines)]
        for part, n_best in zip(parts, found, strict=True):
            of_line[part.line].append(n_best)
            if not n_best:
                log.warning(f"{name} line {part.line + 1:,} has no translation: the model's output is not finite.")
        return [join(n_bests, search) if n_bests else [BLANK] for n_bests in of_line]

    def _tokens(self, target: str | Sequence[int]) -> tuple[int, ...]:
        tokens = self.tokenizer.encode_target([target])[0] if isinstance(target, str) else target
        return tuple(map(int, tokens))

    def _texts(self, targets: Sequence[Sequence[int]]) -> list[str]:
        """One line each, even if a model spells out the bytes of a line end."""
        texts = self.tokenizer.decode_target(list(map(list, targets))) if targets else []
        return [text.replace("\r", " ").replace("\n", " ") for text in texts]


def join(n_bests: Sequence[Sequence[Translation]], search: SearchConfig) -> list[Translation]:
    """The n-best list of a line from those of its parts: best with best, second with second, and so on."""
    if len(n_bests) == 1:
        return list(n_bests[0])
    joined = []
    for parts in zip(*n_bests, strict=False):
        inner = (token for part in parts[:-1] for token in part.tokens if token != EOS)
        tokens = (*inner, *parts[-1].tokens)
        log_prob = sum(part.log_prob for part in parts)
        text, finished = " ".join(part.text for part in parts), all(part.finished for part in parts)
        joined.append(Translation(text, score(log_prob, len(tokens), search), log_prob, tokens, finished))
    return sorted(joined, key=lambda one: (not one.finished, -one.score))


def score(log_prob: float, length: int, search: SearchConfig) -> float:
    """log_prob / LP(length)."""
    divisor = length_penalty(jnp.asarray(length), penalty=LengthPenalty(search.penalty), alpha=search.alpha)
    return float(log_prob / divisor)


@functools.partial(jax.jit, static_argnames=("model", "length", "beam_size", "top_beams", "penalty", "alpha"))
def search_batch(
    model: Transformer,
    params: Any,
    source: Int[Array, "B S"],
    limits: Int[Array, "B"],
    *,
    length: int,
    beam_size: int,
    top_beams: int,
    penalty: LengthPenalty,
    alpha: float,
) -> Hypotheses:
    """Encodes a batch once and searches its translations of up to `limits` tokens, at most `length`."""
    segments, positions = segments_and_positions(source)
    encoded = model.apply(params, source, segments, positions, method="encode")
    cache = model.apply(params, encoded, segments, beams=beam_size, length=length, method="init_cache")

    def step(token, parent, position, cache):
        logits, cache = model.apply(params, token, parent, position, cache, method="decode_step")
        return jax.nn.log_softmax(logits), cache

    return beam_search(
        step,
        cache,
        limits=limits,
        max_length=length,
        beam_size=beam_size,
        top_beams=top_beams,
        penalty=penalty,
        alpha=alpha,
    )


@functools.partial(jax.jit, static_argnames="model")
def target_log_probs(model: Transformer, params: Any, batch: Batch) -> Float[Array, "B"]:
    """The summed log-probability of the target tokens of each row, padding left out."""
    logits: Any = model.apply(params, batch)  # [B, T, V]
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, batch.target[:, :, None], axis=2)[:, :, 0]  # [B, T]
    return jnp.where(batch.target != PAD, picked, 0.0).sum(axis=1)


def _check_lengths(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limit: int) -> None:
    for number, pair in enumerate(pairs, start=1):
        if max(map(len, pair)) > limit:
            raise UserError(
                f"pair {number:,} has {len(pair[0])} source and {len(pair[1])} target tokens, but the model only "
                f"{limit} positions (model.max_positions). Leave it out or score it in parts."
            )


def _default_checkpoint(config: Config, workdir: str) -> str:
    steps = spaced(checkpoint_steps(workdir), config.run.checkpoint_every)
    count = min(config.run.average, len(steps))
    return f"average:{count}" if count > 1 else "last"
