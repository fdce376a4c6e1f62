"""A trace says what the model computed: each array follows from the others by the paper's formulas, in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import BOS, EOS, unpacked
from transformer_jax.config import Activation, DType, Norm, NormPlace, Positions, TransformerConfig, Tying
from transformer_jax.errors import UserError
from transformer_jax.inspect.trace import named, trace
from transformer_jax.nn.positions import sinusoids
from transformer_jax.nn.transformer import Transformer

V = 11
TINY = TransformerConfig(
    encoder_layers=2,
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
    "relative": {"positions": Positions.RELATIVE, "norm_place": NormPlace.PRE, "scan": True},
    "rotary": {"positions": Positions.ROTARY, "gated": True, "activation": Activation.SWISH, "norm": Norm.RMS},
    "learned": {"positions": Positions.LEARNED, "tying": Tying.NONE, "attention_bias": True, "remat": True},
    "wide values": {"tying": Tying.DECODER, "key_width": 4, "value_width": 6, "scan": True, "remat": True},
    "embedding norm": {"embedding_norm": True, "embedding_scale": False, "output_bias": True, "first_position": 2},
}
SOURCE, TARGET = [5, 6, 7, 10, EOS], [4, 5, EOS]
variants = pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in ("paper", "relative") else pytest.mark.slow) for name in VARIANTS],
)


@functools.cache
def build(variant: str):
    """The model and its parameters in NumPy: none is 0 or 1, so that none can be forgotten unseen."""
    model = Transformer(dataclasses.replace(TINY, **VARIANTS[variant]))
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), batch())
    return model, jax.tree.map(lambda leaf: rng.normal(size=leaf.shape, scale=0.4).astype(np.float32), shapes)


@functools.cache
def traced(variant: str):
    return trace(*build(variant), SOURCE, TARGET)


@functools.partial(jax.jit, static_argnums=0)
def applied(model, params):
    """Logits and attention weights as the model itself gives them."""
    return model.apply(params, batch())[0, :, :V], model.apply(params, batch(), method="attention_weights")


def batch():
    return unpacked(jnp.array([SOURCE], jnp.int32), jnp.array([TARGET], jnp.int32))


def attentions(variant: str):
    """Every attention sub-layer of the model."""
    for stack in (traced(variant).encoder, traced(variant).decoder):
        for layer in stack.layers:
            yield layer.self_attention
            if layer.cross_attention is not None:
                yield layer.cross_attention


def close(found, expected, **tolerance):
    np.testing.assert_allclose(found, expected, **{"atol": 1e-5, "rtol": 1e-5} | tolerance)


@variants
def test_logits_and_weights_are_the_models(variant):
    seen, (logits, weights) = traced(variant), applied(*build(variant))
    close(seen.logits, logits)
    for found, expected in zip((seen.encoder_weights, seen.decoder_weights, seen.cross_weights), weights, strict=True):
        close(found, expected[0])
    close(seen.probabilities, jax.nn.softmax(seen.logits))


@variants
def test_scores_follow_from_queries_and_keys_and_weights_from_scores(variant):
    for one in attentions(variant):
        scores = np.einsum("NTH,NSH->NTS", one.queries, one.keys)
        if one.relative is not None:  # q (k + a^K), each pair with the vector of its distance
            vectors = one.relative.keys[one.relative.distances.argmax(-1)]  # [T, S, H]
            scores = (one.queries[:, :, None] * (one.keys[:, None] + vectors[None])).sum(-1)
        close(one.scores, scores)
        close(one.scaled_scores, scores / one.queries.shape[-1] ** 0.5)
        assert (one.masked_scores[:, ~one.mask] == -np.inf).all()
        exponentials = np.exp(one.scaled_scores) * one.mask
        close(one.weights, exponentials / exponentials.sum(-1, keepdims=True))


@variants
def test_heads_are_values_weighted(variant):
    for one in attentions(variant):
        heads = one.weights @ one.values
        if one.relative is not None:
            vectors = one.relative.values[one.relative.distances.argmax(-1)]
            heads += np.einsum("NTS,TSH->NTH", one.weights, vectors)
        close(one.heads, heads)


def test_queries_are_the_frame_s_input_times_the_models_matrix():
    params = build("paper")[1]["params"]
    for index, layer in enumerate(traced("paper").decoder.layers):
        for name in ("self_attention", "cross_attention"):
            one, weights = getattr(layer, name), params["decoder"][f"layers_{index}"][name]
            close(np.concatenate(one.queries, axis=1), one.frame.entered @ weights["query"]["kernel"])
            close(one.frame.update, np.concatenate(one.heads, axis=1) @ weights["output"]["kernel"])


@variants
def test_the_residual_stream_is_one_chain_from_the_embeddings_to_the_logits(variant):
    config, params = build(variant)[0].config, build(variant)[1]["params"]
    pre = config.norm_place == NormPlace.PRE
    for stack in (traced(variant).encoder, traced(variant).decoder):
        stream = stack.embedded
        for layer in stack.layers:
            for part in (layer.self_attention, layer.cross_attention, layer.feed_forward):
                if part is None:
                    continue
                close(part.frame.before, stream)
                if pre:
                    close(part.frame.after, part.frame.before + part.frame.update)
                else:
                    close(part.frame.entered, part.frame.before)
                stream = part.frame.after
        if not pre:
            close(stack.output, stream)
    table = params["source_embedding" if config.tying == Tying.ALL else _projection(config)]["table"]
    bias = params["output_bias"] if config.output_bias else np.zeros(len(table))
    close(traced(variant).logits, (traced(variant).decoder.output @ table.T + bias)[:, :V])


def _projection(config):
    return "target_embedding" if config.tying == Tying.DECODER else "projection"


def test_a_post_norm_frame_normalises_the_sum_and_a_pre_norm_one_its_input():
    def standard(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def norm(variant, stack, layer, name):
        params = build(variant)[1]["params"][stack]
        scanned = "layers" in params
        one = params["layers" if scanned else f"layers_{layer}"][f"{name}_residual"]["normalize"]
        return {key: leaf[layer] if scanned else leaf for key, leaf in one.items()}

    for variant in ("paper", "relative"):
        frame = traced(variant).decoder.layers[1].feed_forward.frame
        before, after = (frame.before + frame.update, frame.after) if variant == "paper" else frame[:2]
        weights = norm(variant, "decoder", 1, "feed_forward")
        close(after, standard(before) * weights["scale"] + weights["bias"], atol=1e-4)


def test_the_feed_forward_block_is_equation_2():
    weights = build("paper")[1]["params"]["encoder"]["layers_1"]["feed_forward"]
    one = traced("paper").encoder.layers[1].feed_forward
    close(one.hidden, one.frame.entered @ weights["hidden"]["kernel"] + weights["hidden"]["bias"])
    close(one.activated, np.maximum(one.hidden, 0))
    close(one.frame.update, one.activated @ weights["output"]["kernel"] + weights["output"]["bias"])


def test_embeddings_are_rows_of_the_matrix_and_positions_are_added():
    seen, params = traced("paper"), build("paper")[1]["params"]
    table = np.asarray(params["source_embedding"]["table"])
    close(seen.encoder.tokens, table[SOURCE] * 4)  # √16
    close(seen.decoder.tokens, table[[BOS, 4, 5]] * 4)
    assert seen.target_input.tolist() == [BOS, 4, 5]
    close(seen.encoder.positions, sinusoids(jnp.arange(5), 16))
    close(seen.decoder.embedded, seen.decoder.tokens + seen.decoder.positions)


def test_positions_are_what_is_added_and_none_where_nothing_is():
    params = build("learned")[1]["params"]
    close(traced("learned").decoder.positions, params["target_positions"][:3])
    close(traced("embedding norm").encoder.positions, sinusoids(jnp.arange(2, 7), 16))
    for variant in ("relative", "rotary"):
        assert traced(variant).encoder.positions is None
        assert traced(variant).decoder.positions is None


def test_rotated_queries_turn_with_their_position_and_keep_their_length():
    model, params = build("rotary")
    same = trace(model, params, [5, 5, 5, 5], TARGET).encoder.layers[0].self_attention.queries
    close(np.linalg.norm(same, axis=-1), np.linalg.norm(same[:, :1], axis=-1).repeat(4, axis=1))
    assert np.abs(same[:, 1] - same[:, 0]).max() > 0.1


def test_names_lead_to_the_arrays():
    seen = traced("relative")
    names = named(seen)
    assert names["decoder.layers.1.cross_attention.scores"] is seen.decoder.layers[1].cross_attention.scores
    assert names["encoder.layers.0.self_attention.relative.keys"].shape == (5, 8)
    assert all(isinstance(array, np.ndarray) for array in names.values())
    assert "encoder.positions" not in names
    assert "encoder.positions" in named(traced("paper"))


def test_the_arrays_of_a_bfloat16_model_are_float32_for_numpy_to_work_with():
    model, params = build("paper")
    half = Transformer(dataclasses.replace(model.config, dtype=DType.BFLOAT16))
    with jax.numpy_dtype_promotion("standard"):  # as Flax's norms want it
        seen, logits = trace(half, params, SOURCE, TARGET), applied(half, params)[0]
    attention = seen.decoder.layers[1].cross_attention
    assert {array.dtype.name for array in named(seen).values()} == {"float32", "int32", "bool"}
    close(seen.logits, logits, atol=0.1)
    exponentials = np.exp(attention.masked_scores)
    close(attention.weights, exponentials / exponentials.sum(-1, keepdims=True), atol=1e-3)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([], [EOS], "the source has no tokens"),
        ([5, V, EOS], [EOS], f"source id {V}: expected ids from 1 to 10"),
        ([5, EOS], [4, 0, EOS], "target id 0: expected"),
    ],
)
def test_ids_that_are_none_are_an_error(source, target, message):
    with pytest.raises(UserError, match=message):
        trace(*build("paper"), source, target)
