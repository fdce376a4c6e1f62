"""Text → translations, with a model, its parameters and its tokenizer.

The results are those of one sentence at a time, whatever is translated beside it: sentences are searched in a pool
(`transformer_jax.decoding.pool`), the longest first, and put back into their order. Samples are those of a sentence
alone too: their randomness comes from the seed and from what is asked of the sentence.
"""

import dataclasses
import functools
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from transformer_jax.batch import EOS, PAD, UNK, Batch, unpacked
from transformer_jax.config import (
    Beam,
    Config,
    EnsembleMean,
    LengthPenalty,
    Positions,
    SearchConfig,
    SearchMethod,
    TransformerConfig,
    with_vocabularies,
)
from transformer_jax.config_check import check_search
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.batches import sentence_batches, stack
from transformer_jax.decoding.ensemble import mean_log_probs
from transformer_jax.decoding.filters import Filters
from transformer_jax.decoding.parts import Part, parts_of_lines
from transformer_jax.decoding.phrases import phrase_tokens, prefix_tokens, stack_constraints, stack_prefixes
from transformer_jax.decoding.pool import Engine, search_all
from transformer_jax.decoding.sampling import Sampling, sentence_keys
from transformer_jax.decoding.search import Asked, Hypotheses, Rules, length_penalty
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import check_shapes
from transformer_jax.run_directory import checkpoint_steps, load_config, load_parameters, spaced, tokenizer_path

log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A line to translate, and what is asked of its translations beside what the search says."""

    source: str
    prefix: str = ""  # text with which every translation begins
    constraints: tuple[str, ...] = ()  # texts that every translation has, each as often as it is given
    n_best: int | None = None  # None: as many as the search says


class Translation(NamedTuple):
    text: str
    score: float  # log_prob / LP(L), L = len(tokens)
    log_prob: float  # the model's, summed over the tokens
    tokens: tuple[int, ...]  # EOS included
    finished: bool  # whether it ends with EOS; if not, it was cut at the output limit
    satisfied: bool = True  # whether it has all that the request's constraints ask for


BLANK = Translation("", 0.0, 0.0, (), True)  # the translation of a line without text


@dataclasses.dataclass(frozen=True, eq=False)
class Translator:
    """Translates lines with one set of parameters, or with several as an ensemble.

    Translators of equal models share their compiled programs, so one can be made for every evaluation of a run.
    """

    model: Transformer
    params: Any
    tokenizer: Tokenizer
    max_length: int = 256  # source tokens, EOS counted, that the model is given at once
    others: tuple[Any, ...] = ()  # the parameters of an ensemble's other members

    @classmethod
    def load(cls, workdir: str | Sequence[str], checkpoint: str | Sequence[str] | None = None) -> "Translator":
        """The model of a run directory; of several directories or checkpoints, an ensemble of each with each.

        `checkpoint` is one of those in `run_directory.choose_steps`; None: the average which the run's config asks
        for, of as many checkpoints as there are.

        Raises:
          UserError: if it is not there or its parts don't belong together: an ensemble has one tokenizer, and models
            of one configuration.
        """
        workdirs = [workdir] if isinstance(workdir, str) else list(workdir)
        checkpoints = [checkpoint] if checkpoint is None or isinstance(checkpoint, str) else list(checkpoint)
        members = [(where, cls._load_one(where, which)) for where in workdirs for which in checkpoints]
        if not members:
            raise UserError("there is no model to translate with. Give at least one run directory and checkpoint.")
        (first_name, first), *others = members
        for name, other in others:
            _check_members(first, other, names=(first_name, name))
        limit = min(member.max_length for _, member in members)
        return dataclasses.replace(first, max_length=limit, others=tuple(other.params for _, other in others))

    @classmethod
    def _load_one(cls, workdir: str, checkpoint: str | None) -> "Translator":
        config, tokenizer = load_config(workdir), Tokenizer.load(tokenizer_path(workdir))
        model = Transformer(
            with_vocabularies(config.model, source=tokenizer.source_vocab, target=tokenizer.target_vocab)
        )
        checkpoint = checkpoint or _default_checkpoint(config, workdir)
        params = load_parameters(workdir, checkpoint)
        check_shapes(params, model.config, name=str(workdir))
        params = on_every_device(params)
        return cls(model, params, tokenizer, config.data.max_length)

    def translate(
        self,
        lines: Sequence[str | Request],
        search: SearchConfig,
        *,
        name: str = "input",
        first_line: int = 1,
        progress: Callable[[int], object] = lambda lines: None,
    ) -> list[list[Translation]]:
        """The n-best list of each line: at most `search.top_beams`, and at least one if the model is finite.

        The order is that of `search.Hypotheses`. Lines without text are not translated. Longer ones than the model's
        limit are translated in parts and joined, with a warning that names `name` and the line, the first of which is
        `first_line`. `progress` is told how many more lines are done.

        Raises:
          UserError: if the search is not one: more translations than beams, for instance; if a request can't be
            fulfilled; for ids which the model does not have.
        """
        requests = [Request(line) if isinstance(line, str) else line for line in lines]
        counts = [
            n_best_of(request, search, where=f"{name} line {number:,}")
            for number, request in enumerate(requests, start=first_line)
        ]
        search = dataclasses.replace(search, top_beams=max(counts, default=search.top_beams))
        check_search(search)
        self._check_ids(search)
        parts = self._parts(requests, search, name=name, first_line=first_line)
        progress(len(lines) - len({part.line for part in parts}))
        parts_left = np.bincount([part.line for part in parts], minlength=len(lines))
        found: list[list[Translation]] = [[] for _ in parts]
        for index, n_best in self._search(parts, search):
            found[index] = n_best
            parts_left[parts[index].line] -= 1
            progress(int(parts_left[parts[index].line] == 0))
        joined = self._joined(parts, found, lines=len(lines), search=search, name=name, first_line=first_line)
        return [n_best[:count] for n_best, count in zip(joined, counts, strict=True)]

    def best(self, lines: Sequence[str | Request], search: SearchConfig) -> list[str]:
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
        ensemble = EnsembleMean(search.ensemble)
        token_log_probs = self.token_log_probs(sources, targets, tokens=search.tokens, ensemble=ensemble)
        log_probs = [float(row.sum()) for row in token_log_probs]
        return [
            Translation(text, score(log_prob, len(tokens), search), log_prob, tokens, tokens[-1:] == (EOS,))
            for text, log_prob, tokens in zip(self._texts(targets), log_probs, targets, strict=True)
        ]

    def token_log_probs(
        self,
        sources: Sequence[str],
        targets: Sequence[Sequence[int]],
        *,
        tokens: int = 4096,
        ensemble: EnsembleMean = EnsembleMean.PROBABILITIES,
    ) -> list[np.ndarray]:
        """The log-probability of each token of given translations, float32 [T] each; pairs are batched as in a search.

        Raises:
          UserError: for a pair longer than a learned table of positions.
        """
        pairs = list(zip(self.tokenizer.encode_source(sources), targets, strict=True))
        _check_lengths(pairs, self._positions)
        log_probs: list[np.ndarray] = [np.zeros(0, np.float32)] * len(pairs)
        lengths = [max(map(len, pair)) for pair in pairs]
        for batch in sentence_batches(lengths, tokens=tokens, longest=self._positions):
            source, target = (
                stack([pairs[index][side] for index in batch.sentences], rows=batch.rows, length=batch.length)
                for side in (0, 1)
            )
            pairs_of_batch = unpacked(source, target)
            found = np.asarray(target_log_probs(self.model, self.members, pairs_of_batch, ensemble=ensemble))
            for row, index in enumerate(batch.sentences):
                log_probs[index] = found[row, : len(targets[index])]
        return log_probs

    @property
    def members(self) -> tuple[Any, ...]:
        """The parameters of each member of the ensemble; of the one model."""
        return (self.params, *self.others)

    @property
    def limit(self) -> int:
        """The most source tokens, EOS counted, that the model is given at once; longer lines are cut."""
        return min(self.max_length, self._positions)

    @property
    def _positions(self) -> int:
        """The most positions that the model has; only a learned table has an end."""
        config = self.model.config
        return config.max_positions if config.positions == Positions.LEARNED else sys.maxsize

    def _check_ids(self, search: SearchConfig) -> None:
        vocab = self.tokenizer.target_vocab
        for field in ("forced_prefix", "suppressed"):
            if unknown := [token for token in getattr(search, field) if token >= vocab]:
                raise UserError(
                    f"search.{field} has the id {unknown[0]}, but the tokenizer only ids below {vocab}. Leave it out."
                )

    def _parts(self, requests: Sequence[Request], search: SearchConfig, *, name: str, first_line: int) -> list[Part]:
        """The parts of all lines, with what is asked of each: of a line in several parts, of the first one.

        Raises:
          UserError: for a request that can't be fulfilled.
        """
        sources = [request.source for request in requests]
        parts = parts_of_lines(sources, self.tokenizer, limit=self.limit, name=name, first_line=first_line)
        for index, part in enumerate(parts):
            request, where = requests[part.line], f"{name} line {first_line + part.line:,}"
            if index and parts[index - 1].line == part.line:
                parts[index] = part._replace(prefix=search.forced_prefix)
                if request.constraints and (index == 1 or parts[index - 2].line != part.line):
                    log.warning(f"{where}: its constraints are those of its first part.")
            else:
                parts[index] = self._asked_of(part, request, search, where=where)
        return parts

    def _asked_of(self, part: Part, request: Request, search: SearchConfig, *, where: str) -> Part:
        """The part with the tokens of its prefix and constraints. `where` is its line, for messages."""
        constraints = tuple(phrase_tokens(text, self.tokenizer) for text in request.constraints)
        constraints = tuple(phrase for phrase in constraints if phrase)
        if constraints and search.method == SearchMethod.SAMPLE:
            raise UserError(f"{where} has constraints, but search.method is sample. Set it to beam, or leave them out.")
        prefix = prefix_tokens(request.prefix, self.tokenizer)
        if prefix[: len(search.forced_prefix)] != search.forced_prefix:  # some tokenizers begin with it themselves
            prefix = (*search.forced_prefix, *prefix)
        if len(prefix) >= self._positions:
            raise UserError(
                f"{where}: its prefix has {len(prefix)} tokens, but the model only {self._positions} positions "
                "(model.max_positions). Shorten it."
            )
        if UNK in (*prefix, *(token for phrase in constraints for token in phrase)):
            log.warning(f"{where}: its prefix or constraints have characters which the vocabulary does not have.")
        return part._replace(prefix=prefix, constraints=constraints)

    def _search(self, parts: Sequence[Part], search: SearchConfig) -> Iterator[tuple[int, list[Translation]]]:
        """The number of each part and its n-best list, in the order in which they are found."""
        engine = Engine(self.model, search_rules(search), EnsembleMean(search.ensemble))
        limits = [max(output_limit(len(part.tokens), search), len(part.prefix) + 1) for part in parts]
        sampled = search.method == SearchMethod.SAMPLE
        asked = Asked(
            np.minimum(limits, self._positions).astype(np.int32),
            stack_prefixes([part.prefix for part in parts], rows=len(parts)),
            stack_constraints([part.constraints for part in parts], rows=len(parts)),
            sentence_keys(search.seed, _hashes(parts)) if sampled else None,
        )
        sources, tokens = [part.tokens for part in parts], search.tokens // engine.rules.slots
        options = {"tokens": tokens, "positions": self._positions}
        for index, hypotheses in search_all(engine, self.members, sources, asked, **options):
            yield index, self._n_best(hypotheses)

    def _n_best(self, hypotheses: Hypotheses) -> list[Translation]:
        """The entries of one sentence that exist, their fields without the batch axis."""
        count = int((hypotheses.lengths > 0).sum())
        tokens = [
            tuple(row[:length].tolist())
            for row, length in zip(hypotheses.tokens[:count], hypotheses.lengths[:count], strict=True)
        ]
        scores, log_probs, finished, satisfied = (
            field[:count].tolist()
            for field in (hypotheses.scores, hypotheses.log_probs, hypotheses.finished, hypotheses.satisfied)
        )
        return list(map(Translation, self._texts(tokens), scores, log_probs, tokens, finished, satisfied))

    def _joined(
        self,
        parts: list[Part],
        found: list[list[Translation]],
        *,
        lines: int,
        search: SearchConfig,
        name: str,
        first_line: int,
    ) -> list[list[Translation]]:
        """The n-best list of each line from those of its parts."""
        of_line: list[list[list[Translation]]] = [[] for _ in range(lines)]
        for part, n_best in zip(parts, found, strict=True):
            of_line[part.line].append(n_best)
            if not n_best:
                line = first_line + part.line
                log.warning(
                    f"{name} line {line:,} has no translation: the model's output is not finite, or the search forbids "
                    "every token."
                )
        return [join(n_bests, search) if n_bests else [BLANK] for n_bests in of_line]

    def _tokens(self, target: str | Sequence[int]) -> tuple[int, ...]:
        tokens = self.tokenizer.encode_target([target])[0] if isinstance(target, str) else target
        return tuple(map(int, tokens))

    def _texts(self, targets: Sequence[Sequence[int]]) -> list[str]:
        """One line each, even if a model spells out the bytes of a line end."""
        texts = self.tokenizer.decode_target(list(map(list, targets))) if targets else []
        return [text.replace("\r", " ").replace("\n", " ") for text in texts]


def on_every_device(params: Any) -> Any:
    """A copy on each device of this process; sentences are then split over them."""
    devices = jax.local_devices()
    if len(devices) == 1:
        return jax.device_put(params)
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))


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
        satisfied = all(part.satisfied for part in parts)
        joined.append(Translation(text, score(log_prob, len(tokens), search), log_prob, tokens, finished, satisfied))
    if search.method == SearchMethod.SAMPLE:
        return joined
    return sorted(joined, key=lambda one: (not one.finished, not one.satisfied, -one.score))


def score(log_prob: float, length: int, search: SearchConfig) -> float:
    """log_prob / LP(length)."""
    divisor = length_penalty(jnp.asarray(length), penalty=LengthPenalty(search.penalty), alpha=search.alpha)
    return float(log_prob / divisor)


def n_best_of(request: Request, search: SearchConfig, *, where: str) -> int:
    """How many translations are asked for. `where` is the line of the request, for messages."""
    if request.n_best is None:
        return search.top_beams
    if request.n_best < 1:
        raise UserError(f"{where}: n_best is {request.n_best}; expected 1 or more, or none.")
    return request.n_best


def output_limit(source_length: int, search: SearchConfig) -> int:
    """The most tokens, EOS counted, of the translation of so many source tokens. A forced prefix is never cut."""
    return math.floor(search.length_factor * source_length) + search.extra_length


def search_rules(search: SearchConfig) -> Rules:
    """What holds for all sentences of a search."""
    sampling = Sampling(search.temperature, search.top_k, search.top_p, search.min_p, search.epsilon)
    return Rules(
        search.beam_size,
        search.top_beams,
        LengthPenalty(search.penalty),
        search.alpha,
        Filters(search.min_length, search.repetition_penalty, search.no_repeat_ngram, tuple(search.suppressed)),
        search.groups,
        search.diversity if search.groups > 1 else 0.0,
        sampling if search.method == SearchMethod.SAMPLE else None,
        Beam(search.beam),
    )


@functools.partial(jax.jit, static_argnames=("model", "ensemble"))
def target_log_probs(
    model: Transformer,
    members: tuple[Any, ...],
    batch: Batch,
    *,
    ensemble: EnsembleMean = EnsembleMean.PROBABILITIES,
) -> Float[Array, "B T"]:
    """The log-probability of each target token; 0 for padding."""
    logits: list[Any] = [model.apply(params, batch) for params in members]
    log_probs = mean_log_probs([jax.nn.log_softmax(some) for some in logits], ensemble)  # [B, T, V]
    picked = jnp.take_along_axis(log_probs, batch.target[:, :, None], axis=2)[:, :, 0]  # [B, T]
    return jnp.where(batch.target != PAD, picked, 0.0)


def _hashes(parts: Sequence[Part]) -> np.ndarray:
    """A number for each part, uint32, that depends on nothing but what is asked of it."""
    asked = ((*part.tokens, *part.prefix) for part in parts)
    return np.array([zlib.crc32(np.array(ids, "<i4").tobytes()) for ids in asked], np.uint32)


def _check_members(one: Translator, other: Translator, *, names: tuple[str, str]) -> None:
    """Refuses an ensemble of models that don't have one tokenizer and one configuration."""
    if one.tokenizer.hash != other.tokenizer.hash:
        raise UserError(f"{names[0]} and {names[1]} have different tokenizers; an ensemble has one. Leave one out.")
    if _architecture(one.model.config) != _architecture(other.model.config):
        raise UserError(
            f"{names[0]} and {names[1]} have models of different configurations (config.model); an ensemble has one. "
            "Leave one out."
        )


def _architecture(config: TransformerConfig) -> TransformerConfig:
    """What a model's parameters mean depends on."""
    return dataclasses.replace(config, dropout=0.0, attention_dropout=0.0, feed_forward_dropout=0.0)


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
