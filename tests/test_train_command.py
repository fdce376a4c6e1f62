"""The flags of `train.py`: fields of the config by name, tuples of paths, and errors that are one line."""

import pathlib
import sys

import pytest

import train
from transformer_jax.config import Config, NormPlace
from transformer_jax.tuple_flags import ids, numbers, texts

pytestmark = pytest.mark.filterwarnings("ignore:.*load_module:DeprecationWarning")  # how ml_collections reads a config
ROOT = pathlib.Path(__file__).parent.parent
PHRASES = str(ROOT / "configs" / "phrases.py")


def parsed(*flags: str) -> Config:
    return train.parse(["train.py", *flags]).config


@pytest.fixture(autouse=True)
def no_config_file_read_yet(monkeypatch):
    """ml_collections reads every config file into one module, in which the names of the one before stay."""
    monkeypatch.delitem(sys.modules, "config_config", raising=False)


@pytest.fixture
def trained(monkeypatch) -> list:
    """The config and the directory of each run that `train.main` would begin."""
    runs = []
    monkeypatch.setattr(train, "train", lambda *run: runs.append(run))
    monkeypatch.setattr(train, "keep_compiled_programs", lambda: None)
    return runs


def test_without_flags_the_phrases_are_trained(trained):
    assert train.main(["train.py"]) == 0
    ((config, workdir),) = trained
    assert config.data.train == ("phrasebook",)
    assert workdir == "runs/phrases"


def test_fields_are_set_by_name(trained):
    flags = ["--config.optimizer.warmup=7", "--config.model.norm_place=post", "--config.optimizer.clip=1.5"]
    assert train.main(["train.py", f"--config={PHRASES}", *flags, "--workdir=here"]) == 0
    ((config, workdir),) = trained
    assert (config.optimizer.warmup, config.model.norm_place, config.optimizer.clip) == (7, NormPlace.POST, 1.5)
    assert workdir == "here"


@pytest.mark.parametrize(
    "spec",
    [
        "a.en,a.de",
        "/data/multi30k/train.en,/data/multi30k/train.de",
        "/my data/a b.en,/my data/a b.de",
        "../a-b/x.en.gz,../a-b/x.de.gz",
        "(old)/a.en,(old)/a.de",
        "2016.en,2016.de",
        "2016,2017",
        "it's.en,it's.de",
        "pairs.tsv",
        "-",
        "phrasebook:5000",
        "tfds:wmt14_translate/de-en:train[:1%]",
    ],
)
def test_a_corpus_is_given_as_it_is_written(spec):
    assert parsed(f"--config.data.train={spec}").data.train == (spec,)


def test_a_flag_that_comes_twice_gives_two_corpora():
    flags = [f"--config.data.train=/x/{name}.en,/x/{name}.de" for name in "ab"]
    assert parsed(*flags).data.train == ("/x/a.en,/x/a.de", "/x/b.en,/x/b.de")


@pytest.mark.parametrize(
    ("literal", "expected"),
    [("('/x/a.en,/x/a.de','b c.tsv')", ("/x/a.en,/x/a.de", "b c.tsv")), ("['a']", ("a",)), ("'a'", ("a",)), ("()", ())],
)
def test_literals_are_read_as_such(literal, expected):
    assert parsed(f"--config.data.dev={literal}").data.dev == expected
    assert texts(literal) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--config.data.weights=(1.0,2.0)"], (1.0, 2.0)),
        (["--config.data.weights=1,2.5"], (1.0, 2.5)),
        (["--config.data.weights=3"], (3.0,)),
        (["--config.data.weights=1", "--config.data.weights=2"], (1.0, 2.0)),
    ],
)
def test_weights_are_numbers(flags, expected):
    weights = parsed(*flags).data.weights
    assert weights == expected
    assert all(type(weight) is float for weight in weights)
    assert numbers("()") == ()


def test_ids_are_whole_numbers():
    config = parsed("--config.search.suppressed=2,5", "--config.dev_search.forced_prefix=7")
    assert config.search.suppressed == (2, 5)
    assert config.dev_search.forced_prefix == (7,)
    assert ids("()") == ()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.search.suppressed=1.5", "expected whole numbers, such as 2,5"),
        ("--config.optimizer.warmp=1", "warmp"),
        ("--config.optimizer.warmup=soon", "--config.optimizer.warmup=soon"),
        ("--config.optimizer.schedule=linear", "should be one of <noam|"),
        ("--config.data.weights=much", "--config.data.weights=much: expected numbers, such as 1.0,2.0"),
        ("--config=nowhere.py", "nowhere.py"),
        (f"--config={__file__}", "get_config"),
        ("--wrkdir=x", "wrkdir"),
        ("extra", "unexpected argument 'extra'"),
    ],
)
def test_wrong_flags_are_one_line_and_status_2(trained, capsys, flag, message):
    flags = [flag] if flag.startswith("--config=") else [f"--config={PHRASES}", flag]
    assert train.main(["train.py", *flags]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(errors) == 1
    assert errors[0].startswith("train.py: ")
    assert message in errors[0]
    assert not trained


def test_a_file_that_returns_no_config_is_refused(tmp_path, trained, capsys):
    (tmp_path / "other.py").write_text("def get_config():\n    return {'run': 1}\n")
    assert train.main(["train.py", f"--config={tmp_path / 'other.py'}"]) == 2
    assert "get_config() has to return a transformer_jax.config.Config" in capsys.readouterr().err


def test_help_shows_the_flags(trained, capsys):
    assert train.main(["train.py", "--help"]) == 0
    output = capsys.readouterr().out
    assert "--workdir" in output
    assert "python3 train.py" in output
    assert not trained
