"""Scores of translations that are given."""

from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.config import EnsembleMean, Positions, SearchConfig
from transformer_jax.decoding.translator import BLANK, Translation, Translator, score
from transformer_jax.errors import UserError


class Scored(NamedTuple):
    translation: Translation
    token_log_probs: list[float]  # of each of its tokens, EOS included
    pieces: list[str]  # what those tokens are in the vocabulary


def score_lines(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    search: SearchConfig,
    *,
    name: str = "input",
    first_line: int = 1,
) -> list[Scored]:
    """The scores which `search` gives to the translation on each line.

    Of two lines without text the one is the other's translation, with probability 1, as in a search. `name` is that of
    the sources, whose first line has the number `first_line`.

    Raises:
      UserError: for a pair longer than a learned table of positions.
    """
    rows = [row for row, pair in enumerate(zip(sources, targets, strict=True)) if any(map(str.strip, pair))]
    tokenizer = translator.tokenizer
    encoded = tokenizer.encode_target([targets[row] for row in rows])
    tokens = [(*search.forced_prefix, *ids) for ids in encoded]
    for row, ids in zip(rows, tokens, strict=True):
        _check_length(sources[row], ids, translator, where=f"{name} line {first_line + row:,}")
    log_probs = translator.token_log_probs(
        [sources[row] for row in rows], tokens, tokens=search.tokens, ensemble=EnsembleMean(search.ensemble)
    )
    scored = [Scored(BLANK, [], [])] * len(sources)
    for row, ids, found in zip(rows, tokens, log_probs, strict=True):
        log_prob = float(found.sum())
        one = Translation(targets[row], score(log_prob, len(ids), search), log_prob, ids, True)
        scored[row] = Scored(one, found.tolist(), [tokenizer.target.id_to_piece(token) for token in ids])
    return scored


def _check_length(source: str, target: Sequence[int], translator: Translator, *, where: str) -> None:
    config = translator.model.config
    if config.positions != Positions.LEARNED:
        return
    lengths = len(translator.tokenizer.encode_source([source])[0]), len(target)
    if max(lengths) > config.max_positions:
        raise UserError(
            f"{where}: {lengths[0]:,} source and {lengths[1]:,} target tokens, but the model only has "
            f"{config.max_positions:,} positions (model.max_positions). Leave it out or score it in parts."
        )
