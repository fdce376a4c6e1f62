"""The tour leads to what there is: files, functions, pictures, commands."""

import pathlib
import re

import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `inspect`")

from transformer_jax.inspect import links
from transformer_jax.inspect.__main__ import parse

DOCS = pathlib.Path(__file__).parents[1] / "docs"
TOUR = (DOCS / "tour.md").read_text(encoding="utf-8")


def test_every_function_is_where_its_link_leads():
    found = re.findall(r"\[`(\w+)`\]\(\.\./(transformer_jax/[\w/]+\.py)\)", TOUR)
    assert len(found) > 40
    for name, path in found:
        file = DOCS.parent / path
        pattern = rf"^ *(def|class) {name}\b"
        assert file.stem == name or re.search(pattern, file.read_text(encoding="utf-8"), flags=re.MULTILINE), (
            name,
            path,
        )


def test_every_picture_and_file_is_there():
    for path in re.findall(r"\]\(((?!https)[^)]+)\)", TOUR):
        assert (DOCS / path).exists(), path


def test_its_steps_are_the_twelve_of_the_notebook():
    notebook = (DOCS.parent / "notebooks" / "hello.ipynb").read_text(encoding="utf-8")
    steps = re.findall(r"^## (\d+)\. ", TOUR, flags=re.MULTILINE)
    assert steps == [str(number) for number in range(1, 13)]
    assert re.findall(r'"## (\d+)\. ', notebook) == steps


def test_its_commands_can_be_typed():
    command = re.search(r"^python3 -m transformer_jax\.inspect (.*)$", TOUR, flags=re.MULTILINE)
    assert command is not None
    arguments = re.findall(r'"([^"]*)"|(\S+)', command[1])
    assert parse([quoted or plain for quoted, plain in arguments]).lessons
    assert set(re.findall(r"--links (\w+)", TOUR)) <= set(links.SETS)
