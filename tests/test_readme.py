"""What the README says can be typed, works."""

import pathlib
import re

import pytest

import transformer_jax

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code):
    names = {}
    exec(code, names)
    assert names["logits"].shape == (1, 4, 128)
    assert names["weights"].cross.shape == (1, 6, 8, 4, 4)


def test_files_and_names_in_the_maps_exist():
    for path, names in re.findall(r"`((?:nn|data|training|decoding)/\w+\.py)`(?:: ((?:`\w+`(?:, )?)+))?", README):
        text = (ROOT / "transformer_jax" / path).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(def|class) {name}\b", text, flags=re.MULTILINE), f"{path} has no {name}"


def test_configs_named_in_commands_exist():
    for name in re.findall(r"--config=(configs/\w+\.py)", README):
        assert (ROOT / name).exists()


def test_everything_exported_is_there():
    assert all(hasattr(transformer_jax, name) for name in transformer_jax.__all__)
