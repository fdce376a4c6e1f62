import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import EOS, Batch, unpacked
from transformer_jax.config import (
    Activation,
    DType,
    Norm,
    NormPlace,
    Positions,
    SinusoidLayout,
    TransformerConfig,
    Tying,
)
from transformer_jax.errors import UserError
from transformer_jax.nn.live import live_among
from transformer_jax.nn.positions import sinusoids
from transformer_jax.nn.stacks import stack_layers, unstack_layers
from transformer_jax.nn.transformer import Transformer

V = 11

TINY = TransformerConfig(
    encoder_layers=1,
    decoder_layers=2,
    width=16,
    heads=2,
    feed_forward=32,
    relative_distance=2,
    max_positions=24,
    source_vocab=V,
    target_vocab=V,
    vocab_multiple=8,
)
VARIANTS = {
    "paper": {},
    "relative": {"positions": Positions.RELATIVE, "norm_place": NormPlace.PRE},
    "rotary": {"positions": Positions.ROTARY, "gated": True, "activation": Activation.SWISH, "norm": Norm.RMS},
    "learned": {"positions": Positions.LEARNED, "tying": Tying.NONE, "activation": Activation.GELU},
    "bart": {"embedding_norm": True, "embedding_scale": False, "output_bias": True, "first_position": 2},
    "t2t": {"sinusoid_layout": SinusoidLayout.T2T, "tying": Tying.DECODER, "attention_bias": True, "key_width": 4},
}
STACKS = ("paper", "relative", "rotary")  # of which the layers differ most
two_by_default = pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in STACKS[:2] else pytest.mark.slow) for name in VARIANTS]
)


def pairs() -> list[tuple[list[int], list[int]]]:
    return [([5, 6, 7, EOS], [4, 5, EOS]), ([3, EOS], [9, 8, 7, EOS]), ([10, 4, EOS], [EOS])]


def padded(sequences: list[list[int]], length: int) -> jax.Array:
    return jnp.array([sequence + [0] * (length - len(sequence)) for sequence in sequences], jnp.int32)


def rows(source: int = 4, target: int = 4) -> Batch:
    """The pairs, one a row."""
    return unpacked(padded([s for s, _ in pairs()], source), padded([t for _, t in pairs()], target))


def wide() -> Batch:
    return rows(source=12, target=12)


def packed() -> Batch:
    """The pairs one after another in the first of three rows, with padding after them. Of the shape of `wide`."""

    def side(sequences: list[list[int]]):
        ids = [token for sequence in sequences for token in sequence]
        segments = [number for number, sequence in enumerate(sequences, start=1) for _ in sequence]
        positions = [position for sequence in sequences for position in range(len(sequence))]
        return [padded([x, [], []], 12) for x in (ids, segments, positions)]

    return Batch(*side([s for s, _ in pairs()]), *side([t for _, t in pairs()]))


@functools.cache
def build(variant: str, **changes) -> tuple[Transformer, dict]:
    model = Transformer(dataclasses.replace(TINY, **VARIANTS[variant], **changes))

    def params():
        # Norm scales and biases start at 1 and 0: move all, so that none can be forgotten unseen.
        leaves, tree = jax.tree.flatten(model.init(jax.random.key(0), rows()))
        keys = jax.random.split(jax.random.key(1), len(leaves))
        noisy = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
        return jax.tree.unflatten(tree, noisy)

    return model, jax.jit(params)()


@functools.partial(jax.jit, static_argnums=0)
def apply(model: Transformer, params, batch: Batch) -> jax.Array:
    return model.apply(params, batch)


def real_logits(logits: jax.Array, segments: jax.Array) -> np.ndarray:
    """Logits [tokens, V] of the tokens which are not padding, row by row."""
    return np.asarray(logits)[np.asarray(segments) != 0][:, :V]


@two_by_default
def test_packed_pairs_have_the_logits_of_unpacked_ones(variant):
    model, params = build(variant)
    apart, together = rows(), packed()
    np.testing.assert_allclose(
        real_logits(apply(model, params, together), together.target_segments),
        real_logits(apply(model, params, apart), apart.target_segments),
        atol=1e-5,
    )


@two_by_default
def test_padding_does_not_change_logits(variant):
    model, params = build(variant)
    narrow, padded_more = rows(), wide()
    np.testing.assert_allclose(
        real_logits(apply(model, params, padded_more), padded_more.target_segments),
        real_logits(apply(model, params, narrow), narrow.target_segments),
        atol=1e-5,
    )


@two_by_default
def test_garbage_in_the_padding_does_not_change_logits(variant):
    model, params = build(variant)
    batch = wide()
    garbage = batch._replace(
        source=jnp.where(batch.source_segments == 0, 7, batch.source),
        target=jnp.where(batch.target_segments == 0, 8, batch.target),
    )
    np.testing.assert_array_equal(
        real_logits(apply(model, params, garbage), batch.target_segments),
        real_logits(apply(model, params, batch), batch.target_segments),
    )


@pytest.mark.parametrize(
    ("variant", "scan"),
    [
        pytest.param(name, scan, marks=() if name in STACKS and not scan else pytest.mark.slow)
        for name in VARIANTS
        for scan in (False, True)
        if name in STACKS or not scan
    ],
)
def test_cached_steps_give_the_teacher_forced_logits_also_after_beams_are_reordered(variant, scan):
    """Two beams decode two targets of each sentence; before each step they swap places, so each must find its own
    past. The second sentence waits a step, so the two are at different positions."""
    model, params = build(variant)
    source = padded([[5, 6, 7, EOS], [3, EOS]], 5)
    targets = jnp.array([[[4, 5, 6, 7], [9, 3, 9, 8]], [[8, 8, 3, 10], [4, 10, 5, 6]]], jnp.int32)  # [B, K, T]
    forced = jnp.stack([apply(model, params, unpacked(source, targets[:, k])) for k in (0, 1)], axis=1)
    if scan:
        model = Transformer(dataclasses.replace(model.config, scan=True))
        params = {"params": stack_layers(params["params"])}

    segments = (source != 0).astype(jnp.int32)
    encoded = model.apply(params, source, segments, method="encode")
    cache = model.apply(params, encoded, segments, beams=2, length=6, method="init_cache")
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(cache))
    inputs = jnp.pad(targets, ((0, 0), (0, 0), (1, 0)))
    decode_step = jax.jit(lambda *arguments: model.apply(params, *arguments, method="decode_step"))
    for step in range(5):
        position = np.array([step, max(0, step - 1)])
        order = np.where(position[:, None] % 2, [1, 0], [0, 1])  # [B, K]: which target each beam decodes
        parent = jnp.asarray(np.where(position[:, None], [1, 0], [0, 1]), jnp.int32)
        token = inputs[np.arange(2)[:, None], order, position[:, None]]
        logits, cache = decode_step(token, parent, jnp.asarray(position, jnp.int32), cache)
        for sentence in range(2):
            if position[sentence] < 4:
                expected = forced[sentence, order[sentence], position[sentence], :V]
                np.testing.assert_allclose(logits[sentence, :, :V], expected, atol=1e-5)


@pytest.mark.parametrize(("variant", "scan"), [("relative", False), ("rotary", True)])
def test_the_live_alone_get_the_logits_that_they_get_among_all(variant, scan):
    model, params = build(variant)
    if scan:
        model = Transformer(dataclasses.replace(model.config, scan=True))
        params = {"params": stack_layers(params["params"])}
    source = padded([[5, 6, 7, EOS], [3, EOS], [9, 4, EOS]], 4)
    encoded = model.apply(params, source, method="encode")
    segments = (source != 0).astype(jnp.int32)
    cache = model.apply(params, encoded, segments, beams=2, length=4, method="init_cache")
    decode_step = jax.jit(lambda *arguments: model.apply(params, *arguments, method="decode_step"))
    draw = np.random.default_rng(0)
    for step, count in enumerate([4, 3, 1, 4]):  # at most two rows of two
        live = draw.permutation(np.arange(6) < count).reshape(3, 2)
        token = jnp.asarray(draw.integers(1, V, (3, 2)), jnp.int32)
        parent = jnp.asarray(draw.integers(0, 2, (3, 2)), jnp.int32)
        alone, own = decode_step(token, parent, step, cache, live_among(jnp.asarray(live), rows=2))
        logits, cache = decode_step(token, parent, step, cache, None)
        np.testing.assert_allclose(alone[live], logits[live], atol=1e-5)
        np.testing.assert_array_equal(own.ancestry, cache.ancestry)
        for kept, expected in zip(jax.tree.leaves(own.past), jax.tree.leaves(cache.past), strict=True):
            written = (np.moveaxis(np.take(np.asarray(x), step, axis=-3), -2, 1)[live] for x in (kept, expected))
            np.testing.assert_allclose(*written, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("paper", ({"remat": True}, {"scan": True}, {"scan": True, "remat": True})),
        *((variant, ({"scan": True, "remat": True},)) for variant in STACKS[1:]),
    ],
)
def test_scan_and_remat_change_neither_logits_nor_gradients_nor_dropout(variant, changes):
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "feed_forward_dropout": 0.2}
    model, params = build(variant, encoder_layers=2, **rates)

    def logits_and_gradient(model, params):
        def loss(params):
            logits = model.apply(params, rows(), dropout_rng=jax.random.key(5))[..., :V]
            return jax.nn.log_softmax(logits)[..., 3].mean(), logits

        gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        return logits, gradient["params"]

    logits, gradient = logits_and_gradient(model, params)
    for options in changes:
        other = Transformer(dataclasses.replace(model.config, **options))
        scanned = "scan" in options
        their = {"params": stack_layers(params["params"])} if scanned else params
        their_logits, their_gradient = logits_and_gradient(other, their)
        np.testing.assert_allclose(their_logits, logits, atol=1e-5)
        jax.tree.map(
            lambda one, two: np.testing.assert_allclose(one, two, atol=1e-5),
            unstack_layers(their_gradient) if scanned else their_gradient,
            gradient,
        )


def test_decoder_sees_no_future_and_all_of_the_past():
    """The Jacobian of position t's output is exactly zero for every later input, and for no earlier one."""
    model, params = build("paper")
    source = padded([[5, 6, EOS]], 3)
    encoded = model.apply(params, source, method="encode")
    ones = jnp.ones((1, 5), jnp.int32)
    x = jax.random.normal(jax.random.key(0), (1, 5, TINY.width))

    def output(x):
        return model.apply(params, x, encoded, jnp.ones((1, 3), jnp.int32), ones, method="decode_embedded")

    influence = np.abs(jax.jit(jax.jacrev(output))(x)).sum(axis=(0, 2, 3, 5))  # [T, T]
    assert not np.triu(influence, k=1).any()
    assert influence[np.tril_indices(5)].all()


def test_encoder_is_not_causal():
    model, params = build("paper")
    x = jax.random.normal(jax.random.key(0), (1, 4, TINY.width))
    segments = jnp.ones((1, 4), jnp.int32)
    jacobian = jax.jit(jax.jacrev(lambda x: model.apply(params, x, segments, method="encode_embedded")))
    assert np.abs(jacobian(x)).sum(axis=(0, 2, 3, 5)).all()


def test_a_decoder_need_not_be_causal():
    model, params = build("paper")
    batch = rows()
    encoded = model.apply(params, batch.source, method="encode")

    def first_logits(target, causal):
        arguments = params, target, encoded, batch.source_segments
        return np.asarray(model.apply(*arguments, causal=causal, method="decode")[:, 0])

    changed = batch.target_input.at[:, -1].set(9)
    np.testing.assert_array_equal(first_logits(batch.target_input, True), first_logits(changed, True))
    assert not np.allclose(first_logits(batch.target_input, False), first_logits(changed, False))


@two_by_default
def test_any_layers_attention_weights_can_be_had(variant):
    model, params = build(variant)
    batch = rows()
    weights = model.apply(params, batch, method="attention_weights")
    assert weights.encoder.shape == (3, 1, 2, 4, 4)
    assert weights.decoder.shape == weights.cross.shape == (3, 2, 2, 4, 4)
    for of_one_kind in weights:
        np.testing.assert_allclose(of_one_kind.sum(-1), 1, rtol=1e-5)
    assert not np.triu(np.asarray(weights.decoder[0]), k=1)[..., :3, :3].any()
    padding = np.asarray(batch.source_segments)[:, None, None, None] == 0
    assert not np.asarray(weights.cross)[:2][np.broadcast_to(padding, weights.cross.shape)[:2]][..., None].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_of_padding_only_is_finite_and_leaves_its_neighbours_alone(dtype):
    with jax.numpy_dtype_promotion("standard"):  # Flax's layers promote bfloat16 implicitly
        model, params = build("paper", dtype=DType(dtype))
        batch = rows()
        empty = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros_like(x[:1])]), batch)
        logits = apply(model, params, empty)
        assert np.isfinite(logits).all()
        np.testing.assert_allclose(logits[:3], apply(model, params, batch), atol=1e-5 if dtype == "float32" else 0.1)


def test_bfloat16_computes_in_bfloat16_and_stays_near_float32():
    with jax.numpy_dtype_promotion("standard"):
        model, params = build("paper")
        half = Transformer(dataclasses.replace(model.config, dtype=DType.BFLOAT16))
        assert half.apply(params, rows().source, method="encode").dtype == jnp.bfloat16
        exact, rough = model.apply(params, rows()), half.apply(params, rows())
        assert rough.dtype == jnp.float32
        scale = np.abs(exact[..., :V]).max()
        assert np.abs(exact - rough)[..., :V].max() < 0.1 * scale
        initial = jax.eval_shape(half.init, jax.random.key(0), rows())
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(initial))


def test_padded_vocabulary_has_no_probability():
    model, params = build("paper")
    logits = model.apply(params, rows())
    assert logits.shape[-1] == 16
    assert not np.asarray(jax.nn.softmax(logits))[..., V:].any()


@pytest.mark.parametrize(("tying", "tables"), [(Tying.ALL, 1), (Tying.DECODER, 2), (Tying.NONE, 3)])
def test_tying_decides_how_many_embedding_tables_there_are(tying, tables):
    model = Transformer(dataclasses.replace(TINY, tying=tying))
    params = jax.eval_shape(model.init, jax.random.key(0), rows())["params"]
    assert sum("table" in part for part in params.values()) == tables


def test_embeddings_are_scaled_and_normalised_as_the_config_says():
    ids = jnp.array([[5, 6]], jnp.int32)
    for variant, scale, first in (("paper", 4.0, 0), ("bart", 1.0, 2)):
        model, params = build(variant)
        table = params["params"]["source_embedding"]["table"]
        x = table[ids[0]] * scale + sinusoids(jnp.array([first, first + 1], jnp.int32), 16)
        if variant == "bart":
            norm = params["params"]["source_embedding_norm"]
            x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
            x = x * norm["scale"][None] + norm["bias"][None]
        np.testing.assert_allclose(model.apply(params, ids, method="embed_source")[0], x, atol=1e-5)


def test_the_output_bias_is_added_to_every_real_logit_and_to_no_padded_one():
    model, params = build("bart")
    moved = {**params["params"], "output_bias": params["params"]["output_bias"] + jnp.arange(16.0)}
    difference = apply(model, {"params": moved}, rows()) - apply(model, params, rows())
    np.testing.assert_allclose(difference[:, :, :V], np.broadcast_to(np.arange(V), (3, 4, V)), atol=1e-5)
    np.testing.assert_array_equal(difference[:, :, V:], 0)


def test_a_batch_may_be_a_constant_of_a_compiled_function():
    """Its ids are known inside, and are looked at there."""
    model, params = build("learned")
    batch = rows()
    logits = jax.jit(lambda params: model.apply(params, batch))(params)
    np.testing.assert_allclose(logits, apply(model, params, batch), atol=1e-6)


def test_tying_all_needs_one_vocabulary():
    model = Transformer(dataclasses.replace(TINY, source_vocab=V + 1))
    with pytest.raises(UserError, match="tying is all, but source_vocab is 12 and target_vocab 11"):
        model.init(jax.random.key(0), rows())


def test_a_vocabulary_must_be_given():
    model = Transformer(dataclasses.replace(TINY, target_vocab=None, tying=Tying.DECODER))
    with pytest.raises(UserError, match="target_vocab is not set"):
        model.init(jax.random.key(0), rows())


def test_ids_outside_the_vocabulary_are_refused_or_poison_the_result_but_are_never_clamped():
    model, params = build("paper")
    wrong = padded([[5, V + 20, EOS]], 3)
    with pytest.raises(UserError, match=f"token id {V + 20} is outside the vocabulary of size {V}"):
        model.apply(params, wrong, method="encode")
    assert np.isnan(jax.jit(lambda ids: model.apply(params, ids, method="encode"))(wrong)).any()


def test_positions_past_a_learned_table_are_refused_or_poison_the_result_but_are_never_clamped():
    model, params = build("learned")
    long = jnp.full((1, 30), 5, jnp.int32)
    with pytest.raises(UserError, match=r"position 29 is outside config\.model\.max_positions of size 24"):
        model.apply(params, long, method="encode")
    assert np.isnan(jax.jit(lambda ids: model.apply(params, ids, method="encode"))(long)).any()


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "feed_forward_dropout"])
def test_each_dropout_rate_acts_only_with_a_key(rate):
    off = {"dropout": 0.0, "attention_dropout": 0.0, "feed_forward_dropout": 0.0}
    undropped, params = build("paper", **off)
    model = Transformer(dataclasses.replace(undropped.config, **{rate: 0.5}))
    plain, one, two = (
        model.apply(params, rows(), dropout_rng=key) for key in (None, *jax.random.split(jax.random.key(0)))
    )
    assert not np.allclose(plain, one)
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(undropped.apply(params, rows(), dropout_rng=jax.random.key(0)), plain)
