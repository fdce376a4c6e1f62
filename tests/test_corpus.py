"""Properties of reading corpora."""

import gzip
import io
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.config import OnBadPair
from transformer_jax.data import corpus, tfds
from transformer_jax.data.corpus import BadPair, Pair, Report
from transformer_jax.errors import UserError

EN_DE = {"source": "en", "target": "de", "split": "train"}


def dropping() -> Report:
    return Report("train", on_bad=OnBadPair.DROP)


def text_files(directory, source: bytes, target: bytes) -> str:
    (directory / "a.en").write_bytes(source)
    (directory / "a.de").write_bytes(target)
    return f"{directory}/a.en,{directory}/a.de"


@pytest.fixture
def standard_input(monkeypatch):
    """A function that puts bytes on standard input."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        corpus._standard_input.cache_clear()

    yield put
    corpus._standard_input.cache_clear()


# Line rules


@given(st.lists(st.text(st.characters(exclude_characters="\n\ufeff", exclude_categories=["Cs"]))))
def test_a_line_ends_at_a_newline_and_nowhere_else(lines):
    content = "".join(f"{line}\n" for line in lines).encode()
    assert list(corpus.read_lines(io.BytesIO(content))) == [line.removesuffix("\r") for line in lines]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\f", "\v", "\x1c", "\t", "\r"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_unicode_line_separators_stay_inside_their_line(tmp_path, separator, suffix):
    line = f"one{separator}two"
    path = tmp_path / f"text{suffix}"
    path.write_bytes(gzip.compress(f"{line}\nb".encode()) if suffix else f"{line}\nb".encode())
    assert list(corpus.read_lines(path)) == [line, "b"]


@pytest.mark.parametrize("content", [b"a\n\nb\n", b"a\n\nb", b"a\r\n\r\nb\r\n", b"\xef\xbb\xbfa\n\nb"])
def test_line_count_does_not_depend_on_the_line_ends(content):
    assert list(corpus.read_lines(io.BytesIO(content))) == ["a", "", "b"]


def test_invalid_utf8_names_file_and_line(tmp_path):
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"gut\nsch\xf6n\n")
    with pytest.raises(UserError, match=r"latin1\.txt line 2: not valid UTF-8 \(byte 4 is 0xf6\)"):
        list(corpus.read_lines(path))


# Text files


def test_text_files_are_paired_line_by_line(tmp_path):
    spec = text_files(tmp_path, b"a house\na dog\n", "ein Haus\nein Hund\u2028\n".encode())
    assert list(corpus.read(spec, **EN_DE)) == [Pair("a house", "ein Haus"), Pair("a dog", "ein Hund\u2028")]


def test_gzipped_files_give_the_same_pairs(tmp_path):
    plain = text_files(tmp_path, b"a house\na dog\n", b"ein Haus\nein Hund\n")
    for name in ("a.en", "a.de"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    zipped = f"{tmp_path}/a.en.gz,{tmp_path}/a.de.gz"
    assert list(corpus.read(zipped, **EN_DE)) == list(corpus.read(plain, **EN_DE))


@pytest.mark.parametrize("damage", [lambda zipped: zipped[:-12], lambda zipped: b"plain text"])
def test_a_damaged_gzip_file_is_an_error_with_its_name(tmp_path, damage):
    path = tmp_path / "text.gz"
    path.write_bytes(damage(gzip.compress(os.urandom(1000))))
    with pytest.raises(UserError, match=r"text\.gz"):
        list(corpus.read_lines(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.en"):
        list(corpus.read(f"{tmp_path}/nowhere.en,{tmp_path}/nowhere.de", **EN_DE))


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("on_bad", list(OnBadPair))
def test_unequal_line_counts_name_both_files_their_counts_and_the_suspect_line(tmp_path, longer, on_bad):
    lines = ["a sentence of a usual length"] * 1500
    lines[1233] = lines[1300] = "short"
    sides = ["\n".join(lines) + "\n", "\n".join(["ein Satz von üblicher Länge"] * 1498) + "\n"]
    sides = [side.encode() for side in sides]
    spec = text_files(tmp_path, sides[longer], sides[1 - longer])
    counts = ("1,500", "1,498") if longer == 0 else ("1,498", "1,500")
    with pytest.raises(UserError) as error:
        list(corpus.read(spec, **EN_DE, report=Report("train", on_bad=on_bad)))
    assert f"a.en has {counts[0]} lines" in str(error.value)
    assert f"a.de has {counts[1]}" in str(error.value)
    assert "Line 1,234 is the first where the length ratio leaves [1/4, 4]" in str(error.value)


def test_reading_does_not_look_ahead(tmp_path):
    """The first pairs come before a fault further down is met: the corpus is not held in memory."""
    spec = text_files(tmp_path, b"a\nb\nc\n", b"a\nb\n")
    pairs = corpus.read(spec, **EN_DE)
    assert [next(pairs), next(pairs)] == [Pair("a", "a"), Pair("b", "b")]
    with pytest.raises(UserError):
        next(pairs)


# Bad pairs

BAD = {
    BadPair.EMPTY: (b"a\n \n\nd\n", b"a\nb\nc\nd\n"),
    BadPair.ENCODING: (b"a\n\xff\nc\nd\n", b"a\nb\n\xff\nd\n"),
}


@pytest.mark.parametrize("kind", BAD)
def test_dropped_pairs_are_counted_by_kind_with_the_place_of_the_first(tmp_path, kind):
    report = dropping()
    assert list(corpus.read(text_files(tmp_path, *BAD[kind]), **EN_DE, report=report)) == [
        Pair("a", "a"),
        Pair("d", "d"),
    ]
    assert (report.read, report.kept, report.dropped) == (4, 2, {kind: 2})
    assert "a.en line 2" in str(report)
    assert str(kind) in str(report)


@pytest.mark.parametrize("kind", BAD)
def test_bad_pairs_are_errors_with_file_and_line_unless_told_to_drop(tmp_path, kind):
    with pytest.raises(UserError, match=r"a\.en line 2: .*bad_pairs=drop"):
        list(corpus.read(text_files(tmp_path, *BAD[kind]), **EN_DE))


def test_limits_count_tokens_of_the_longer_side():
    report = dropping()
    pairs = [([5] * n, [5] * m) for n, m in [(4, 4), (5, 2), (2, 5), (4, 2), (4, 1), (1, 4)]]
    kept = list(corpus.within_limits(pairs, max_length=4, max_ratio=2.0, report=report))
    assert kept == [pairs[0], pairs[3]]
    assert report.dropped == {BadPair.LENGTH: 2, BadPair.RATIO: 2}


def test_limits_are_errors_when_bad_pairs_are():
    report = Report("train", on_bad=OnBadPair.ERROR)
    with pytest.raises(UserError, match=r"train pair 1: .*3 and 9 tokens; config\.data\.max_length is 8"):
        list(corpus.within_limits([([5] * 3, [5] * 9)], max_length=8, max_ratio=None, report=report))


# TSV and standard input


def test_tsv_and_standard_input_give_the_same_pairs(tmp_path, standard_input):
    content = b"a house\tein Haus\nno tab\na\tb\tc\n\na dog\tein Hund\n"
    (tmp_path / "pairs.tsv").write_bytes(content)
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress(content))
    standard_input(content)
    for spec in (f"{tmp_path}/pairs.tsv", f"{tmp_path}/pairs.tsv.gz", "-", "-"):  # standard input twice
        report = dropping()
        pairs = list(corpus.read(spec, **EN_DE, report=report))
        assert pairs == [Pair("a house", "ein Haus"), Pair("a dog", "ein Hund")]
        assert report.dropped == {BadPair.COLUMNS: 2, BadPair.EMPTY: 1}


# Specs and fingerprints


def test_phrasebook_takes_a_size():
    assert len(list(corpus.read("phrasebook:7", **EN_DE))) == 7


@pytest.mark.parametrize("spec", ["", "a.en", "a.en,", "a,b,c", "phrasebook:many", "tfds:", "tfds"])
def test_an_unknown_spec_is_an_error_with_the_forms(spec):
    with pytest.raises(UserError, match=r"config\.data\.train: .* is no corpus\. Expected"):
        corpus.parse(spec, **EN_DE)


@pytest.mark.parametrize(
    ("spec", "name", "split"),
    [
        ("tfds:wmt14_translate/de-en", "wmt14_translate/de-en", "train"),
        ("tfds:wmt14_translate/de-en:train[:1%]", "wmt14_translate/de-en", "train[:1%]"),
        ("tfds:wmt14_translate/de-en:1.0.0:train[10:20]+test", "wmt14_translate/de-en:1.0.0", "train[10:20]+test"),
        ("tfds:wmt14_translate/de-en:1.0.0", "wmt14_translate/de-en:1.0.0", "train"),
    ],
)
def test_tfds_spec_has_name_version_and_split(spec, name, split):
    parsed = corpus.parse(spec, **EN_DE)
    assert (parsed.name, parsed.split) == (name, split)


def test_fingerprint_changes_with_the_files_and_the_phrases(tmp_path, standard_input):
    spec = text_files(tmp_path, b"a\n", b"b\n")
    before = corpus.fingerprint(spec, **EN_DE)
    assert corpus.fingerprint(spec, **EN_DE) == before
    text_files(tmp_path, b"a\n", b"bb\n")
    assert corpus.fingerprint(spec, **EN_DE) != before
    phrases = {
        corpus.fingerprint(spec, **EN_DE, seed=seed) for spec in ("phrasebook", "phrasebook:9") for seed in (0, 1)
    }
    assert len(phrases) == 4
    standard_input(b"a\tb\n")
    before = corpus.fingerprint("-", **EN_DE)
    standard_input(b"a\tc\n")
    assert corpus.fingerprint("-", **EN_DE) != before


def test_several_corpora_are_read_one_after_another(tmp_path):
    spec = text_files(tmp_path, b"a\n", b"b\n")
    assert list(corpus.read_all([spec, spec], **EN_DE)) == [Pair("a", "b")] * 2


# TFDS

PREPARE = """
    import sys

    import tensorflow_datasets as tfds

    class Wmt14Translate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en", version=VERSION)]

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.Translation(languages=("de", "en")))

        def _split_generators(self, downloads):
            sizes = {"train": 100, "validation": 2, "test": 3}
            return {split: self._generate_examples(size) for split, size in sizes.items()}

        def _generate_examples(self, size):
            for number in range(size):
                yield number, {"de": f"Satz {number}\\u2028ü" if number != 50 else " ", "en": f"sentence {number}"}

    builder = Wmt14Translate(data_dir=sys.argv[1], config="de-en", file_format=sys.argv[2])
    builder.download_and_prepare()
    assert "tensorflow" not in sys.modules
"""

READ = """
    import sys

    from transformer_jax.data import corpus

    pairs = list(corpus.read(sys.argv[1], source="en", target="de", split="train"))
    assert "tensorflow" not in sys.modules, "TensorFlow was imported"
    print(len(pairs))
"""


def run_python(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A directory with a small dataset that TFDS's own builder prepared as ArrayRecord files."""
    directory = tmp_path_factory.mktemp("tfds")
    run_python(PREPARE, str(directory), "array_record")
    return directory


@pytest.fixture
def data_dir(prepared, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(prepared))


def test_tfds_is_read_in_either_direction(data_dir):
    report = dropping()
    pairs = list(corpus.read("tfds:wmt14_translate/de-en", **EN_DE, report=report))
    assert sorted(pairs) == sorted(Pair(f"sentence {n}", f"Satz {n}\u2028ü") for n in range(100) if n != 50)
    assert report.dropped == {BadPair.EMPTY: 1}
    reverse = corpus.read("tfds:wmt14_translate/de-en", source="de", target="en", split="train", report=dropping())
    assert list(reverse) == [Pair(target, source) for source, target in pairs]


def test_tfds_split_is_that_of_the_field_unless_given(data_dir):
    whole = list(corpus.read("tfds:wmt14_translate/de-en", **EN_DE, report=dropping()))
    validation = corpus.read("tfds:wmt14_translate/de-en", source="en", target="de", split="dev", report=dropping())
    assert len(list(validation)) == 2
    halves = [
        pair
        for part in ("train[:50%]", "train[50%:]")
        for pair in corpus.read(f"tfds:wmt14_translate/de-en:{part}", **EN_DE, report=dropping())
    ]
    assert halves == whole


def test_tfds_chunks_join_without_gap_or_overlap(data_dir, monkeypatch):
    whole = list(corpus.read("tfds:wmt14_translate/de-en", **EN_DE, report=dropping()))
    monkeypatch.setattr(tfds, "TOGETHER", 7)
    assert list(corpus.read("tfds:wmt14_translate/de-en", **EN_DE, report=dropping())) == whole


def test_tfds_needs_no_tensorflow(prepared):
    spec = "tfds:wmt14_translate/de-en:validation+test"
    assert int(run_python(READ, spec, TFDS_DATA_DIR=str(prepared))) == 5


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tfds:wmt14_translate/fr-en", "no prepared dataset.*download_and_prepare"),
        ("tfds:no_such_dataset", "no prepared dataset.*download_and_prepare"),
        ("tfds:wmt14_translate/de-en:trian", "'trian' cannot be read.*train, validation"),
        ("tfds:wmt14_translate/de-en:train[:x%]", "cannot be read"),
    ],
)
def test_tfds_errors_say_what_to_do(data_dir, spec, message):
    with pytest.raises(UserError, match=f"(?s){message}"):
        list(corpus.read(spec, **EN_DE))


def test_tfds_language_must_be_in_the_dataset(data_dir):
    with pytest.raises(UserError, match=r"config\.data\.target is 'fr'.*de, en"):
        list(corpus.read("tfds:wmt14_translate/de-en", source="en", target="fr", split="train"))


def test_tfds_in_another_format_says_how_to_prepare_it(prepared, tmp_path, monkeypatch):
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    (metadata,) = tmp_path.glob("**/dataset_info.json")
    metadata.write_text(metadata.read_text().replace("array_record", "tfrecord"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match="is prepared as tfrecord; expected array_record"):
        list(corpus.read("tfds:wmt14_translate/de-en", **EN_DE))


def test_tfds_fingerprint_follows_name_split_and_direction(data_dir):
    spec = "tfds:wmt14_translate/de-en"
    reverse = {"source": "de", "target": "en", "split": "train"}
    prints = {
        corpus.fingerprint(spec, **EN_DE),
        corpus.fingerprint(f"{spec}:test", **EN_DE),
        corpus.fingerprint(spec, **reverse),
    }
    assert len(prints) == 3


@pytest.mark.parametrize("damage", ["gone", "cut", "changed", "empty"])
def test_tfds_names_the_file_that_is_missing_or_damaged(prepared, tmp_path, monkeypatch, damage):
    shutil.copytree(prepared, tmp_path / "tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    (shard,) = tmp_path.rglob("*train.array_record*")
    content = shard.read_bytes()
    if damage == "gone":
        shard.unlink()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
        shard.write_bytes({"cut": content[:middle], "changed": changed, "empty": b""}[damage])
    with pytest.raises(UserError, match=rf"tfds:wmt14_translate/de-en: .*{shard.name} can't be read"):
        list(corpus.read("tfds:wmt14_translate/de-en:train[:60%]", **EN_DE, report=dropping()))
    assert len(list(corpus.read("tfds:wmt14_translate/de-en:test", **EN_DE, report=dropping()))) == 3


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"splits": 1}'])
def test_tfds_says_that_the_description_of_a_dataset_is_damaged(prepared, tmp_path, monkeypatch, content):
    shutil.copytree(prepared, tmp_path / "tfds")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    (path,) = tmp_path.rglob("dataset_info.json")
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"tfds:wmt14_translate/de-en: .*(can't be read|no prepared dataset)"):
        corpus.fingerprint("tfds:wmt14_translate/de-en", **EN_DE)
