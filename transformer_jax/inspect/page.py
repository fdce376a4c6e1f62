"""A page of pictures: files and an index.html beside them, which needs nothing else."""

import html
import os
import pathlib
from collections.abc import Iterable
from typing import NamedTuple

from matplotlib.figure import Figure

from transformer_jax.inspect.style import save

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
figure { margin: 0 0 2.5rem } img { max-width: 100%; height: auto }
h2 { font-size: 1.1rem; margin: 2rem 0 .3rem } p { margin: .3rem 0 .8rem } small { color: #666 }
"""


class Picture(NamedTuple):
    name: str  # of its files
    title: str
    text: str  # what one sees
    figure: Figure


def write_page(
    pictures: Iterable[Picture], directory: str | os.PathLike, *, heading: str, lead: str = ""
) -> pathlib.Path:
    """Saves the pictures as they come, and the index when all are there; its path. All text is escaped."""
    entries = []
    for picture in pictures:
        save(picture.figure, directory, picture.name)
        entries.append(_entry(picture))
    index = pathlib.Path(directory, "index.html")
    unfinished = index.with_suffix(".tmp")
    unfinished.write_text(_document(heading, lead, entries), encoding="utf-8")
    unfinished.replace(index)
    return index


def _entry(picture: Picture) -> str:
    name, title, text = (html.escape(part) for part in (picture.name, picture.title, picture.text))
    return (
        f'<h2 id="{name}">{title}</h2>\n<p>{text}</p>\n'
        f'<figure><img src="{name}.svg" alt="{title}"><br><small><a href="{name}.png">PNG</a></small></figure>\n'
    )


def _document(heading: str, lead: str, entries: list[str]) -> str:
    heading, lead = html.escape(heading), html.escape(lead)
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{heading}</title>'
    body = f"<h1>{heading}</h1>\n<p>{lead}</p>\n{''.join(entries)}"
    return f'<!doctype html>\n<html lang="en">\n{head}\n<style>{STYLE}</style>\n{body}</html>\n'
