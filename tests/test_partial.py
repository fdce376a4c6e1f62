"""Output that is continued: after a kill at any moment, and never from something else."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from transformer_jax.decoding.partial import Output, Partial, partial_files, refuse_existing, whole_file
from transformer_jax.errors import UserError

LINES = [f"line {number}".encode() for number in range(7)]
OF = {"model": "a", "--alpha": 0.6}


def work(paths, *, lines=LINES, of=OF, chunk=2, stop_after=None):
    """Writes each line in upper case, several times to several files, and stops by an error if told."""
    with partial_files([Output(str(path)) for path in paths], of=lambda: of) as files:
        lines = iter(lines)
        files.skip(lines, name="the input")
        left = list(lines)
        for start in range(0, len(left), chunk):
            if stop_after is not None and files.lines >= stop_after:
                raise KeyboardInterrupt
            for times, stream in enumerate(files.streams, start=1):
                for line in left[start : start + chunk]:
                    stream.write(line.upper() * times + b"\n")
            files.count(left[start : start + chunk])


def interrupted(paths, **options):
    with pytest.raises(KeyboardInterrupt):
        work(paths, **options)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def expected(times=1):
    return b"".join(line.upper() * times + b"\n" for line in LINES)


@pytest.mark.parametrize("stop_after", [1, 2, 4, 6])
def test_an_interrupted_output_is_continued_byte_for_byte(tmp_path, stop_after):
    paths = tmp_path / "out", tmp_path / "second"
    interrupted(paths, stop_after=stop_after)
    assert set(contents(tmp_path)) == {"out.partial", "out.partial.json", "second.partial"}
    work(paths)
    assert contents(tmp_path) == {"out": expected(), "second": expected(2)}


def test_a_kill_at_any_moment_loses_nothing(tmp_path, monkeypatch):
    """A copy of the directory at every step of the writing is what a kill at that moment would leave."""
    place, moments = tmp_path / "place", []
    place.mkdir()

    def photograph():
        moments.append(shutil.copytree(place, tmp_path / f"moment {len(moments)}"))

    def with_photographs(function):
        def photographed(*arguments):
            photograph()
            result = function(*arguments)
            photograph()
            return result

        return photographed

    with monkeypatch.context() as patch:
        for owner, name in ((os, "fsync"), (pathlib.Path, "replace"), (Partial, "count"), (pathlib.Path, "unlink")):
            patch.setattr(owner, name, with_photographs(getattr(owner, name)))
        finish = with_photographs(os.replace)
        patch.setattr(Output, "__new__", lambda cls, path: tuple.__new__(cls, (path, finish)))
        work([place / "out", place / "second"], chunk=3)
    assert len(moments) > 20
    for moment in moments:
        for path in moment.glob("*.partial") if (moment / "out.partial.json").exists() else ():
            with path.open("ab") as stream:  # what was not flushed may have reached the disk in part
                stream.write(b"half a li")
        done = {name for name in ("out", "second") if (moment / name).exists()}
        if done == {"second"}:
            continue  # between its name and that of the first nothing is lost, but to continue is not possible
        if done != {"out", "second"} or (moment / "out.partial.json").exists():
            work([moment / "out", moment / "second"], chunk=3)
        assert contents(moment) == {"out": expected(), "second": expected(2)}


def test_nothing_is_left_where_nothing_was_done(tmp_path):
    interrupted([tmp_path / "out"], stop_after=0)
    assert contents(tmp_path) == {}


def test_input_that_grew_is_continued_and_input_that_changed_is_refused(tmp_path):
    interrupted([tmp_path / "out"], stop_after=4)
    before = contents(tmp_path)
    for lines in ([b"another", *LINES[1:]], LINES[:3], [b"line 0\nline 1", *LINES[2:]]):
        with pytest.raises(UserError, match="4 lines are not the first ones of the input") as refusal:
            work([tmp_path / "out"], lines=lines)
        assert f"remove it and {tmp_path / 'out.partial.json'}" in str(refusal.value)
        assert contents(tmp_path) == before
    work([tmp_path / "out"], lines=[*LINES, b"more"])
    assert contents(tmp_path) == {"out": expected() + b"MORE\n"}


def test_a_partial_output_of_something_else_is_refused_by_name(tmp_path):
    interrupted([tmp_path / "out"], stop_after=2)
    before = contents(tmp_path)
    others = (
        ({"model": "b", "--alpha": 0.6}, "model: a → b"),
        ({"model": "a", "--alpha": 1.0}, "--alpha: 0.6 → 1.0"),
        ({"model": "a"}, "--alpha: 0.6 → none"),
        (OF | {"--beam_size": 4}, "--beam_size: none → 4"),
    )
    for of, message in others:
        with pytest.raises(UserError, match=message) as refusal:
            work([tmp_path / "out"], of=of)
        assert str(tmp_path / "out.partial") in str(refusal.value)
        assert contents(tmp_path) == before


def test_files_that_are_not_what_was_written_are_refused(tmp_path):
    interrupted([tmp_path / "out"], stop_after=2)
    record = (tmp_path / "out.partial.json").read_text()
    for content, part, message in (
        ("{}", b"LINE 0\nLINE 1\n", "is damaged"),
        ("", b"LINE 0\nLINE 1\n", "is damaged"),
        (record, b"LINE 0\n", "shorter than they were"),
        (None, b"LINE 0\n", "is missing"),
    ):
        (tmp_path / "out.partial").write_bytes(part)
        (tmp_path / "out.partial.json").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "out.partial.json").write_text(content)
        with pytest.raises(UserError, match=message):
            work([tmp_path / "out"])


def test_what_counts_nothing_is_begun_anew_whatever_it_was_for(tmp_path):
    interrupted([tmp_path / "out"], stop_after=2)
    record = json.loads((tmp_path / "out.partial.json").read_text())
    (tmp_path / "out.partial.json").write_text(json.dumps(record | {"lines": 0, "of": {}}))
    work([tmp_path / "out"])
    assert contents(tmp_path) == {"out": expected()}


def test_a_second_process_is_kept_out(tmp_path):
    """The lock is the kernel's, so that it ends with the process that has it."""
    (tmp_path / "out.partial").touch()
    program = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); print(flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out.partial")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(UserError, match=r"out\.partial: another process"):
            work([tmp_path / "out"])
        other.kill()
    work([tmp_path / "out"])
    assert (tmp_path / "out").read_bytes() == expected()


def test_an_output_that_is_there_is_refused_unless_it_is_empty(tmp_path):
    (tmp_path / "out").write_text("what was there")
    (tmp_path / "empty").touch()
    refuse_existing([Output(str(tmp_path / "empty")), Output("-"), Output(os.devnull), Output(str(tmp_path / "new"))])
    with pytest.raises(UserError, match=f"{tmp_path / 'out'} is there .* --overwrite"):
        refuse_existing([Output(str(tmp_path / "empty")), Output(str(tmp_path / "out"))])


def test_beside_a_pipe_a_file_is_written_whole_or_not_at_all(tmp_path):
    reader, writer = os.pipe()
    paths = [pathlib.Path(f"/dev/fd/{writer}"), tmp_path / "second"]
    interrupted(paths, stop_after=2)
    assert contents(tmp_path) == {}
    work(paths)
    assert contents(tmp_path) == {"second": expected(2)}
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == expected()[:14] + expected()


def test_an_output_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "out"
    path.write_text("what was there")
    with pytest.raises(ZeroDivisionError), whole_file(str(path)) as stream:
        stream.write(b"half"[: 1 // stream.write(b"")])
    assert contents(tmp_path) == {"out": b"what was there"}
    with whole_file(str(path)) as stream:
        stream.write(b"whole")
    assert contents(tmp_path) == {"out": b"whole"}


def test_links_and_devices_are_written_to_as_they_are(tmp_path):
    file, to_file, to_device = tmp_path / "file", tmp_path / "to_file", tmp_path / "to_device"
    to_file.symlink_to(file)
    to_device.symlink_to(os.devnull)
    for link in (to_file, to_device):
        for write in (whole_file, lambda path: partial_files([Output(path)], of=lambda: {})):
            with write(str(link)) as written:
                (written.streams[0] if isinstance(written, Partial) else written).write(b"a cat\n")
        assert link.is_symlink()
    assert file.read_text() == "a cat\n"
    assert to_device.is_char_device()
    assert set(contents(tmp_path)) == {"file", "to_file", "to_device"}


def test_a_pipe_is_written_to_under_the_name_that_a_shell_gives_it():
    reader, writer = os.pipe()
    with whole_file(f"/dev/fd/{writer}") as stream:
        stream.write(b"a cat\n")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"a cat\n"


def test_what_can_not_be_written_is_refused_before_any_work(tmp_path):
    for path in (tmp_path, tmp_path / "no" / "such"):
        with pytest.raises(UserError, match=f"{path}: can't be written"), whole_file(str(path)):
            pytest.fail("it was opened")
        with pytest.raises(UserError, match=f"{path}: can't be written"):
            work([path])
