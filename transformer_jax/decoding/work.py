"""What `decode.py` makes of a chunk of lines: what is written to each of its outputs."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import jax
import numpy as np

from transformer_jax.config import SearchConfig, SearchMethod
from transformer_jax.data.corpus import read_lines
from transformer_jax.decoding import alignment
from transformer_jax.decoding.alignment import Unit
from transformer_jax.decoding.chunks import chunks
from transformer_jax.decoding.output import Format, best_texts, formatted, formatted_scores, write_lines
from transformer_jax.decoding.partial import Partial
from transformer_jax.decoding.requests import Entry
from transformer_jax.decoding.scoring import score_lines
from transformer_jax.decoding.translator import Translation, Translator
from transformer_jax.errors import UserError

log = logging.getLogger(__name__)


class Attention(NamedTuple):
    """Which attention is written, and how."""

    links: bool = False  # to the second output, in Pharaoh's format
    weights: bool = False  # to the last output, as arrays
    unit: Unit = Unit.WORDS
    layer: int | None = None
    head: int | None = None


NO_ATTENTION = Attention()


@dataclasses.dataclass(frozen=True)
class Work:
    """Translates entries, or scores the translations that they have.

    `best` gets the text of each line's best translation if it is not None.
    """

    translator: Translator
    search: SearchConfig
    format: Format
    attention: Attention = NO_ATTENTION
    name: str = "input"
    score: bool = False
    best: list[str] | None = None
    progress: Callable[[int], object] = lambda lines: None

    def __call__(self, entries: Sequence[Entry], streams: Sequence[BinaryIO], *, first_line: int) -> None:
        """Writes what is made of entries; the first is number `first_line` of the input."""
        lines, translations = (self._scored if self.score else self._translated)(entries, first_line)
        write_lines(streams[0], lines)
        if self.best is not None:
            self.best.extend(one.text if one else "" for one in translations)
        if self.attention.links or self.attention.weights:
            self._write_attention([entry.request.source for entry in entries], translations, streams, first_line)

    def _translated(self, entries: Sequence[Entry], first_line: int) -> tuple[Iterator[str], list[Translation | None]]:
        self._check_counts(entries, first_line)
        requests = [entry.request for entry in entries]
        n_bests = self.translator.translate(
            requests, self.search, name=self.name, first_line=first_line, progress=self.progress
        )
        lines = formatted(
            [entry.fields for entry in entries],
            n_bests,
            format=self.format,
            n=self.search.top_beams,
            first_line=first_line,
        )
        return lines, [n_best[0] if n_best else None for n_best in n_bests]

    def _check_counts(self, entries: Sequence[Entry], first_line: int) -> None:
        beam_size = self.search.beam_size
        for line, entry in enumerate(entries, start=first_line):
            if self.search.method == SearchMethod.BEAM and (entry.request.n_best or 1) > beam_size:
                raise UserError(
                    f"{self.name} line {line:,}: the field 'n_best' is {entry.request.n_best}, but --beam_size is "
                    f"{beam_size}. Widen the beam or ask for fewer."
                )

    def _scored(self, entries: Sequence[Entry], first_line: int) -> tuple[Iterator[str], list[Translation | None]]:
        sources, targets = [entry.request.source for entry in entries], [entry.target or "" for entry in entries]
        scored = score_lines(self.translator, sources, targets, self.search, name=self.name, first_line=first_line)
        self.progress(len(entries))
        fields = [entry.fields | {"target": entry.target} for entry in entries]
        lines = formatted_scores(fields, scored, format=self.format, first_line=first_line)
        return lines, [one.translation for one in scored]

    def _write_attention(
        self,
        sources: Sequence[str],
        translations: Sequence[Translation | None],
        streams: Sequence[BinaryIO],
        first_line: int,
    ) -> None:
        pairs = self._pairs(sources, translations, first_line)
        weights = alignment.cross_attention(
            self.translator.model,
            self.translator.members,
            pairs,
            tokens=self.search.tokens,
            layer=self.attention.layer,
            head=self.attention.head,
        )
        if self.attention.links:
            write_lines(streams[1], (self._links(*row) for row in zip(pairs, weights, strict=True)))
        if self.attention.weights:
            alignment.write_arrays(streams[-1], weights)

    def _pairs(
        self, sources: Sequence[str], translations: Sequence[Translation | None], first_line: int
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """Source and target ids of each line; none of one that was not translated in one piece."""
        pairs = list[tuple[Sequence[int], Sequence[int]]]()
        limit = self.translator.limit
        encoded = self.translator.tokenizer.encode_source(sources)
        for line, (source, one) in enumerate(zip(encoded, translations, strict=True), start=first_line):
            if one is None or not one.tokens:
                pairs.append(([], []))
            elif len(source) > limit and not self.score:
                log.warning(f"{self.name} line {line:,} has no alignment: it is longer than the model's limit.")
                pairs.append(([], []))
            else:
                pairs.append((source, one.tokens))
        return pairs

    def _links(self, pair: tuple[Sequence[int], Sequence[int]], weights: np.ndarray) -> str:
        if not len(weights):
            return ""
        tokenizer = self.translator.tokenizer
        if self.attention.unit == Unit.TOKENS:
            source, target = map(alignment.tokens_as_words, pair)
        else:
            source = alignment.words_of_tokens(pair[0], tokenizer.decode_source)
            target = alignment.words_of_tokens(pair[1], tokenizer.decode_target)
        return alignment.pharaoh(alignment.links(weights, source, target))


def write_all(
    work: Work,
    entries: Iterable[Entry],
    files: Partial,
    *,
    chunk: int,
    first_line: int = 1,
    more: Callable[[], bool] = lambda: True,
) -> None:
    """Works through the entries that are not counted in the files yet, `chunk` at a time; see `chunks`.

    The first entry is line `first_line` of the input.
    """
    entries, counted = iter(entries), files.lines
    files.skip(map(_identity, entries), name=work.name)
    if counted and work.best is not None:
        written = read_lines(files.streams[0].name)
        work.best.extend(best_texts(written, format=work.format, n=work.search.top_beams, count=counted))
    work.progress(counted)
    for some in chunks(entries, chunk, more=more):
        work(some, files.streams, first_line=first_line + files.lines)
        files.count(map(_identity, some))


def digest(translator: Translator) -> str:
    """Changes with the parameters, the architecture and the tokenizer, in hexadecimal."""
    found = hashlib.sha256(f"{translator.model.config} {translator.max_length} {translator.tokenizer.hash}".encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(translator.members):
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _identity(entry: Entry) -> bytes:
    """What has to be the same for a line to be the same."""
    return json.dumps([entry.fields, entry.request.prefix, entry.target]).encode()
