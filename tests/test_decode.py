"""`decode.py` on a run directory of a tiny model of random parameters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import decode
from transformer_jax.batch import EOS, UNK, unpacked
from transformer_jax.config import Config, RunConfig, SearchConfig, TokenizerConfig, TransformerConfig, Tying
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.output import Format, formatted, whole_file, write_lines
from transformer_jax.decoding.translator import BLANK, Translation
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import CHECKPOINTS, save_config, tokenizer_path

ROOT = Path(__file__).parent.parent
AWKWARD = (
    b"a cat\n\n \t\ncat\xe2\x80\xa8dog\x0cdog\xc2\x85cat\r\na\tdog\nthe dog sees"  # one line too many to count wrong
)
LINES = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory with checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    pairs = [Pair("the cat sees a dog", "a dog sees the cat"), Pair("a cat and a dog", "the dog and the cat")]
    tokenizer = train_tokenizer(pairs * 20, TokenizerConfig(vocab=16))
    model = TransformerConfig(encoder_layers=1, decoder_layers=1, width=16, heads=2, feed_forward=16, tying=Tying.NONE)
    model.source_vocab = model.target_vocab = tokenizer.source_vocab
    ids, silent = jnp.ones((1, 4), jnp.int32), [EOS, UNK, tokenizer.target.piece_to_id("▁")]
    for step in (1, 2):
        params = jax.device_get(jax.jit(Transformer(model).init)(jax.random.key(step), unpacked(ids, ids)))
        table = params["params"]["projection"]["table"]
        params["params"]["projection"]["table"] = np.where(
            np.isin(np.arange(len(table)), silent)[:, None], 0, 5 * table
        )
        with ocp.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(workdir.resolve() / CHECKPOINTS / str(step) / "params", params)
    model.source_vocab = model.target_vocab = None
    save_config(
        workdir,
        Config(model=model, search=SearchConfig(beam_size=2, extra_length=4), run=RunConfig(checkpoint_every=1)),
    )
    tokenizer.save(tokenizer_path(workdir))
    return workdir


@pytest.fixture
def translate(run, tmp_path, monkeypatch):
    """Runs `decode.main` on bytes; the bytes of the output file."""
    monkeypatch.setattr(decode, "keep_compiled_programs", lambda: None)

    def translated(text, *flags):
        (tmp_path / "in").write_bytes(text)
        files = ["--model", str(run), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
        assert decode.main([*files, *flags]) == 0
        return (tmp_path / "out").read_bytes()

    return translated


def fails(capsys, *flags):
    """The message with which `decode.main` refuses the flags."""
    assert decode.main(list(flags)) == 2
    message = capsys.readouterr().err
    assert message.startswith("decode.py: ")
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("last_line_feed", [b"", b"\n"])
def test_a_line_of_output_for_each_line_of_input(translate, last_line_feed):
    output = translate(AWKWARD + last_line_feed)
    assert output.endswith(b"\n")
    lines = output.decode().split("\n")[:-1]
    assert len(lines) == LINES
    assert [bool(line.strip()) for line in lines] == [True, False, False, True, True, True]


def test_an_empty_input_gives_an_empty_output(translate):
    assert translate(b"") == b""


def test_n_best_lists_as_text_tsv_and_json_agree(translate):
    flags = ("--nbest", "2")
    text = translate(b"a cat\n\nthe dog\n", *flags).decode().splitlines()
    tsv = translate(b"a cat\n\nthe dog\n", *flags, "--format", "tsv").decode().splitlines()
    objects = [json.loads(line) for line in translate(b"a cat\n\nthe dog\n", *flags, "--format", "json").splitlines()]
    assert [one["source"] for one in objects] == ["a cat", "", "the dog"]
    assert [len(one["translations"]) for one in objects] == [2, 1, 2]
    rows = [
        (str(one["line"]), str(rank), f"{t['score']:.6f}", f"{t['log_prob']:.6f}", t["finished"], t["text"])
        for one in objects
        for rank, t in enumerate(one["translations"], start=1)
    ]
    assert [row.split("\t", 5) for row in tsv] == [
        [line, rank, score, log_prob, "finished" if finished else "unfinished", translation]
        for line, rank, score, log_prob, finished, translation in rows
    ]
    assert text == [f"{line} ||| {translation} ||| {score}" for line, _, score, _, _, translation in rows]


def test_a_line_that_has_no_translation_keeps_its_place_in_text():
    n_bests = [[Translation("x", 0.0, 0.0, (5, 1), True)], [], [BLANK]]
    assert list(formatted(["a", "b", "c"], n_bests, format=Format.TEXT)) == ["x", "", ""]


def test_references_are_scored_with_signatures(translate, tmp_path, capsys):
    output = translate(b"a cat sees\nthe dog sees the cat\n")
    (tmp_path / "reference").write_bytes(output)
    translate(b"a cat sees\nthe dog sees the cat\n", "--reference", str(tmp_path / "reference"))
    message = capsys.readouterr().err
    assert "BLEU " in message
    assert "tok:13a" in message
    assert "chrF 100.00" in message


def test_references_of_another_line_count_are_an_error_that_names_both(run, tmp_path, capsys):
    (tmp_path / "in").write_text("a\nb\n")
    (tmp_path / "reference").write_text("a\n")
    files = ("--input", str(tmp_path / "in"), "--reference", str(tmp_path / "reference"))
    message = fails(capsys, "--model", str(run), *files)
    assert f"{tmp_path / 'in'} has 2 lines" in message
    assert f"{tmp_path / 'reference'} has 1" in message


def test_a_checkpoint_can_be_chosen(translate):
    flags = ("--format", "json", "--checkpoint")
    one, two, last, both = (translate(b"a cat\n", *flags, which) for which in ("1", "2", "last", "average:2"))
    assert two == last
    assert len({one, two, both}) == 3


def test_what_is_not_there_is_said_without_a_traceback(run, tmp_path, capsys):
    assert "nowhere" in fails(capsys, "--model", str(tmp_path / "nowhere"))
    (tmp_path / "in").write_text("a cat\n")
    options = ("--model", str(run), "--input", str(tmp_path / "in"))
    assert "step 7" in fails(capsys, *options, "--checkpoint", "7")
    assert "beam_size is 2" in fails(capsys, *options, "--nbest", "3")
    assert "nothing.en" in fails(capsys, "--model", str(run), "--input", str(tmp_path / "nothing.en"))
    assert "no/such" in fails(capsys, *options, "--output", str(tmp_path / "no" / "such"))


def test_input_that_is_not_utf8_names_its_line(run, tmp_path, capsys):
    (tmp_path / "in").write_bytes(b"a cat\nd\xffg\n")
    assert "in line 2" in fails(capsys, "--model", str(run), "--input", str(tmp_path / "in"))


def test_an_output_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "out"
    path.write_text("what was there")
    lines = (line if line != "bad" else 1 / 0 for line in ["half", "bad"])
    with pytest.raises(ZeroDivisionError), whole_file(str(path)) as stream:
        write_lines(stream, lines)
    assert path.read_text() == "what was there"
    assert list(tmp_path.iterdir()) == [path]
    with whole_file(str(path)) as stream:
        write_lines(stream, ["größer"])
    assert path.read_bytes() == "größer\n".encode()


def test_links_and_devices_are_written_to_as_they_are(tmp_path):
    file, to_file, to_device = tmp_path / "file", tmp_path / "to_file", tmp_path / "to_device"
    to_file.symlink_to(file)
    to_device.symlink_to(os.devnull)
    for link in (to_file, to_device):
        with whole_file(str(link)) as stream:
            write_lines(stream, ["a cat"])
        assert link.is_symlink()
    assert file.read_text() == "a cat\n"
    assert to_device.is_char_device()


def test_a_pipe_is_written_to_under_the_name_that_a_shell_gives_it():
    reader, writer = os.pipe()
    with whole_file(f"/dev/fd/{writer}") as stream:
        write_lines(stream, ["a cat"])
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"a cat\n"


def test_a_directory_for_the_output_is_refused_before_anything_is_translated(tmp_path):
    with pytest.raises(UserError, match="can't be written"), whole_file(str(tmp_path)):
        pytest.fail("it was opened")


def test_standard_input_to_standard_output(run, tmp_path, monkeypatch):
    monkeypatch.setattr(decode, "keep_compiled_programs", lambda: None)
    (tmp_path / "in").write_bytes(b"a cat\n\n")
    with (tmp_path / "in").open() as stdin, (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert decode.main(["--model", str(run)]) == 0
    assert (tmp_path / "out").read_bytes().count(b"\n") == 2


def test_a_reader_that_leaves_early_is_no_error(run):
    """The other end of the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "decode.py", "--model", str(run)]
    process = subprocess.run(command, cwd=ROOT, input=b"\n" * 3, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert process.returncode == 0
    assert process.stderr == b""
