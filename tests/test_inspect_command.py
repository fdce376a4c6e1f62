"""`python3 -m transformer_jax.inspect`, and the small runs that it can draw."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

pytest.importorskip("matplotlib", reason="pictures need the extra `inspect`")

from transformer_jax.batch import unpacked
from transformer_jax.config import Config, SearchConfig, TokenizerConfig, TransformerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.inspect import __main__ as command
from transformer_jax.inspect.toy import (
    PAIRS,
    WORDS,
    compare_searches,
    learned,
    toy_distributions_figure,
    toy_losses_figure,
    train_toy,
    word_columns,
)
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import CHECKPOINTS, METRICS, save_config, tokenizer_path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory of a tiny model with random parameters."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    pairs = [Pair("the cat sees a dog", "a dog sees the cat"), Pair("a cat and a dog", "the dog and the cat")]
    tokenizer = train_tokenizer(pairs * 20, TokenizerConfig(vocab=16))
    model = TransformerConfig(encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16)
    save_config(workdir, Config(model=model, search=SearchConfig(beam_size=2, extra_length=2)))
    tokenizer.save(tokenizer_path(workdir))
    model.source_vocab = model.target_vocab = tokenizer.source_vocab
    ids = jnp.ones((1, 4), jnp.int32)
    params = jax.device_get(jax.jit(Transformer(model).init)(jax.random.key(0), unpacked(ids, ids)))
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(workdir.resolve() / CHECKPOINTS / "1" / "params", params)
    (workdir / METRICS).write_text('{"step": 1, "split": "train", "loss": 2.0}\n')
    return workdir


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    monkeypatch.setattr(command, "keep_compiled_programs", lambda: None)


def fails(capsys, *flags):
    """The message with which the command refuses the flags."""
    assert command.main(list(flags)) == 2
    message = capsys.readouterr().err
    assert message.startswith("transformer_jax.inspect: ")
    assert "Traceback" not in message
    return message


@pytest.mark.slow
def test_a_page_with_every_picture_of_a_sentence(run, tmp_path, capsys):
    target = "the dog <and> the cat"
    flags = ["--model", str(run), "--text", "a cat sees a dog", "--target", target, "--token", "sees", "--head", "1"]
    assert command.main([*flags, "--out", str(tmp_path / "out")]) == 0
    index = tmp_path / "out" / "index.html"
    assert capsys.readouterr().out == f"{index}\n"
    page = index.read_text(encoding="utf-8")
    names = {path.stem for path in (tmp_path / "out").glob("*.svg")}
    expected = "influence focus steps scaling encoder-0 positions positions-of-the-model stream mask decoder-0 cross-0"
    assert names == {*expected.split(), "alignment", "probabilities", "search", "schedule", "training"}
    for name in names:
        assert f'src="{name}.svg"' in page
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 1000
    assert "What does “sees” attend to?" in page
    assert "<and>" not in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", " "], "--text is empty"),
        (["--text", "dog " * 70], "a picture has room for 64"),
        (["--text", "a dog", "--token", "cat"], "--token 'cat' is not in the text. Its tokens are: ▁a ▁dog <eos>"),
        (["--text", "a dog", "--head", "2"], "--head is 2; the model has heads 0 to 1"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(run, tmp_path, capsys, flags, message):
    target = ["--target", "the dog"]
    assert message in fails(capsys, "--model", str(run), "--out", str(tmp_path), *target, *flags)


def test_without_a_run_the_message_says_how_to_make_one(tmp_path, capsys):
    assert "no run here" in fails(capsys, "--model", str(tmp_path), "--text", "a", "--out", str(tmp_path))


def test_without_matplotlib_the_message_says_how_to_install_it(run, tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "transformer_jax.inspect.page", raising=False)
    monkeypatch.setitem(sys.modules, "transformer_jax.inspect.style", None)
    message = fails(capsys, "--model", str(run), "--text", "a", "--out", str(tmp_path))
    assert "python3 -m pip install -e '.[inspect]'" in message


@pytest.fixture(scope="module")
def toy():
    return train_toy()


def test_the_toy_run_learns_its_two_sentences(toy):
    assert toy.divergence[0] > 1.5
    assert toy.divergence[-1] < 0.01
    assert [compare_searches(toy.trained, source).greedy.text for source, _ in PAIRS] == [target for _, target in PAIRS]
    probabilities = learned(toy.trained, *PAIRS[1])[:, word_columns(toy.trained.tokenizer)]
    best = [WORDS[column] for column in probabilities.argmax(axis=1)]
    assert best == ["i", "am", "a", "student", "<eos>"]
    assert probabilities.max(axis=1).min() > 0.98


def test_one_hot_targets_have_no_entropy_and_smoothed_ones_theirs(toy):
    np.testing.assert_array_equal(toy.cross_entropy, toy.divergence)
    with jax.numpy_dtype_promotion("standard"):  # as optax wants it
        smoothed = train_toy(steps=2, label_smoothing=0.1)
    vocab = smoothed.trained.tokenizer.target_vocab
    entropy = -0.9 * np.log(0.9) - 0.1 * np.log(0.1 / (vocab - 1))
    np.testing.assert_allclose(smoothed.cross_entropy - smoothed.divergence, entropy, rtol=1e-5)
    lines = toy_losses_figure(toy, smoothed).axes[0].lines
    np.testing.assert_array_equal(lines[1].get_ydata(), toy.divergence)


def test_a_beam_of_two_returns_both_translations_and_their_scores(toy):
    for source, target in PAIRS:
        greedy, beam = compare_searches(toy.trained, source)
        assert beam[0].text == greedy.text == target
        assert len({one.tokens for one in beam}) == 2
        assert beam[0].score > beam[1].score + 1
        assert greedy.log_prob == pytest.approx(beam[0].log_prob, abs=1e-4)


def test_the_distributions_are_drawn_in_the_order_of_the_words(toy):
    figure = toy_distributions_figure(toy)
    matrices = [np.asarray(axes.images[0].get_array()) for axes in figure.axes[:3]]
    assert matrices[0].argmax(axis=1).tolist() == [2, 1, 0, 4, 5]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == list(WORDS)
    assert np.abs(matrices[2] - matrices[0]).max() < 0.02 < np.abs(matrices[1] - matrices[0]).max()
