"""One HTML file in which a reader explores how a model translates: attention, its arithmetic, decoding and search.

The file has everything in it, loads nothing from a network, and shows the numbers of `trace` and of the recorded
search: arrays are in it as float32, nothing is rounded before it is shown. Its parts lie in `explorer_page/`.

    python3 -m transformer_jax.inspect --model runs/phrases --text "in 35 weeks" --explorer explorer.html
"""

import base64
import hashlib
import html
import importlib.resources
import json
import os
import pathlib
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from transformer_jax.config import SearchConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.inspect.distributions import likeliest
from transformer_jax.inspect.labels import target_labels
from transformer_jax.inspect.pictures import LONGEST, Seen, see
from transformer_jax.inspect.search_tree import Recording, record_search, search_tree
from transformer_jax.inspect.trace import AttentionTrace

ALTERNATIVES = 10  # tokens that are listed at each step
CHARACTERS = 2000  # of a sentence that a served page sends
LARGEST = 100 * 2**20  # bytes of a file that a browser opens in a second or two
SCRIPTS = ("elements.js", "attention.js", "walk.js", "decoding.js", "tree.js", "page.js")


def explore(translator: Translator, text: str, *, target: str | None = None, search: SearchConfig) -> dict[str, Any]:
    """All that the page shows of one sentence, ready for JSON.

    `target` is the translation that is traced, by default the best that the model finds; the search is always its own.

    Raises:
      UserError: for a text that is empty or too long, an output that is not finite, or a search that draws samples.
    """
    length = len(translator.tokenizer.encode_source([text])[0])
    if length > LONGEST:
        start = textwrap.shorten(text, 40, placeholder="…")
        raise UserError(f"{start!r} has {length} tokens; the explorer has room for {LONGEST}. Give a shorter sentence.")
    seen = see(translator, text, target=target, search=search)
    if not np.isfinite(seen.trace.logits).all():
        raise UserError(f"the model's output for {text!r} is not finite. Give another --checkpoint.")
    recording = record_search(translator.model, translator.params, seen.trace.source.tolist(), search)
    return explored(seen, recording, text=text)


def explored(seen: Seen, recording: Recording, *, text: str) -> dict[str, Any]:
    """A trace and a recorded search as the page's script reads them."""
    encoder, decoder = seen.trace.encoder.layers, seen.trace.decoder.layers
    return {
        "text": text,
        "translation": seen.text,
        "tokens": {"source": seen.source, "read": seen.read, "written": seen.written},
        "attention": {
            "encoder": [_attention(layer.self_attention) for layer in encoder],
            "decoder": [_attention(layer.self_attention) for layer in decoder],
            "cross": [_attention(layer.cross_attention) for layer in decoder if layer.cross_attention],
        },
        "steps": _steps(seen),
        "search": _search(seen, recording),
    }


def floats(array: Float[ndarray, "..."]) -> str:
    """Little-endian float32 in base64: no digit is lost, and it is shorter than decimals of four digits."""
    return base64.b64encode(np.ascontiguousarray(array, "<f4").tobytes()).decode("ascii")


def _attention(one: AttentionTrace) -> dict[str, Any]:
    heads, queries, width = one.queries.shape
    relative = one.relative and {
        "keys": floats(np.asarray(one.relative.keys)),
        "values": floats(np.asarray(one.relative.values)),
        "distances": np.asarray(one.relative.distances).argmax(axis=-1).tolist(),
    }
    return {
        "heads": heads,
        "queries": queries,
        "keys": one.keys.shape[1],
        "key_width": width,
        "value_width": one.values.shape[2],
        "q": floats(one.queries),
        "k": floats(one.keys),
        "v": floats(one.values),
        "scores": floats(one.scores),
        "weights": floats(one.weights),
        "outputs": floats(one.heads),
        "mask": ["".join(map(str, row.astype(int))) for row in one.mask],
        "relative": relative,
    }


def _steps(seen: Seen) -> list[dict[str, Any]]:
    """The likeliest tokens at each position, and where among all the one stands that was written."""
    probabilities, target = seen.trace.probabilities, seen.trace.target
    found = likeliest(probabilities, min(ALTERNATIVES, probabilities.shape[1]))
    places = np.argsort(-probabilities, axis=1, kind="stable").argsort(axis=1)
    tokenizer = seen.translator.tokenizer
    return [
        {
            "labels": target_labels(tokenizer, found.tokens[step]),
            "probabilities": found.probabilities[step].tolist(),
            "chosen": {"rank": int(places[step, token]), "probability": float(probabilities[step, token])},
        }
        for step, token in enumerate(target)
    ]


def _search(seen: Seen, recording: Recording) -> dict[str, Any]:
    nodes = search_tree(recording)
    index = {node.tokens: place for place, node in enumerate(nodes)}
    labels = target_labels(seen.translator.tokenizer, [node.tokens[-1] for node in nodes])
    return {
        "slots": len(recording.steps[0].token),
        "nodes": [
            {
                "label": label,
                "parent": index.get(node.tokens[:-1], -1),
                "step": len(node.tokens),
                "slot": node.slot,
                "log_prob": node.log_prob,
                "fate": str(node.fate),
                "rank": node.rank,
                "score": node.score,
            }
            for node, label in zip(nodes, labels, strict=True)
        ],
    }


def explorer_page(sentences: Sequence[dict[str, Any]], *, title: str, asks: bool = False) -> str:
    """The page for these sentences as HTML; with `asks` it has a field for more, which its server answers.

    Whatever stands in a sentence stays text, and the only script that a browser runs is the page's own.
    """
    style, script = _part("page.css"), '"use strict";\n' + "\n".join(map(_part, SCRIPTS))
    policy = {
        "default-src": "'none'",
        "script-src": _digest(script),
        "style-src": _digest(style),
        "img-src": "data:",
        "connect-src": "'self'" if asks else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    parts = {
        "title": html.escape(title),
        "policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "style": style,
        "script": script,
        "characters": str(CHARACTERS),
        "data": json_in_html({"sentences": list(sentences), "asks": asks}),
    }
    return re.sub(
        r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html")
    )  # once: parts are not looked into


def json_in_html(value: Any) -> str:
    """JSON that a script element can have: no tag begins in it, and all but ASCII is escaped.

    Raises:
      ValueError: for numbers that are not finite.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def write_explorer(sentences: Sequence[dict[str, Any]], path: str | os.PathLike, *, title: str) -> pathlib.Path:
    """Writes the page, whole or not at all; its path.

    Raises:
      UserError: if it would be larger than `LARGEST`.
    """
    page = explorer_page(sentences, title=title)
    if len(page) > LARGEST:
        raise UserError(
            f"the explorer of {len(sentences)} sentences would have {len(page) / 2**20:.0f} MiB, more than the "
            f"{LARGEST / 2**20:.0f} MiB which browsers open quickly. Give fewer or shorter sentences."
        )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def _part(name: str) -> str:
    return importlib.resources.files("transformer_jax.inspect").joinpath("explorer_page", name).read_text("utf-8")


def _digest(content: str) -> str:
    """What a content security policy calls this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"
