"""A file shared by several processes: the output is that of one, whatever happens to them on the way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from test_lazy import WORDS, write_tiny_run

import decode
from transformer_jax.decoding import shards
from transformer_jax.decoding.partial import Output
from transformer_jax.decoding.shards import Shard, parse_shard, put_together
from transformer_jax.errors import UserError

ROOT = Path(__file__).parent.parent
RNG = np.random.default_rng(2)
SENTENCES = [" ".join(RNG.choice(WORDS, size=length)) for length in (3, 1, 4, 0, 2, 1, 3)]
LINES = [*SENTENCES[:4], "the dog " * 150, "", " \t", *SENTENCES[4:]]  # one longer than the model's limit
ATTENTION = ("--alignment", "links", "--attention", "arrays.npz")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current directory, with an input and prefixes for it."""
    monkeypatch.setattr(decode, "keep_compiled_programs", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("\n".join(LINES) + "\n")
    (tmp_path / "json").write_text("".join(json.dumps({"source": line, "id": line[:3]}) + "\n" for line in LINES))
    (tmp_path / "given").write_text("".join(f"{line}\n" for line in reversed(LINES)))
    return tmp_path


def translate(run, *flags):
    """`decode.main` with chunks of two lines; its exit status."""
    return decode.main(["--model", run, "--output", "out", "--chunk", "2", *flags])


def written(place):
    """What was made of the input: every file beside it."""
    return {path.name: path.read_bytes() for path in place.iterdir() if path.name not in ("in", "json", "given")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--input", "in"), id="text"),
        pytest.param(
            ("--input", "json", "--input_format", "json", "--format", "json", "--nbest", "2", *ATTENTION),
            id="json",
        ),
        pytest.param(
            ("--input", "in", "--format", "tsv", "--score", "given", "--alignment", "links"),
            id="score",
        ),
    ],
)
def test_shares_put_together_are_the_output_of_one_process(run, place, flags):
    """Byte for byte, in any order of the processes; the last one puts them together and nothing else is left."""
    assert translate(run, *flags) == 0
    whole = written(place)
    assert "out" in whole
    for path in whole:
        (place / path).unlink()
    for shard in ("2/3", "0/3", "1/3"):
        assert "out" not in written(place)
        assert translate(run, *flags, "--shard", shard) == 0
    found = written(place)
    if "arrays.npz" in whole:
        arrays = [dict(np.load(place / "arrays.npz")), np.load(_saved(place, whole.pop("arrays.npz")))]
        del found["arrays.npz"]
        assert [*arrays[0]] == [*arrays[1]] == [str(number) for number in range(1, len(LINES) + 1)]
        assert all((array == arrays[1][name]).all() for name, array in arrays[0].items())
    assert found == whole


def _saved(place, content):
    path = place.parent / "arrays of one.npz"
    path.write_bytes(content)
    return path


def test_every_line_has_one_share_and_shares_are_whole_chunks():
    for lines in (0, 1, 7, 8, 100):
        for chunk in (1, 3, 8, 1000):
            for total in (1, 2, 3, 40):
                shares = [one.share(lines, chunk=chunk) for one in Shard(0, total).all()]
                assert [line for share in shares for line in share] == list(range(lines))
                assert all(share.start % chunk == 0 for share in shares if share)
                sizes = [-(-len(share) // chunk) for share in shares]
                assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
def test_a_share_that_is_missing_is_named_and_nothing_is_put_together(run, place, caplog):
    with caplog.at_level("INFO"):
        assert translate(run, "--input", "in", "--shard", "1/3") == 0
    assert "The last one makes out; missing: 0/3, 2/3." in caplog.text
    assert set(written(place)) == {"out.1-of-3.partial", "out.1-of-3.partial.json"}


@pytest.mark.slow
def test_more_processes_than_chunks_are_no_fault(run, place):
    assert translate(run, "--input", "in", "--chunk", "100") == 0
    expected = (place / "out").read_bytes()
    (place / "out").unlink()
    for number in range(3):
        assert translate(run, "--input", "in", "--chunk", "100", "--shard", f"{number}/3") == 0
    assert written(place) == {"out": expected}


@pytest.mark.slow
def test_the_last_one_scores_the_whole_against_references(run, place, capsys):
    flags = ("--input", "in", "--reference", "given", "--format", "tsv", "--nbest", "2")
    assert translate(run, *flags) == 0
    expected = [line for line in capsys.readouterr().err.splitlines() if line.startswith(("BLEU", "chrF"))]
    assert len(expected) == 2
    (place / "out").unlink()
    assert translate(run, *flags, "--shard", "1/2") == 0
    assert "BLEU" not in capsys.readouterr().err
    assert translate(run, *flags, "--shard", "0/2") == 0
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith(("BLEU", "chrF"))] == expected


@pytest.mark.slow
def test_shares_of_something_else_are_refused_by_name(run, place, capsys):
    assert translate(run, "--input", "in", "--shard", "1/2") == 0
    before = written(place)
    assert translate(run, "--input", "in", "--shard", "0/2", "--alpha", "1") == 2
    message = capsys.readouterr().err
    assert "out.1-of-2.partial is a partial output" in message
    assert "--alpha: 0.6 → 1.0" in message
    (place / "in").write_text("\n".join([*LINES, "one more"]))
    for name in set(written(place)) - set(before):
        (place / name).unlink()
    assert translate(run, "--input", "in", "--shard", "0/2") == 2
    assert "the lines of --input: " in capsys.readouterr().err
    assert "out" not in written(place)


def test_what_can_not_be_shared_is_refused(run, place, capsys):
    for flags, message in (
        (("--shard", "0/2"), "--shard shares files"),
        (("--input", "in", "--shard", "0/2", "--alignment", "-"), "--shard shares files"),
        (("--input", "in", "--shard", "2/2"), "--shard is 2/2; expected auto, or I/N"),
        (("--input", "in", "--shard", "half"), "--shard is half; expected auto, or I/N"),
    ):
        assert translate(run, *flags) == 2
        assert message in capsys.readouterr().err
    assert written(place) == {}


def test_the_shard_is_what_starts_the_processes_says():
    assert parse_shard("3/4", {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}) == Shard(3, 4)
    assert parse_shard("auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "JAX_PROCESS_ID": "0"}) == Shard(1, 2)
    assert parse_shard("auto", {"JAX_PROCESS_ID": "4", "JAX_NUM_PROCESSES": "8"}) == Shard(4, 8)
    with pytest.raises(UserError, match=r"has none of SLURM_PROCID and SLURM_NTASKS, .*JAX_PROCESS_ID"):
        parse_shard("auto", {"SLURM_NTASKS": "2"})


def share_files(place, *, total=3):
    """Written shares of six lines, two outputs each; what `put_together` needs to know of them."""
    outputs = [Output(str(place / "out")), Output(str(place / "second"))]
    for one in Shard(0, total).all():
        with one.files(outputs, of={"model": "a"}) as files:
            lines = [f"line {line}".encode() for line in one.share(6, chunk=1)]
            for times, stream in enumerate(files.streams, start=1):
                stream.write(b"".join(line * times + b"\n" for line in lines))
            files.count(lines)
    return outputs, {"of": {"model": "a"}, "lines": 6, "chunk": 1}


EXPECTED = {
    name: b"".join(f"line {line}".encode() * times + b"\n" for line in range(6))
    for times, name in enumerate(("out", "second"), start=1)
}


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("moment", range(12))
def test_two_that_put_together_at_once_do_no_harm(tmp_path, monkeypatch, moment, killed):
    """One does all of it at some moment of the other: before it looks at a share, copies one, or gives a name. Or it
    is killed then, when it has removed the first file of many."""
    outputs, options = share_files(tmp_path)
    moments, removed = 0, []

    def unlink(path, **_):
        if killed and removed:
            raise KeyboardInterrupt
        originals[2][2](path, missing_ok=True)
        removed.extend([path] if path.name.endswith((".partial", ".json")) else [])

    def interrupted(function):
        def first(*arguments, **named):
            nonlocal moments
            moments += 1
            if moments == moment + 1:
                with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                    for owner, name, original in originals:
                        patch.setattr(owner, name, original)
                    patch.setattr(Path, "unlink", unlink)
                    patch.setattr("os.getpid", lambda: -1)
                    assert put_together(outputs, Shard(1, 3), **options) == []
            return function(*arguments, **named)

        return first

    names = ((shards, "counted"), (shards, "_copy"), (Path, "unlink"), (os, "fsync"))
    originals = [(owner, name, getattr(owner, name)) for owner, name in names]
    for owner, name, original in originals:
        monkeypatch.setattr(owner, name, interrupted(original))
    assert put_together(outputs, Shard(0, 3), **options) == []
    assert moments > moment
    monkeypatch.undo()
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found | EXPECTED == found
    assert killed or found == EXPECTED


def test_a_share_that_is_damaged_is_an_error_and_stays(tmp_path):
    outputs, options = share_files(tmp_path)
    (tmp_path / "out.1-of-3.partial").write_bytes(b"line 2\n")
    with pytest.raises(UserError, match=r"out\.1-of-3\.partial .* shorter than they were"):
        put_together(outputs, Shard(0, 3), **options)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.0-of-3.partial").exists()


@pytest.mark.slow
@pytest.mark.parametrize("total", [2, 3])
def test_processes_of_which_one_is_killed_and_begun_again(run, place, total):
    """As `srun` starts them, at the same time; the one that was killed goes on where it was."""
    (place / "in").write_text("".join(f"{line}\n" for line in LINES * 8))
    flags = ("--input", "in", "--format", "json", "--nbest", "2", "--alignment", "links")
    assert translate(run, *flags) == 0
    expected = written(place)
    for name in expected:
        (place / name).unlink()
    command = [sys.executable, str(ROOT / "decode.py"), "--model", run, "--output", "out", "--chunk", "2", *flags]

    def start(number):
        environment = os.environ | {"SLURM_PROCID": str(number), "SLURM_NTASKS": str(total), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*command, "--shard", "auto"], env=environment, stderr=subprocess.PIPE)

    processes = [start(number) for number in range(total)]
    record = place / f"out.1-of-{total}.partial.json"
    while not (record.exists() and json.loads(record.read_text())["lines"] >= 4):
        assert processes[1].poll() is None, processes[1].communicate()
        time.sleep(0.002)
    processes[1].send_signal(signal.SIGKILL)
    messages = [process.communicate()[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, *[0] * (total - 2)], messages
    assert all(f"1/{total}" in message for number, message in enumerate(messages) if number != 1)
    assert "out" not in written(place)
    again = start(1)
    _, message = again.communicate()
    assert again.returncode == 0, message
    assert b"continued after" in message
    assert written(place) == expected
