"""The explorer in a browser: every control, the keys, and the numbers against the arrays of `trace`.

Skipped where no Chromium is found (`apt-get install chromium`, or its path in $CHROMIUM).
"""

import functools
import json
import threading

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the explorer needs the extra `inspect`")

from browser import Browser, find_browser
from explored_model import PAIRS, SCRIPT, SEARCH, build

from transformer_jax.inspect.explorer import explored, write_explorer
from transformer_jax.inspect.pictures import see
from transformer_jax.inspect.search_tree import record_search, search_tree
from transformer_jax.inspect.serve import make_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium"),
]

LONG = 61  # tokens
WORDS = ["le", "chien", "voit", "un", "chat", "<eos>"]  # what the traced translation writes


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
def sentences(translator, seen, recording):
    """The first, one that tries to be markup, and a long one."""
    other = see(translator, PAIRS[1][0], target=PAIRS[1][1], search=SEARCH)
    source, target = (" ".join([text] * 12) for text in PAIRS[0])
    long = see(translator, source, target=target, search=SEARCH)
    assert len(long.source) == LONG
    texts = PAIRS[0][0], PAIRS[1][0], source
    return [explored(one, recording, text=text) for one, text in zip((seen, other, long), texts, strict=True)]


@pytest.fixture(scope="module")
def url(sentences, tmp_path_factory):
    return write_explorer(sentences, tmp_path_factory.mktemp("page") / "explorer.html", title="A & <b>B</b>").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_browser() or "", tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser, url):
    """The page as it opens; what its console says against it is an error."""
    browser.open(url)
    yield browser
    assert browser.problems == []


def choose(page, name, value):
    """Clicks a radio button or a checkbox."""
    page.point(f'input[name="{name}"][value="{value}"]', click=True)


def select(page, name, value):
    page.run(
        f"(() => {{ const one = document.getElementById({json.dumps(name)}); one.value = {json.dumps(str(value))};"
        "one.dispatchEvent(new Event('change')); })()"
    )


def token(side):
    return f'.token[data-side="{side}"]'


def pressed(page, side):
    return page.run(f"[...document.querySelectorAll('{token(side)}')].findIndex(b => b.ariaPressed === 'true')")


def bars(page, side):
    """The weights [tokens, heads] that the bars stand for."""
    most = float(page.text("#scale").split("weight of ")[1].split(",")[0])
    drawn = page.run(
        f"[...document.querySelectorAll('{token(side)}')].map(b =>"
        "[...b.querySelectorAll('i')].map(i => Number(i.style.getPropertyValue('--weight'))))"
    )
    return np.array(drawn) * most


def row(page, name):
    return page.texts(f'tr[data-row="{name}"] td')


def plain(values, digits=3):
    """As the page writes numbers, from float32."""
    texts = [f"{value:.{digits}f}" for value in np.ravel(values)]
    return ["−∞" if t == "-inf" else (t.replace("-", "") if float(t) == 0 else t.replace("-", "−")) for t in texts]


def layer_of(seen, kind, layer):
    if kind == "encoder":
        return seen.trace.encoder.layers[layer].self_attention
    found = seen.trace.decoder.layers[layer]
    return found.self_attention if kind == "decoder" else found.cross_attention


def test_it_opens_with_everything_in_it(page):
    assert page.text("h1") == "A & <b>B</b>"
    assert (
        page.run("performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith('data:'))") == []
    )
    assert page.run("document.getElementById('ask').checkVisibility()") is False
    assert page.text("#translation") == f"→ {PAIRS[0][1]}"
    assert page.texts(f"{token('query')} .word") == [*PAIRS[0][0].split(), "<eos>"]
    assert page.texts("input[name=layer] ~ span") == ["0", "1"]
    assert page.texts(".head span") == ["Head 0", "Head 1", "Head 2"]
    assert pressed(page, "query") == pressed(page, "key") == 4  # the last word, in the top layer


@pytest.mark.parametrize(("kind", "layer"), [("encoder", 0), ("encoder", 1), ("decoder", 0), ("cross", 0)])
def test_the_numbers_of_the_walk_are_those_of_the_trace(page, seen, kind, layer):
    one = layer_of(seen, kind, layer)
    choose(page, "kind", kind)
    if kind == "encoder":
        choose(page, "layer", layer)
    for head, query, key in ((0, 1, None), (2, 4, 3), (1, 5, 0)):
        page.point(token("query"), query, click=True)
        select(page, "walk-head", head)
        if key is None:
            key = int(one.weights[head, query].argmax())
        else:
            select(page, "walk-key", key)
        vector, value = one.keys[head, key], one.values[head, key]
        if one.relative is not None:
            distance = int(one.relative.distances[query, key].argmax())
            vector, value = vector + one.relative.keys[distance], value + one.relative.values[distance]
        assert row(page, "query") == plain(one.queries[head, query])
        assert row(page, "key") == plain(vector)
        assert row(page, "product") == plain(one.queries[head, query] * vector)
        assert page.text("#walk-score") == plain(one.scores[head, query, key])[0]
        cells = np.array(page.texts("#walk-scores td")).reshape(-1, 4)
        assert cells[:, 0].tolist() == plain(one.scores[head, query])
        assert cells[:, 1].tolist() == plain(one.scaled_scores[head, query])
        assert cells[:, 2].tolist() == plain(one.masked_scores[head, query])
        assert cells[:, 3].tolist() == plain(one.weights[head, query], 4)
        assert page.text("#walk-scores .chosen td:last-child") == cells[key, 3]
        assert row(page, "value") == plain(value)
        assert row(page, "weighted") == plain(one.weights[head, query, key] * value)
        assert row(page, "output") == plain(one.heads[head, query])
    if kind == "decoder":
        page.point(token("query"), 0, click=True)
        assert [cell == "−∞" for cell in page.texts("#walk-scores td:nth-child(4)")] == [False, *[True] * 5]


def test_a_key_of_the_walk_is_chosen_by_its_button_too(page, seen):
    page.point("#walk-scores button", 2, click=True)
    assert page.text("#walk-scores .chosen button") == "sees"
    assert page.run("document.activeElement.textContent") == "sees"
    assert page.run("document.getElementById('walk-key').value") == "2"
    vector = seen.trace.encoder.layers[1].self_attention
    distance = int(vector.relative.distances[4, 2].argmax())
    assert row(page, "key") == plain(vector.keys[0, 2] + vector.relative.keys[distance])


def test_pointing_at_a_token_shows_what_it_attends_to_and_what_attends_to_it(page, seen):
    weights = seen.trace.encoder.layers[1].self_attention.weights
    for place in (0, 3):
        page.point(token("query"), place)
        assert pressed(page, "query") == pressed(page, "key") == place
        np.testing.assert_allclose(bars(page, "key"), weights[:, place].T, atol=1e-4)
        np.testing.assert_allclose(bars(page, "query"), weights[:, :, place].T, atol=1e-4)
    assert row(page, "query") == plain(seen.trace.encoder.layers[1].self_attention.queries[0, 4])  # of the chosen one
    page.point("h1")
    assert pressed(page, "query") == 4
    np.testing.assert_allclose(bars(page, "key"), weights[:, 4].T, atol=1e-4)


def test_the_strongest_are_told_in_words(page, seen):
    page.point(token("query"), 2)
    weights = seen.trace.encoder.layers[1].self_attention.weights[1, 2]
    words = [*PAIRS[0][0].split(), "<eos>"]
    best = ", ".join(f"{words[place]} {weights[place]:.4f}" for place in np.argsort(-weights)[:3])
    assert "“sees” attends to" in page.text("#attention-readout")
    assert f"head 1: {best}" in page.text("#attention-readout")


def test_a_source_token_shows_which_target_tokens_attend_to_it(page, seen):
    choose(page, "kind", "cross")
    weights = seen.trace.cross_weights[0]
    assert page.texts(f"{token('query')} .word") == WORDS
    assert page.texts(f"{token('key')} .word") == [*PAIRS[0][0].split(), "<eos>"]
    page.point(token("key"), 2)
    assert (pressed(page, "query"), pressed(page, "key")) == (-1, 2)
    np.testing.assert_allclose(bars(page, "query"), weights[:, :, 2].T, atol=1e-4)
    assert bars(page, "key").max() == 0
    assert page.texts("#attention-readout h3") == ["“sees” is attended to by"]
    page.point(token("query"), 5)
    np.testing.assert_allclose(bars(page, "key"), weights[:, 5].T, atol=1e-4)
    assert bars(page, "query").max() == 0


def test_the_decoder_reads_its_own_words_and_sees_no_later_one(page, seen):
    choose(page, "kind", "decoder")
    assert page.texts(f"{token('query')} .word") == ["<bos>", *WORDS[:-1]]
    page.point(token("query"), 2)
    assert (bars(page, "key")[:3].sum(axis=0) > 0.999).all()
    assert bars(page, "key")[3:].max() == 0
    assert page.texts("input[name=layer] ~ span") == ["0"]  # layer 1 is the encoder's only


def test_heads_are_switched_and_one_always_stays(page, seen):
    weights = seen.trace.encoder.layers[1].self_attention.weights
    choose(page, "head", 1)
    np.testing.assert_allclose(bars(page, "key"), weights[[0, 2], 4].T, atol=1e-4)
    assert "head 1" not in page.text("#attention-readout")
    choose(page, "head", 0)
    choose(page, "head", 2)
    assert page.run("[...document.querySelectorAll('input[name=head]')].map(i => i.checked)") == [False, False, True]
    np.testing.assert_allclose(bars(page, "key"), weights[[2], 4].T, atol=1e-4)
    page.point("#all-heads", click=True)
    assert bars(page, "key").shape == (6, 3)
    page.point("#one-head", click=True)
    np.testing.assert_allclose(bars(page, "key"), weights[[0], 4].T, atol=1e-4)
    colours = page.run("[...document.querySelectorAll('.head')].map(h => getComputedStyle(h).color)")
    assert len(set(colours)) == 3


def test_the_pixels_of_a_thumbnail_are_the_weights(page, seen):
    drawn = page.run(
        "(() => { const c = document.querySelectorAll('canvas')[1];"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].filter((_, i) => i % 4 === 3); })()"
    )
    weights = seen.trace.encoder.layers[1].self_attention.weights[1]
    np.testing.assert_allclose(np.reshape(drawn, (6, 6)) / 255, np.sqrt(weights), atol=0.01)


def lines(page):
    return page.run("document.querySelectorAll('#attention path').length")


def test_lines_go_from_the_token_to_those_it_attends_to(page, seen):
    weights = seen.trace.encoder.layers[1].self_attention.weights
    assert lines(page) == (weights[:, 4] >= 0.01 * weights[:, 4].max()).sum()
    strongest = page.run("Math.max(...[...document.querySelectorAll('#attention path')].map(p => p.style.opacity))")
    assert strongest == 1
    ends = (
        "(() => { const box = e => e.getBoundingClientRect();"
        "const line = box(document.querySelector('#attention path'));"
        f"const [a, b] = ['{token('query')}', '{token('key')}'].map(s => box(document.querySelector(s)));"
        "return [line.left - a.right, line.right - b.left]; })()"
    )
    for width in (1000, 700):
        page.resize(width)
        page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert np.abs(page.run(ends)).max() < 3  # a line's width
    choose(page, "view", "text")
    assert lines(page) == 0
    assert page.run("document.activeElement.value") == "text"
    choose(page, "view", "lines")
    assert lines(page) > 0


def test_steps_of_the_decoding_and_their_alternatives(page, seen):
    probabilities, target = seen.trace.probabilities, seen.trace.target
    assert page.run("document.getElementById('step-back').disabled")
    for step in range(len(target)):
        best = np.sort(probabilities[step])[::-1][:10]
        assert page.texts("#alternatives .figure") == plain(best, 4)
        assert page.text("#alternatives .chosen .figure") == plain(probabilities[step, target[step]], 4)[0]
        assert page.text("#alternatives .chosen .word").removeprefix("▁") == page.text("#step-text mark") == WORDS[step]
        assert page.text("#step-text") == " ".join([*(WORDS[:step] or ["<bos>"]), WORDS[step]])
        assert (
            page.run("document.querySelector('#alternatives .chosen').value")
            == 1 + (probabilities[step] > probabilities[step, target[step]]).sum()
        )
        page.point("#step-on", click=True)
    assert page.run("document.getElementById('step-on').disabled")
    page.point("#step-back", click=True)
    assert page.text("#step-text mark") == "chat"


def test_the_decoders_attention_goes_with_the_steps_and_they_with_it(page, seen):
    choose(page, "kind", "cross")
    page.run("document.getElementById('step').focus()")
    page.press("ArrowRight", "ArrowRight")
    assert pressed(page, "query") == 2
    assert page.text("#step-text mark") == "voit"
    assert page.run("document.getElementById('step').ariaValueText") == "step 3 of 6: voit"
    assert row(page, "query") == plain(layer_of(seen, "cross", 0).queries[0, 2])
    page.point(token("query"), 4, click=True)
    assert page.text("#step-text mark") == "chat"
    choose(page, "kind", "encoder")
    page.point("#step-on", click=True)
    assert pressed(page, "query") == 4  # the encoder has no steps


def test_the_tree_has_every_hypothesis_and_its_fate(page, recording, translator):
    nodes = search_tree(recording)
    assert page.texts(".node .figure") == plain([node.log_prob for node in nodes])
    ranked = [node for node in nodes if node.rank is not None]
    assert page.texts(".node .score") == [f"no. {n.rank + 1}: {plain(n.score)[0]}" for n in ranked]
    fates = ["cut" if node.fate == "dead" and node.rank is not None else str(node.fate) for node in nodes]
    assert set(fates) == {"continued", "dead", "finished", "cut"}
    for fate in set(fates):
        found = page.run(f"[...document.querySelectorAll('.node')].map(n => n.classList.contains('{fate}'))")
        assert found == [one == fate for one in fates]
    assert [text.endswith("×") for text in page.texts(".node .word")] == [fate == "dead" for fate in fates]
    assert page.run("document.querySelectorAll('#tree path').length") == len(nodes)
    best = next(node for node in nodes if node.rank == 0)
    on_way = [node.tokens == best.tokens[: len(node.tokens)] for node in nodes]
    assert page.run("[...document.querySelectorAll('.node')].map(n => n.classList.contains('way'))") == on_way
    last = max(range(len(nodes)), key=lambda index: len(nodes[index].tokens))
    page.point(".node", last)
    text = translator.tokenizer.decode_target([nodes[last].tokens])[0]
    assert page.text("#node-readout").replace(" <eos>", "").startswith(f"{text} — log-probability")
    assert f"{len(nodes[last].tokens)} tokens" in page.text("#node-readout")


def focused(page):
    """Which of its kind has the focus."""
    return page.run(
        "(() => { const one = document.activeElement;"
        "const all = one.dataset.side ? `.token[data-side=${one.dataset.side}]` : '.node';"
        "const place = [...document.querySelectorAll(all)].indexOf(one);"
        "return [one.dataset.side ?? one.className.split(' ')[0], place]; })()"
    )


def test_tokens_are_reached_and_left_by_keys_alone(page):
    for view, (on, back), (other, first) in (
        ("lines", ("ArrowDown", "ArrowUp"), ("ArrowRight", "ArrowLeft")),
        ("text", ("ArrowRight", "ArrowLeft"), ("ArrowDown", "ArrowUp")),
    ):
        choose(page, "view", view)
        page.run("document.getElementById('one-head').focus()")
        page.press("Tab")
        assert focused(page)[0] == "query"
        page.press("Home")
        assert (focused(page), pressed(page, "key")) == (["query", 0], 0)
        page.press(back, on, on)
        assert (focused(page), pressed(page, "query")) == (["query", 2], 2)
        assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.press("End", on)
        assert focused(page) == ["query", 5]
        page.press(other)
        assert focused(page) == ["key", 5]
        page.press("Home", first)
        assert focused(page) == ["query", 0]
        page.press("Tab", "Tab")
        assert focused(page)[0] not in ("query", "key")


def test_choices_are_made_by_keys(page, seen):
    page.run("document.querySelector('input[name=kind]:checked').focus()")
    page.press("ArrowRight", "ArrowRight")
    assert page.run("document.querySelector('input[name=kind]:checked').value") == "cross"
    assert page.run("document.activeElement.value") == "cross"
    assert page.texts(f"{token('query')} .word") == WORDS
    page.press("Tab", "Tab", "Tab", "Space")  # layers, views, the first head
    assert page.run("document.querySelector('input[name=head]').checked") is False
    assert bars(page, "key").shape[1] == 2


def test_the_tree_is_walked_by_keys(page, recording):
    nodes = search_tree(recording)
    page.run("document.getElementById('walk-key').focus(); document.querySelector('.node[tabindex=\"0\"]').focus()")
    page.press("Home")
    assert focused(page) == ["node", 0]
    children = [node for node in nodes if node.tokens[:-1] == nodes[0].tokens]
    page.press("ArrowDown")
    best = max(children, key=lambda node: node.log_prob)
    assert focused(page) == ["node", nodes.index(best)]
    page.press("ArrowUp")
    assert focused(page) == ["node", 0]
    beside = sorted((node for node in nodes if len(node.tokens) == 1), key=lambda node: node.slot)
    page.press("ArrowLeft", "ArrowLeft", "ArrowRight")
    assert focused(page) == ["node", nodes.index(beside[1])]
    page.press("End")
    assert nodes[focused(page)[1]].rank == 0
    assert page.run("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1


def test_everything_that_can_be_reached_has_a_name(page):
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    reached = [
        node
        for node in tree
        if any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
        and node["role"]["value"] != "RootWebArea"
    ]
    assert len(reached) > 50
    assert [node["role"]["value"] for node in reached if not node["name"]["value"].strip()] == []
    names = {(node["role"]["value"], node["name"]["value"]) for node in reached}
    assert {("radio", "Encoder, self"), ("checkbox", "Head 2"), ("slider", "Step of the decoding")} <= names


def test_what_looks_like_markup_stays_text(page, seen):
    before = page.run("document.scripts.length")
    select(page, "sentence", 1)
    assert page.run("document.scripts.length") == before == 2
    assert page.run("document.title") == "A & <b>B</b>"
    assert page.texts("#sentence option")[1].startswith(f"{SCRIPT} <b> {{{{script}}}} &amp;")
    assert page.texts(f"{token('query')} .word") == [*PAIRS[1][0].split(), "<eos>"]
    assert SCRIPT in page.text("#translation")
    assert page.run("document.querySelectorAll('main b, main script, main h1').length") == 0
    choose(page, "kind", "cross")
    page.point(token("query"), 1, click=True)
    assert page.text("#step-text mark") == SCRIPT
    assert SCRIPT in page.text("#walk-lead")


def test_an_inline_script_would_not_run(browser, url):
    browser.open(url)
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'document.title = 1'}))")
    assert browser.run("document.title") == "A & <b>B</b>"
    assert any("Content Security Policy" in problem for problem in browser.problems)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 800, 1280])
@pytest.mark.parametrize("number", [0, 2], ids=["short", "long"])
def test_nothing_is_wider_than_the_screen_and_all_can_be_read(browser, url, width, dark, number):
    browser.open(url, width=width, dark=dark)
    select(browser, "sentence", number)
    for view in ("lines", "text"):
        choose(browser, "view", view)
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelector('#views :checked').value") == "text"
    inside = (
        "[...document.querySelectorAll('.token .word')].every(w => {"
        "const [a, b] = [w, w.parentElement].map(e => e.getBoundingClientRect());"
        "return a.left >= b.left && a.right <= b.right + 1 && a.height > 8; })"
    )
    assert browser.run(inside)
    assert browser.run(CONTRASTS) == []
    assert browser.problems == []


# Texts whose contrast with what is behind them is under 4.5, which WCAG 2 asks for at level AA.
CONTRASTS = """
(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (one) => {
    for (let e = one; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
  };
  return [...document.querySelectorAll("h1, h2, h3, p, label span, button:enabled, td, th, legend, li span")]
    .filter((one) => one.checkVisibility() && one.innerText.trim())
    .map((one) => [light(channels(getComputedStyle(one).color)), light(behind(one)), one.innerText])
    .filter(([a, b]) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5);
})()
"""


def test_a_long_sentence_opens_as_text(page):
    select(page, "sentence", 2)
    assert page.run("document.querySelector('#views :checked').value") == "text"
    assert page.run("document.querySelectorAll('.token').length") == 2 * LONG
    assert page.run("document.querySelector('#attention').getBoundingClientRect().height") < 900


def test_a_served_page_explores_what_is_typed(browser, sentences):
    def explore(text):
        if text == "<i>":
            raise RuntimeError
        return {**sentences[1], "text": text}

    with make_server(explore, title="served") as server:
        thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.02))
        thread.start()
        try:
            browser.open(f"http://127.0.0.1:{server.server_address[1]}/")
            assert browser.run("document.getElementById('panels').hidden")
            for text in ("one <b>", "two"):
                ask(browser, text)
                browser.wait(f"document.querySelector('#sentence option:checked')?.textContent === {json.dumps(text)}")
            assert browser.texts("#sentence option") == ["one <b>", "two"]
            assert SCRIPT in browser.text("#translation")
            assert browser.problems == []
            ask(browser, "<i>")
            assert browser.wait("document.getElementById('ask-status').textContent").startswith("that went wrong here")
            assert browser.run("document.querySelector('#ask button').disabled") is False
        finally:
            server.shutdown()
            thread.join()


def ask(browser, text):
    browser.run(
        f"document.getElementById('ask-text').value = {json.dumps(text)};document.querySelector('#ask').requestSubmit()"
    )
    browser.wait("!document.querySelector('#ask button').disabled")
