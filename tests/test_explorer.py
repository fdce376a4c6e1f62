"""What the explorer's file holds: the arrays of the trace and of the search, and text that stays text."""

import base64
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the explorer needs the extra `inspect`")

from explored_model import PAIRS, SEARCH, build

from transformer_jax.config import Config
from transformer_jax.errors import UserError
from transformer_jax.inspect import __main__ as command
from transformer_jax.inspect import explorer
from transformer_jax.inspect.explorer import explored, explorer_page, json_in_html
from transformer_jax.inspect.pictures import see
from transformer_jax.inspect.search_tree import record_search, search_tree


@pytest.fixture(scope="module")
def translator():
    return build()


@pytest.fixture(scope="module")
def seen(translator):
    return see(translator, PAIRS[0][0], target=PAIRS[0][1], search=SEARCH)


@pytest.fixture(scope="module")
def recording(translator, seen):
    return record_search(translator.model, translator.params, seen.trace.source.tolist(), SEARCH)


@pytest.fixture(scope="module")
def sentence(seen, recording):
    return json.loads(json.dumps(explored(seen, recording, text=PAIRS[0][0]), allow_nan=False))


def array(text, *shape):
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def test_every_array_is_that_of_the_trace_to_the_last_bit(seen, sentence):
    layers = {
        "encoder": [layer.self_attention for layer in seen.trace.encoder.layers],
        "decoder": [layer.self_attention for layer in seen.trace.decoder.layers],
        "cross": [layer.cross_attention for layer in seen.trace.decoder.layers],
    }
    assert {kind: len(found) for kind, found in sentence["attention"].items()} == {
        "encoder": 2,
        "decoder": 1,
        "cross": 1,
    }
    for kind, expected in layers.items():
        for found, one in zip(sentence["attention"][kind], expected, strict=True):
            N, T, S, H, V = (found[name] for name in ("heads", "queries", "keys", "key_width", "value_width"))
            np.testing.assert_array_equal(array(found["q"], N, T, H), one.queries)
            np.testing.assert_array_equal(array(found["k"], N, S, H), one.keys)
            np.testing.assert_array_equal(array(found["v"], N, S, V), one.values)
            np.testing.assert_array_equal(array(found["scores"], N, T, S), one.scores)
            np.testing.assert_array_equal(array(found["weights"], N, T, S), one.weights)
            np.testing.assert_array_equal(array(found["outputs"], N, T, V), one.heads)
            assert [[cell == "1" for cell in row] for row in found["mask"]] == one.mask.tolist()
            if one.relative is None:
                assert found["relative"] is None
                continue
            a, b = array(found["relative"]["keys"], -1, H), array(found["relative"]["values"], -1, V)
            distances = np.array(found["relative"]["distances"])
            np.testing.assert_array_equal(a[distances], one.relative.distances @ one.relative.keys)
            np.testing.assert_array_equal(b[distances], one.relative.distances @ one.relative.values)


def test_steps_have_the_likeliest_tokens_and_the_one_that_was_written(seen, sentence):
    assert sentence["tokens"] == {"source": seen.source, "read": seen.read, "written": seen.written}
    for row, target, written, step in zip(
        seen.trace.probabilities, seen.trace.target, seen.written, sentence["steps"], strict=True
    ):
        best = np.sort(row)[::-1][: len(step["labels"])]
        np.testing.assert_array_equal(np.array(step["probabilities"], np.float32), best)
        assert step["chosen"] == {"rank": int((row > row[target]).sum()), "probability": float(row[target])}
        assert step["labels"][step["chosen"]["rank"]] == written


def test_the_tree_is_that_of_the_search(sentence, recording):
    nodes, expected = sentence["search"]["nodes"], search_tree(recording)
    assert sentence["search"]["slots"] == 3

    def tokens(index):
        return 0 if index < 0 else 1 + tokens(nodes[index]["parent"])

    for index, (found, node) in enumerate(zip(nodes, expected, strict=True)):
        assert (found["log_prob"], found["slot"], found["fate"]) == (node.log_prob, node.slot, node.fate)
        assert (found["rank"], found["score"]) == (node.rank, node.score)
        assert found["step"] == len(node.tokens) == tokens(index)
        if found["parent"] >= 0:
            assert expected[found["parent"]].tokens == node.tokens[:-1]
    assert {node["fate"] for node in nodes} == {"continued", "dead", "finished"}


def test_nothing_in_the_data_can_end_its_element():
    value = {"text": "</script><!-- \u2028 \u2029 {{script}} \ud800"}
    text = json_in_html(value)
    assert json.loads(text) == value
    assert "<" not in text
    assert text.isascii()
    page = explorer_page([], title='<b> {{data}} & "x"')
    assert "<title>&lt;b&gt; {{data}} &amp; &quot;x&quot;</title>" in page


def test_numbers_that_json_has_not_are_an_error():
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_in_html([float("nan")])


def test_the_file_loads_nothing(sentence):
    page = explorer_page([sentence], title="A")
    assert re.findall(r"\b(?:src|href|action|data|poster)\s*=\s*[^ >]*", page) == ['href="data:,"']
    assert not re.search(r"@import|url\(|\beval\(|innerHTML|insertAdjacentHTML|document\.write", page)
    assert "connect-src 'none'" in page
    assert "default-src 'none'" in page
    assert "unsafe" not in page


def test_an_output_that_is_not_finite_is_an_error(translator):
    broken = {**translator.params, "params": {**translator.params["params"]}}
    name = next(name for name in broken["params"] if "embedding" in name and "target" in name)
    broken["params"][name] = {"table": jnp.full_like(broken["params"][name]["table"], jnp.nan)}
    with pytest.raises(UserError, match="is not finite"):
        explorer.explore(
            type(translator)(translator.model, broken, translator.tokenizer),
            *PAIRS[0][:1],
            target=PAIRS[0][1],
            search=SEARCH,
        )


@pytest.fixture
def loaded(monkeypatch, translator):
    """The command with this model in the place of a run's."""
    monkeypatch.setattr(command, "keep_compiled_programs", lambda: None)
    monkeypatch.setattr(command, "load_config", lambda _: Config(search=SEARCH))
    monkeypatch.setattr(command.Translator, "load", lambda *_: translator)


def run(capsys, *flags):
    status = command.main(list(flags))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return status, out, err


def test_the_command_writes_the_file_for_all_texts(loaded, tmp_path, capsys, sentence):
    path = tmp_path / "new" / "out.html"
    flags = [flag for source, target in PAIRS for flag in ("--text", source, "--target", target)]
    assert run(capsys, *flags, "--model", "runs/x", "--explorer", str(path))[:2] == (0, f"{path}\n")
    page = path.read_text(encoding="utf-8")
    assert [file.name for file in path.parent.iterdir()] == ["out.html"]
    found = json.loads(re.search(r'id="explorer-data">(.*?)</script>', page)[1])
    assert found["asks"] is False
    assert found["sentences"][0] == sentence
    assert [(one["text"], one["translation"]) for one in found["sentences"]] == list(PAIRS)
    assert "<title>A Transformer at work: runs/x</title>" in page


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", "a"], "nothing is asked for. Give --out DIR"),
        (["--explorer", "x.html"], "there is no --text"),
        (["--text", "a", "--text", "b", "--out", "x"], "--out draws one sentence, and 2 are given"),
        (["--text", "a", "--target", "b", "--target", "c", "--explorer", "x"], "2 --target for 1 --text"),
        (["--text", " ", "--explorer", "x"], "--text is empty"),
        (["--text", "dog " * 70, "--explorer", "x"], "'dog dog dog dog dog dog dog dog dog dog…' has 71 tokens"),
        (["--serve", "--port", "99999"], "--port 99999 of 127.0.0.1 can't be had"),
    ],
)
def test_flags_that_do_not_go_together_are_an_error(loaded, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *flags)
    assert (status, out) == (2, "")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_is_not_written(loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(explorer, "LARGEST", 30_000)
    source, target = PAIRS[0]
    flags = ["--text", source, "--target", target, "--explorer", str(tmp_path / "x.html")]
    status, _, err = run(capsys, *flags)
    assert status == 2
    assert "Give fewer or shorter sentences" in err
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_message_says_how_to_install_it(loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformer_jax.inspect.style", None)
    status, _, err = run(capsys, "--text", "a", "--explorer", str(tmp_path / "x.html"))
    assert status == 2
    assert "python3 -m pip install -e '.[inspect]'" in err
