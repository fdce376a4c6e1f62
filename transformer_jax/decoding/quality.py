"""Translations against references, by sacreBLEU (Post, 2018)."""

from collections.abc import Sequence
from typing import NamedTuple

import sacrebleu


class Quality(NamedTuple):
    """Corpus scores from 0 to 100, with the signatures without which they can't be compared."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def __str__(self) -> str:
        return f"BLEU {self.bleu:.2f} ({self.bleu_signature})\nchrF {self.chrf:.2f} ({self.chrf_signature})"


def quality(translations: Sequence[str], references: Sequence[str]) -> Quality:
    """BLEU and chrF of a corpus with sacreBLEU's defaults (case-sensitive, 13a).

    Raises:
      ValueError: if there are not as many references as translations, or none.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(f"{len(translations)} translations and {len(references)} references: expected one for each.")
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    return Quality(
        bleu.corpus_score(translations, [references]).score,
        str(bleu.get_signature()),
        chrf.corpus_score(translations, [references]).score,
        str(chrf.get_signature()),
    )
