"""What the README and the pages of docs/ say can be typed, can be typed: their blocks run, one page after another.

Each page has a directory with what a reader has: a checkout, `runs/phrases` as `train.py` leaves it, and files of text.
Trainings are the commands of the page with `SMALL` behind them. This makes all of them, and runs the slow pages too:

    TRANSFORMER_JAX_DOCS=1 python3 -m pytest -m slow tests/test_docs.py
"""

import ast
import dataclasses
import json
import os
import pathlib
import re
import shutil
from typing import NamedTuple

import numpy as np
import pytest
from typed_commands import run_shell

import train
import transformer_jax
from transformer_jax.config import NormPlace, Positions
from transformer_jax.config_check import check
from transformer_jax.data.phrasebook import phrases
from transformer_jax.interop import huggingface_export
from transformer_jax.interop.model import load_model
from transformer_jax.parameters import nested, shapes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning"),  # how ml_collections reads a config
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),  # of other packages, where a page imports them
]
ALL = "TRANSFORMER_JAX_DOCS"
ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CHECKOUT = ("train.py", "decode.py", "configs", "examples", "transformer_jax", "README.md")

NOT_RUN = {
    "python3 -m pip install ": "installs what is there",
    "python3 -m pytest": "is what runs this",
    "python3 benchmarks/soak.py ": "takes as long as it is told to",
    "python3 -m mkdocs ": "is run by .ci/run, in an environment that has MkDocs",
    "python3 -m transformer_jax.inspect --model runs/phrases --text 35 weeks ago --out docs/figures --lessons": (
        "draws for a minute; test_inspect_command.py"
    ),
    "hf download ": "a download; what it would bring lies there",
}
PROGRAMS = ("hf",)
LANGUAGES = {"sh", "python", "json", "text"}  # text is what can't be run: output, file formats, sketches
SLOW = {"docs/decoding.md", "docs/explorer.md"}  # a program to compile for nearly every command
NEEDS = {"docs/explorer.md": "matplotlib", "docs/howto/models.md": "ctranslate2", "docs/workers.md": "flatbuffers"}

SMALL = {
    "config.data.max_length": "48",
    "config.data.plan.row_length": "48",
    "config.data.plan.tokens": "512",
    "config.data.plan.shapes": "1",
    "config.data.tokenizer.vocab": "120",
    "config.data.tokenizer.sample": "400",
    "config.dev_search.extra_length": "2",
    "config.model.decoder_layers": "1",
    "config.model.encoder_layers": "1",
    "config.model.feed_forward": "16",
    "config.model.heads": "2",
    "config.model.positions": "sinusoidal",
    "config.model.width": "16",
    "config.run.average": "1",
    "config.run.checkpoint_every": "1",
    "config.run.eval_every": "2",
    "config.run.steps": "2",
    "config.search.extra_length": "3",
}
SMALL_PHRASES = {"config.data.train": "phrasebook:400", "config.data.dev": "phrasebook:4", "config.data.test": "()"}


class Block(NamedTuple):
    line: int  # of the page
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page."""
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in found]


def small_training(given: list[str]) -> int:
    """`train.py` with the flags that were typed and `SMALL`.

    The pages' other trainings than that of the phrases are made only if `ALL` is in the environment. Else their flags
    are read and checked, and the run directory is a copy of that of the phrases.
    """
    phrases_only = not any(flag.startswith("--config=") for flag in given)
    flags = ["train.py", *given, *(f"--{name}={value}" for name, value in SMALL.items())]
    if phrases_only:
        return train.main([*flags, *(f"--{name}={value}" for name, value in SMALL_PHRASES.items())])
    if ALL in os.environ:
        return train.main(flags)
    values = train.parse(flags)
    check(values.config)
    if not pathlib.Path(values.workdir).exists():
        shutil.copytree("runs/phrases", values.workdir)
    return 0


def run_block(block: Block, directory: pathlib.Path) -> list[str]:
    """Runs a shell block; the commands in it that were not run."""
    skipped = lambda command: command.startswith(tuple(NOT_RUN))  # noqa: E731
    done = run_shell(block.code, directory, programs=PROGRAMS, skipped=skipped, train=small_training)
    if done.failure is not None:
        raise AssertionError(f"line {block.line}: {done.failure!r}\n{done.output}") from done.failure
    assert done.status == 0, f"line {block.line}: exit status {done.status}\n{done.output}"
    return done.skipped


@pytest.fixture(autouse=True)
def strict_promotion():
    """Commands run as they do for a user: optax's Adam does not pass strict promotion."""


@pytest.fixture(scope="module", autouse=True)
def no_cache_in_the_home_directory():
    with pytest.MonkeyPatch.context() as patch:
        for module in ("train", "decode", "transformer_jax.inspect.__main__"):
            patch.setattr(f"{module}.keep_compiled_programs", lambda: None)
        yield


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A directory with what a reader of any page has: the README's first command has trained `runs/phrases`."""
    directory = tmp_path_factory.mktemp("reader")
    for name in CHECKOUT:
        (directory / name).symlink_to(ROOT / name)
    for split, size in (("train", 400), ("dev", 4), ("test", 4)):
        for side, languages in enumerate((("en",), ("de", "fr"))):  # what the pages call French is German too
            lines = "".join(f"{pair[side]}\n" for pair in phrases(split=split, size=size))
            for language in languages:
                (directory / f"{split}.{language}").write_text(lines)
    shutil.copy(directory / "test.en", directory / "news.en")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        run_block(blocks(PAGES[0].read_text())[0], directory)
    shutil.copytree(directory / "runs/phrases", directory / "runs/multi30k")
    for name in ("opus-mt-en-de", "opus-mt-de-en"):
        write_marian(directory / name, like=directory / "runs/phrases")
    return directory


def write_marian(directory: pathlib.Path, *, like: pathlib.Path) -> None:
    """A directory as OPUS-MT has them: a small model of random parameters, with the tokenizer of a run."""
    model = load_model(like)
    config = dataclasses.replace(
        model.config.model, norm_place=NormPlace.POST, positions=Positions.SINUSOIDAL, attention_bias=True
    )
    rng = np.random.default_rng(0)
    params = nested({path: rng.normal(0, 0.1, shape).astype(np.float32) for path, shape in shapes(config).items()})
    whole = dataclasses.replace(model.config, model=config)
    huggingface_export.write(model._replace(config=whole, params=params), directory)


PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_blocks_of_a_page_run(page, reader, tmp_path, monkeypatch):
    name = str(page.relative_to(ROOT))
    if name in SLOW and ALL not in os.environ:
        pytest.skip(f"compiles for half a minute: set {ALL}=1 to run it")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"the page needs {NEEDS[name]}, which is not installed")
    directory = tmp_path / "reader"
    shutil.copytree(reader, directory, symlinks=True)
    monkeypatch.chdir(directory)
    names, not_run = {}, []
    for block in blocks(page.read_text()):
        if block.language == "sh":
            not_run += run_block(block, directory)
        if block.language == "python" and page.name != "README.md":  # test_readme.py runs those
            exec(compile("\n" * block.line + block.code, page.name, "exec"), names)
        if block.language == "json":
            json.loads(block.code)
    for command in not_run:
        print("not run:", command, *(f"({why})" for prefix, why in NOT_RUN.items() if command.startswith(prefix)))


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_a_block_says_what_it_is(page):
    text = page.read_text()
    found = blocks(text)
    assert {block.language for block in found} <= LANGUAGES
    assert 2 * len(found) == len(re.findall(r"^ *```", text, flags=re.MULTILINE)), "a fence that is not at the margin"


@pytest.mark.parametrize("page", PAGES, ids=PAGE_NAMES)
def test_links_lead_to_files_and_to_what_is_defined_in_them(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name, path in re.findall(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)[^)]*\)", text):
        file = (page.parent / path).resolve()
        assert file.exists(), path
        if file.suffix == ".py" and re.fullmatch(r"`\w+`", name) and name.strip("`") != file.stem:
            assert name.strip("`") in defined(file.read_text()), f"{path} has no {name}"


def defined(code: str) -> set[str]:
    """The functions, classes, methods and module-level names of a file."""
    nodes = [*ast.walk(tree := ast.parse(code))]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    return names | {target.id for target in assigned if isinstance(target, ast.Name)}


def test_the_reference_has_every_module():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    files = [file.relative_to(ROOT).with_suffix("") for file in (ROOT / "transformer_jax").rglob("*.py")]
    modules = {".".join(file.parts) for file in files if not file.name.startswith("__")}
    assert set(re.findall(r"^::: (transformer_jax\.[\w.]+)$", pages, flags=re.MULTILINE)) == modules


def test_the_reference_lists_what_the_package_exports():
    text = (ROOT / "docs/reference/index.md").read_text()
    _, _, exported = text.partition("from `transformer_jax` itself:")
    assert set(re.findall(r"\[`(\w+)`\]", exported)) == set(transformer_jax.__all__)
