"""Alignments: known ones of attention made by hand, and the same ones in any batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import Positions, TokenizerConfig, TransformerConfig
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.alignment import (
    Link,
    arrays_to_npz,
    check_layer_and_head,
    cross_attention,
    links,
    pharaoh,
    tokens_as_words,
    words_of_tokens,
    write_arrays,
)
from transformer_jax.errors import UserError
from transformer_jax.nn.transformer import Transformer

CONFIG = TransformerConfig(
    encoder_layers=1,
    decoder_layers=2,
    width=16,
    heads=2,
    feed_forward=16,
    source_vocab=20,
    target_vocab=20,
    vocab_multiple=4,
)
PAIRS = [([5, 6, 7, 1], [8, 9, 1]), ([], []), ([5, 1], [8, 9, 10, 11, 1]), (list(range(3, 14)), [4, 1])]


def initial(config, key=0):
    ids = jnp.ones((1, 4), jnp.int32)
    return jax.jit(Transformer(config).init)(jax.random.key(key), unpacked(ids, ids))


def test_links_of_attention_made_by_hand():
    weights = np.array([[0.1, 0.2, 0.1, 0.6], [0.5, 0.1, 0.3, 0.1], [0.0, 0.0, 0.4, 0.6], [1.0, 0.0, 0.0, 0.0]])
    tokens = tokens_as_words([5, 6, 7, EOS])
    assert tokens == [0, 1, 2, -1]
    assert links(weights, tokens, tokens) == [Link(1, 0), Link(0, 1), Link(2, 2)]  # EOS is linked to nothing
    assert links(weights, [0, 1, 1, -1], [0, 0, 1, -1]) == [Link(0, 0), Link(1, 1)]  # 0.5 of token 1 beats 0.3
    assert links(weights, [0, 0, 1, -1], [0, 1, 1, -1]) == [Link(0, 0), Link(0, 1)]


def test_of_equal_weights_the_first_word_is_taken():
    assert links(np.full((2, 3), 0.25), [0, 1, 2], [0, 1]) == [Link(0, 0), Link(0, 1)]


def test_links_are_the_words_with_the_largest_weight_of_any_two_of_their_tokens():
    draw = np.random.default_rng(0)
    for _ in range(50):
        source, target = (np.sort(draw.integers(0, 3, size=draw.integers(1, 7))) for _ in range(2))
        source, target = (np.unique(side, return_inverse=True)[1].tolist() for side in (source, target))
        source, target = [*source, -1], [*target, -1]
        weights = draw.random((len(target), len(source)))
        expected = []
        for word in range(max(target) + 1):
            best = {
                other: max(
                    weights[t, s]
                    for t in range(len(target))
                    for s in range(len(source))
                    if (target[t], source[s]) == (word, other)
                )
                for other in range(max(source) + 1)
            }
            expected.append(Link(max(best, key=best.__getitem__), word))
        assert links(weights, source, target) == expected


def test_nothing_is_linked_to_nothing():
    assert links(np.zeros((0, 0)), [], []) == []
    assert links(np.ones((1, 2)), [-1, -1], [0]) == []
    assert pharaoh([]) == ""
    assert pharaoh([Link(0, 0), Link(1, 2)]) == "0-0 1-2"


def test_tokens_belong_to_the_words_between_spaces():
    pairs = [Pair("the cat sees a dog", "a dog sees the cat"), Pair("a cat and a dog", "the dog and the cat")] * 20
    tokenizer = train_tokenizer(pairs, TokenizerConfig(vocab=16))
    for line in ("the cat", "a dog sees", "catdog", "the dog, a cät and  the c@t", "a\tcat dog", "★ cat ★★ a★"):
        (ids,) = tokenizer.encode_source([line])
        words = words_of_tokens(ids, tokenizer.decode_source)
        assert words[-1] == -1
        assert sorted(set(words[:-1])) == list(range(len(line.split())) if "\t" not in line else range(2))
        assert words[:-1] == sorted(words[:-1])
        pieces = [tokenizer.source.id_to_piece(token) for token in ids[:-1]]
        starts = np.cumsum([piece.startswith("▁") for piece in pieces]) - 1
        full = np.array(pieces) != "▁"  # a space alone begins the word after it, and is counted to the one before
        np.testing.assert_array_equal(np.array(words[:-1])[full], starts[full])
    assert words_of_tokens([EOS], tokenizer.decode_source) == [-1]


def test_attention_made_by_hand_gives_its_alignment():
    """Queries and keys are of positions alone: target position t looks at source position order[t]."""
    config = dataclasses.replace(
        CONFIG, width=8, heads=1, decoder_layers=1, positions=Positions.LEARNED, max_positions=8
    )
    params = jax.tree.map(jnp.zeros_like, initial(config))
    model, order = params["params"], [2, 0, 3, 1]
    model["source_positions"] = jnp.eye(8)
    model["target_positions"] = jnp.eye(8)[jnp.array([*order, 4, 5, 6, 7])]
    cross = model["decoder"]["layers_0"]["cross_attention"]
    cross["query"]["kernel"], cross["key"]["kernel"] = 9 * jnp.eye(8), jnp.eye(8)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.ones_like(leaf) if "scale" in jax.tree_util.keystr(path) else leaf, params
    )
    pair = [3, 4, 5, 6, EOS], [7, 8, 9, 10, EOS]
    (weights,) = cross_attention(Transformer(config), [params], [pair])
    np.testing.assert_allclose(weights, np.eye(5)[[*order, 4]], atol=1e-3)
    assert pharaoh(links(weights, *map(tokens_as_words, pair))) == "2-0 0-1 3-2 1-3"


@pytest.fixture(scope="module")
def attention():
    """A model, its parameters, and the weights of each pair alone, [L, N, T, S]."""
    model, params = Transformer(CONFIG), initial(CONFIG)
    weights = jax.jit(lambda params, batch: model.apply(params, batch, method="attention_weights").cross)
    batches = [unpacked(*(jnp.array([side], jnp.int32) for side in pair)) if pair[0] else None for pair in PAIRS]
    return model, params, [np.asarray(weights(params, batch))[0] if batch else None for batch in batches]


@pytest.mark.parametrize(("layer", "head"), [(None, None), (1, 0)])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_the_attention_of_a_pair_is_that_of_the_pair_alone(attention, layer, head, tokens):
    model, params, alone = attention
    found = cross_attention(model, [params], PAIRS, tokens=tokens, layer=layer, head=head)
    for weights, array in zip(alone, found, strict=True):
        if weights is None:
            assert array.size == 0
            continue
        layers, heads = (range(2) if one is None else [one] for one in (layer, head))
        expected = np.mean([weights[one, other] for one in layers for other in heads], axis=0)
        np.testing.assert_allclose(array, expected, atol=1e-6)
        np.testing.assert_allclose(array.sum(axis=1), 1, atol=1e-5)


def test_the_attention_of_an_ensemble_is_the_mean_of_its_members():
    model, members = Transformer(CONFIG), [initial(CONFIG, 0), initial(CONFIG, 1)]
    (one,), (other,) = (cross_attention(model, [member], PAIRS[:1]) for member in members)
    (both,) = cross_attention(model, members, PAIRS[:1])
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_allclose(both, (one + other) / 2, atol=1e-6)


def test_a_learned_table_is_not_exceeded_by_padding():
    config = dataclasses.replace(CONFIG, positions=Positions.LEARNED, max_positions=11)
    found = cross_attention(Transformer(config), [initial(config)], PAIRS)
    assert all(np.isfinite(array).all() for array in found)


def test_a_layer_or_head_that_is_not_there_is_refused():
    check_layer_and_head(CONFIG, layer=1, head=1)
    with pytest.raises(UserError, match="--attention_layer is 2, but the decoder has 2"):
        check_layer_and_head(CONFIG, layer=2, head=None)
    with pytest.raises(UserError, match="--attention_head is -1"):
        check_layer_and_head(CONFIG, layer=None, head=-1)


def test_arrays_written_one_after_another_become_one_file_with_an_array_for_each_line(tmp_path):
    arrays = [
        np.random.default_rng(0).random((3, 2), np.float32),
        np.zeros((0, 0), np.float32),
        np.ones((1, 5), np.float32),
    ]
    for name in ("one", "again"):
        with (tmp_path / "written").open("wb") as stream:
            for array in arrays:
                write_arrays(stream, [array])
        arrays_to_npz(tmp_path / "written", tmp_path / f"{name}.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"one.npz", "again.npz"}
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    with np.load(tmp_path / "one.npz") as found:
        assert list(found) == ["1", "2", "3"]
        for array, name in zip(arrays, found, strict=True):
            np.testing.assert_array_equal(found[name], array)
