"""`decode.py` on a run directory of a tiny model of random parameters."""

import io
import json
import os
import signal
import subprocess
import sys
import time
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
from transformer_jax.data.tokenizer import Tokenizer, train_tokenizer
from transformer_jax.decoding.output import Format, best_texts, formatted
from transformer_jax.decoding.translator import BLANK, Translation, Translator
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
        (tmp_path / "out").unlink(missing_ok=True)
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
    assert list(formatted([{"source": line} for line in "abc"], n_bests, format=Format.TEXT)) == ["x", "", ""]


@pytest.mark.parametrize(("format", "n"), [("text", 1), ("text", 2), ("tsv", 2), ("json", 2)])
def test_the_best_translations_can_be_read_from_any_output(format, n):
    texts = ["x", "", "a ||| b ||| 0.1", "", "tab\there", ""]
    n_bests = [
        [Translation(text, 0.0, 0.0, (5, 1), True), Translation("-", -1.0, -1.0, (5, 1), True)] for text in texts
    ]
    n_bests[1] = n_bests[-1] = []
    lines = list(formatted([{"source": "a"}] * len(texts), n_bests, format=Format(format), n=n))
    assert best_texts(lines, format=Format(format), n=n, count=len(texts)) == texts


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


WORDS = ["a", "the", "cat", "dog", "sees"]
SENTENCES = [" ".join(np.random.default_rng(length).choice(WORDS, 1 + length % 9)) for length in range(60)]
TEXT = "\n".join([*SENTENCES[:40], "", " ", *SENTENCES[40:]]).encode() + b"\n"


def translations(output):
    return [json.loads(line)["translations"] for line in output.splitlines()]


def assert_same(found, expected):
    """The same n-best lists, with scores that differ no more than another order of adding makes them."""
    assert [[one["tokens"] for one in n_best] for n_best in found] == [
        [one["tokens"] for one in n_best] for n_best in expected
    ]
    for field in ("score", "log_prob"):
        values = ([one[field] for n_best in side for one in n_best] for side in (found, expected))
        np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.slow
def test_translations_do_not_depend_on_the_size_of_chunks(translate):
    flags = ("--format", "json", "--nbest", "2")
    whole = translations(translate(TEXT, *flags))
    for chunk in (7, 61):
        assert_same(translations(translate(TEXT, *flags, "--chunk", str(chunk))), whole)


@pytest.mark.slow
def test_lines_are_numbered_through_all_chunks(translate, caplog):
    text = b"a cat\n" * 4 + b"the dog " * 300 + b"\na cat\n"
    with caplog.at_level("WARNING"):
        objects = [json.loads(line) for line in translate(text, "--format", "json", "--chunk", "3").splitlines()]
    assert [one["line"] for one in objects] == [1, 2, 3, 4, 5, 6]
    assert "/in line 5 has" in caplog.text


def test_an_overlong_line_stays_one_line_and_changes_no_other(translate, caplog):
    alone = translate(b"a cat\n")
    with caplog.at_level("WARNING"):
        found = translate(b"a cat\n" + b"the dog " * 300 + b"\na cat\n").split(b"\n")
    assert [found[0], found[2], found[3]] == [alone.strip(b"\n"), alone.strip(b"\n"), b""]
    assert found[1]
    assert "line 2 has" in caplog.text
    assert "parts" in caplog.text


def test_a_line_has_the_same_output_and_limit_beside_a_long_neighbour(run, translate):
    flags = ("--format", "json", "--nbest", "2")
    (alone,) = translations(translate(b"a cat\n", *flags))
    beside, _ = translations(translate(b"a cat\n" + b"the dog " * 100 + b"\n", *flags))
    assert_same([beside], [alone])
    (source,) = Tokenizer.load(tokenizer_path(run)).encode_source(["a cat"])
    assert all(len(one["tokens"]) <= len(source) + 4 for one in alone)


def test_n_best_lists_hold_distinct_finished_ones_first_and_no_filler(translate):
    for n_best in translations(translate(TEXT, "--format", "json", "--nbest", "4", "--beam_size", "4")):
        assert len({tuple(one["tokens"]) for one in n_best}) == len(n_best)
        assert [one["finished"] for one in n_best] == sorted((one["finished"] for one in n_best), reverse=True)
        for one in n_best if n_best[0]["tokens"] else ():
            assert one["tokens"].count(EOS) == one["finished"]
            assert 0 not in one["tokens"]
            assert one["log_prob"] > -1000


def test_json_lines_are_answered_with_what_they_have_and_blank_ones_keep_their_place(translate):
    requests = [
        {"source": "a cat", "id": 7, "n_best": 2},
        {"source": "the dog sees", "prefix": "the cat", "x": {"y": [1, None]}},
        {"source": " "},
        {"id": "ü", "source": "a cat", "n_best": 1},
    ]
    lines = [json.dumps(request).encode() for request in requests]
    flags = ("--input_format", "json", "--format", "json")
    objects = [json.loads(line) for line in translate(b"\n".join([*lines, b"", lines[0]]), *flags).splitlines()]
    given = [*requests, {"source": ""}, requests[0]]
    found = [{name: value for name, value in one.items() if name not in ("line", "translations")} for one in objects]
    assert found == given
    assert [one["line"] for one in objects] == [1, 2, 3, 4, 5, 6]
    assert [len(one["translations"]) for one in objects] == [2, 1, 1, 1, 1, 2]
    assert objects[1]["translations"][0]["text"].startswith("the cat")
    assert [objects[index]["translations"][0]["tokens"] for index in (2, 4)] == [[], []]
    text = translate(b"\n".join([*lines, b"", lines[0]]), "--input_format", "json").decode().split("\n")
    assert text == [*(one["translations"][0]["text"] for one in objects), ""]


def test_a_bad_json_line_is_named_before_anything_is_translated(run, tmp_path, capsys):
    (tmp_path / "in").write_text('{"source": "a cat"}\n{"source": "a cat", "n_best": "two"}\n')
    files = ("--model", str(run), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"))
    message = fails(capsys, *files, "--input_format", "json", "--chunk", "1")
    assert f"{tmp_path / 'in'} line 2: the field 'n_best' is 'two'" in message
    (tmp_path / "in").write_text('{"source": "a cat", "n_best": 3}\n')
    message = fails(capsys, *files, "--input_format", "json")
    assert "line 1: the field 'n_best' is 3, but --beam_size is 2" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_file_of_prefixes_is_that_of_prefixes_in_json(translate, tmp_path):
    prefixes = ["the cat", "", "a"]
    requests = [{"source": "a cat"} | ({"prefix": prefix} if prefix else {}) for prefix in prefixes]
    lines = "".join(json.dumps(request) + "\n" for request in requests).encode()
    by_json = translate(lines, "--input_format", "json", "--format", "json", "--nbest", "2")
    (tmp_path / "prefixes").write_text("\n".join(prefixes))
    found = translate(b"a cat\n" * 3, "--format", "json", "--nbest", "2", "--prefix", str(tmp_path / "prefixes"))
    assert found == by_json
    for prefix, n_best in zip(prefixes, translations(found), strict=True):
        assert all(one["text"].startswith(prefix) for one in n_best)
        assert len({one["text"] for one in n_best}) == len(n_best)


def test_given_translations_get_the_scores_with_which_they_were_found(translate, tmp_path):
    """Where the text is cut into the same tokens again. A negative α favours short ones, which mostly are."""
    text = "\n".join([*SENTENCES[:12], "", *SENTENCES[12:14]]).encode()
    search = ("--alpha", "-3")
    objects = [
        json.loads(line)
        for line in translate(text, "--format", "json", "--nbest", "6", "--beam_size", "6", *search).splitlines()
    ]
    pairs = [(one["source"], found) for one in objects for found in one["translations"]]
    (tmp_path / "given").write_text("".join(found["text"] + "\n" for _, found in pairs))
    sources = "".join(source + "\n" for source, _ in pairs).encode()
    flags = ("--score", str(tmp_path / "given"), "--chunk", "50", *search)
    scored = [json.loads(line) for line in translate(sources, *flags, "--format", "json").splitlines()]
    same = 0
    for line, ((source, found), one) in enumerate(zip(pairs, scored, strict=True), start=1):
        assert (one["line"], one["source"], one["target"]) == (line, source, found["text"])
        assert one["log_prob"] == pytest.approx(sum(one["token_log_probs"]), abs=1e-4)
        assert len(one["pieces"]) == len(one["tokens"]) == len(one["token_log_probs"])
        if one["tokens"] == found["tokens"]:
            same += 1
            assert one["score"] == pytest.approx(found["score"], abs=1e-4)
            assert one["log_prob"] == pytest.approx(found["log_prob"], abs=1e-4)
    assert same > 10
    assert [one["tokens"] for one in scored if not one["source"]] == [[]]
    text = [line.split() for line in translate(sources, *flags).decode().splitlines()]
    assert text == [[f"{value:.6f}" for value in (one["log_prob"], *one["token_log_probs"])] for one in scored]
    rows = [line.split("\t") for line in translate(sources, *flags, "--format", "tsv").decode().splitlines()]
    for row, one in zip(rows, scored, strict=True):
        assert row[:3] == [str(one["line"]), f"{one['score']:.6f}", f"{one['log_prob']:.6f}"]
        assert row[3::2] == one["pieces"]
        assert row[4::2] == [f"{value:.6f}" for value in one["token_log_probs"]]


def test_the_score_of_each_token_is_the_models(run, translate, tmp_path):
    """Against the logits of a forward pass of the one pair."""
    (tmp_path / "given").write_text("the dog sees\n")
    (line,) = translate(b"a cat\n", "--score", str(tmp_path / "given"), "--format", "json").splitlines()
    translator, one = Translator.load(str(run)), json.loads(line)
    tokenizer = translator.tokenizer
    (source,), (target,) = tokenizer.encode_source(["a cat"]), tokenizer.encode_target(["the dog sees"])
    batch = unpacked(jnp.array([source], jnp.int32), jnp.array([target], jnp.int32))
    log_probs = jax.nn.log_softmax(jax.jit(translator.model.apply)(translator.params, batch)[0])
    assert one["tokens"] == target
    assert one["pieces"] == [tokenizer.target.id_to_piece(token) for token in target]
    expected = [float(log_probs[place, token]) for place, token in enumerate(target)]
    np.testing.assert_allclose(one["token_log_probs"], expected, atol=1e-5)


def test_alignments_are_those_of_the_attention_and_of_any_chunks(translate, tmp_path):
    text = b"a cat sees the dog\n\nthe dog\n" + b"the dog " * 300 + b"\na cat\n"
    written = []
    for chunk in ("1", "5"):
        links, arrays = tmp_path / f"links {chunk}", tmp_path / f"arrays {chunk}.npz"
        flags = ("--alignment", str(links), "--attention", str(arrays), "--alignment_unit", "tokens", "--chunk", chunk)
        objects = [json.loads(line) for line in translate(text, *flags, "--format", "json").splitlines()]
        with np.load(arrays) as found:
            written.append((links.read_text(), {name: found[name] for name in found}))
    assert written[0][0] == written[1][0]
    lines = written[0][0].split("\n")[:-1]
    assert list(written[0][1]) == ["1", "2", "3", "4", "5"]
    for name, array in written[0][1].items():
        np.testing.assert_allclose(array, written[1][1][name], atol=1e-5)
    assert [bool(line) for line in lines] == [True, False, True, False, True]  # blank; in parts
    for one, line, array in zip(objects, lines, written[0][1].values(), strict=True):
        if line:
            inner = [token for token in one["translations"][0]["tokens"] if token != EOS]
            assert array.shape[0] == len(one["translations"][0]["tokens"])
            expected = array[: len(inner), :-1].argmax(axis=1)
            assert line.split() == [f"{source}-{target}" for target, source in enumerate(expected)]


def test_given_translations_are_aligned_in_words(run, translate, tmp_path):
    (tmp_path / "given").write_text("the dog sees\n\n a  cat\n")
    files = ("--alignment", str(tmp_path / "links"), "--attention", str(tmp_path / "arrays.npz"))
    text = "a cat sees the dog\n\nthe dog"
    translate(
        text.encode(), "--score", str(tmp_path / "given"), "--attention_layer", "0", "--attention_head", "1", *files
    )
    tokenizer = Tokenizer.load(tokenizer_path(run))
    links = (tmp_path / "links").read_text().split("\n")
    assert [[link.split("-")[1] for link in line.split()] for line in links] == [["0", "1", "2"], [], ["0", "1"], []]
    assert all(
        int(link.split("-")[0]) < len(text.split("\n")[line].split()) for line in (0, 2) for link in links[line].split()
    )
    with np.load(tmp_path / "arrays.npz") as arrays:
        shapes = [array.shape for array in arrays.values()]
    lengths = (
        map(len, encode(text))
        for encode, text in (
            (tokenizer.encode_target, ["the dog sees", "a cat"]),
            (tokenizer.encode_source, ["a cat sees the dog", "the dog"]),
        )
    )
    (one, other) = zip(*lengths, strict=True)
    assert shapes == [one, (0, 0), other]


def test_options_that_do_not_go_together_are_refused(run, tmp_path, capsys):
    (tmp_path / "in").write_text("a cat\n")
    one = ("--model", str(run), "--input", str(tmp_path / "in"))
    for flags, message in (
        (("--stream",), "--stream answers standard input"),
        (("--score", "x", "--reference", "y"), "--score and --reference"),
        (("--score", "x", "--prefix", "y"), "--score and --prefix"),
        (("--prefix", "y", "--input_format", "json"), "--prefix goes with --input_format text"),
        (("--chunk", "0"), "--chunk is 0"),
        (("--attention_head", "2"), "--attention_head is 2, but the decoder has 2"),
        (("--attention", "-"), "Give the name of a file"),
    ):
        assert message in fails(capsys, *one, *flags)


def test_an_output_that_is_there_is_written_over_only_if_told(run, tmp_path, capsys):
    (tmp_path / "in").write_text("a cat\n")
    (tmp_path / "out").write_text("what was there")
    files = ("--model", str(run), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"))
    assert f"{tmp_path / 'out'} is there" in fails(capsys, *files)
    assert (tmp_path / "out").read_text() == "what was there"
    assert decode.main([*files, "--overwrite"]) == 0
    assert (tmp_path / "out").read_text() != "what was there"


def interrupt(command, record, *, lines, number):
    """Starts the command and sends the signal when it has counted so many lines; its exit status and message."""
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        while process.poll() is None:
            if record.exists() and json.loads(record.read_text())["lines"] >= lines:
                process.send_signal(number)
                break
            time.sleep(0.002)
        _, message = process.communicate()
    return process.returncode, message.decode()


@pytest.mark.slow
def test_what_was_interrupted_again_and_again_is_continued_to_the_same_bytes(run, translate, tmp_path, capsys):
    """By Ctrl-C, SIGTERM and SIGKILL, each somewhere else; and never with other options."""
    text = b"a cat\n\ndog sees\nthe\n" * 120
    flags = ("--format", "json", "--nbest", "2", "--chunk", "2", "--alignment")
    expected = translate(text, *flags, str(tmp_path / "links"))
    links = (tmp_path / "links").read_bytes()
    place = tmp_path / "place"
    place.mkdir()
    files = ("--model", str(run), "--input", str(tmp_path / "in"), "--output", str(place / "out"))
    command, record = (*files, *flags, str(place / "links")), place / "out.partial.json"
    for lines, number, status in ((4, signal.SIGINT, 130), (30, signal.SIGTERM, 143), (70, signal.SIGKILL, -9)):
        found, message = interrupt([sys.executable, "decode.py", *command], record, lines=lines, number=number)
        assert found == status, message
        assert number == signal.SIGKILL or "The same command continues" in message
        assert "Traceback" not in message
        assert lines <= json.loads(record.read_text())["lines"] < text.count(b"\n")
        assert {path.name for path in place.iterdir()} == {"out.partial", "out.partial.json", "links.partial"}
    message = fails(capsys, *command, "--alpha", "1")
    assert f"{place / 'out.partial'} is a partial output" in message
    assert "--alpha: 0.6 → 1.0" in message
    assert decode.main(list(command)) == 0
    assert {path.name for path in place.iterdir()} == {"out", "links"}
    assert (place / "out").read_bytes() == expected
    assert (place / "links").read_bytes() == links


@pytest.mark.slow
def test_a_continued_output_is_scored_as_a_whole(run, translate, tmp_path, capsys, monkeypatch):
    reference = tmp_path / "reference"
    reference.write_bytes(TEXT)
    flags = ("--reference", str(reference), "--chunk", "20", "--format", "tsv", "--nbest", "2")
    translate(TEXT, *flags)
    expected = capsys.readouterr().err
    (tmp_path / "out").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(decode, "write_all", stopping_after(3))
        files = ("--model", str(run), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"))
        assert decode.main([*files, *flags]) == 130
    capsys.readouterr()
    assert decode.main([*files, *flags]) == 0
    assert capsys.readouterr().err.splitlines()[-2:] == expected.splitlines()[-2:]


def stopping_after(chunks):
    """`write_all` with a Ctrl-C after some chunks."""
    real = decode.write_all

    def stopping(work, entries, files, **options):
        count = files.count

        def counting(lines):
            count(lines)
            if files.lines >= chunks * options["chunk"]:
                raise KeyboardInterrupt

        files.count = counting
        real(work, entries, files, **options)

    return stopping


def test_a_second_run_compiles_nothing(run, tmp_path):
    program = (
        "import collections, sys, jax.monitoring, decode\n"
        "seen = collections.Counter()\n"
        "jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.rpartition('/')[2]]))\n"
        "jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: seen.update([event]))\n"
        "assert decode.main(sys.argv[1:]) == 0\n"
        "print(seen['cache_misses'], seen['cache_hits'])\n"
    )
    (tmp_path / "in").write_text("a cat\n")
    command = [sys.executable, "-c", program, "--model", str(run), "--input", str(tmp_path / "in")]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    counts = [subprocess.check_output(command, cwd=ROOT, env=environment).split()[-2:] for _ in range(2)]
    assert int(counts[0][0]) > 0
    assert counts[1] == [b"0", counts[0][0]]


def test_progress_is_shown_on_a_terminal(translate, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    translate(b"a cat\n\nthe dog\n", "--chunk", "2")
    assert "3/3" in terminal.getvalue()


def test_every_option_is_described():
    described = (ROOT / "docs" / "decoding.md").read_text()
    for option in vars(decode.parse([])):
        assert f"--{option.removeprefix('search_')}" in described


def test_a_stream_is_answered_line_by_line_and_in_batches(run):
    command = [sys.executable, "decode.py", "--model", str(run), "--stream"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answers(text, count):
            process.stdin.write(text)
            process.stdin.flush()
            return [process.stdout.readline() for _ in range(count)]  # this would hang if more were waited for

        (one,) = answers(b"a cat\n", 1)
        assert answers(b"\n", 1) == [b"\n"]
        assert answers(b"a cat\n" * 30 + b"a c", 30) == [one] * 30
        assert answers(b"at\n", 1) == [one]
        assert process.communicate(b"a cat")[0] == one
    assert process.returncode == 0
