"""The same weights in independent implementations give the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.batch import EOS, unpacked
from transformer_jax.config import Activation, NormPlace, SinusoidLayout, TransformerConfig
from transformer_jax.nn.stacks import Decoder, Encoder
from transformer_jax.nn.transformer import Transformer

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")

D, N, F, V = 32, 4, 48, 23


def randomized(params):
    """Norms and biases away from 1 and 0, so that a forgotten one shows."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def tensor(array) -> "torch.Tensor":
    return torch.from_numpy(np.array(array))


def linear(module, params) -> None:
    module.weight.data = tensor(params["kernel"].T)
    module.bias.data = tensor(params["bias"])


def norm(module, params) -> None:
    module.weight.data, module.bias.data = tensor(params["scale"]), tensor(params["bias"])


def torch_attention(module, params) -> None:
    parts = [params[name] for name in ("query", "key", "value")]
    module.in_proj_weight.data = tensor(jnp.concatenate([part["kernel"].T for part in parts]))
    module.in_proj_bias.data = tensor(jnp.concatenate([part["bias"] for part in parts]))
    linear(module.out_proj, params["output"])


def torch_layer(module, params) -> None:
    torch_attention(module.self_attn, params["self_attention"])
    linear(module.linear1, params["feed_forward"]["hidden"])
    linear(module.linear2, params["feed_forward"]["output"])
    frames = ["self_attention_residual", "cross_attention_residual", "feed_forward_residual"]
    if "cross_attention" in params:
        torch_attention(module.multihead_attn, params["cross_attention"])
    for number, frame in enumerate((f for f in frames if f in params), start=1):
        norm(getattr(module, f"norm{number}"), params[frame]["normalize"])


@pytest.mark.parametrize("place", NormPlace)
def test_stacks_equal_those_of_torch(place):
    config = TransformerConfig(
        encoder_layers=2, decoder_layers=2, width=D, heads=N, feed_forward=F, norm_place=place, attention_bias=True
    )
    source, target = jax.random.normal(jax.random.key(0), (2, 3, 7, D))
    target = target[:, :5]
    padding = np.arange(7)[None] >= np.array([[7], [4], [2]])
    mask = jnp.asarray(~padding)[:, None, None]

    encoder, decoder = Encoder(config), Decoder(config)
    encoder_params = randomized(jax.jit(encoder.init)(jax.random.key(1), source))
    decoder_params = randomized(jax.jit(decoder.init)(jax.random.key(2), target, source))
    encoded, _ = jax.jit(encoder.apply)(encoder_params, source, mask)
    decoded, _ = jax.jit(decoder.apply)(decoder_params, target, encoded, None, mask)

    options = dict(dropout=0.0, batch_first=True, norm_first=place == NormPlace.PRE, layer_norm_eps=1e-6)
    pre = place == NormPlace.PRE
    final = [torch.nn.LayerNorm(D, eps=1e-6) if pre else None for _ in range(2)]
    theirs = (
        torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(D, N, F, **options), 2, final[0], False).eval(),
        torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(D, N, F, **options), 2, final[1]).eval(),
    )
    for stack, params in zip(theirs, (encoder_params["params"], decoder_params["params"]), strict=True):
        for index, layer in enumerate(stack.layers):
            torch_layer(layer, params[f"layers_{index}"])
        if pre:
            norm(stack.norm, params["final_norm"])
    with torch.no_grad():
        their_encoded = theirs[0](tensor(source), src_key_padding_mask=tensor(padding))
        future = torch.triu(torch.ones(5, 5, dtype=torch.bool), diagonal=1)
        their_decoded = theirs[1](
            tensor(target), their_encoded, tgt_mask=future, memory_key_padding_mask=tensor(padding)
        )
    np.testing.assert_allclose(np.asarray(encoded)[~padding], their_encoded.numpy()[~padding], atol=1e-4)
    np.testing.assert_allclose(decoded, their_decoded.numpy(), atol=1e-4)


def marian_attention(module, params) -> None:
    for theirs, ours in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"), ("out_proj", "output")):
        linear(getattr(module, theirs), params[ours])


def marian_layer(module, params) -> None:
    marian_attention(module.self_attn, params["self_attention"])
    norm(module.self_attn_layer_norm, params["self_attention_residual"]["normalize"])
    if "cross_attention" in params:
        marian_attention(module.encoder_attn, params["cross_attention"])
        norm(module.encoder_attn_layer_norm, params["cross_attention_residual"]["normalize"])
    linear(module.fc1, params["feed_forward"]["hidden"])
    linear(module.fc2, params["feed_forward"]["output"])
    norm(module.final_layer_norm, params["feed_forward_residual"]["normalize"])


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_the_whole_model_equals_hugging_faces_marian():
    """Embeddings, their scale and tying, sinusoids, masks, stacks and logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours = Transformer(
        TransformerConfig(
            encoder_layers=2,
            decoder_layers=2,
            width=D,
            heads=N,
            feed_forward=F,
            activation=Activation.SWISH,
            attention_bias=True,
            sinusoid_layout=SinusoidLayout.CONCATENATED,
            source_vocab=V,
            target_vocab=V,
            vocab_multiple=1,
        )
    )
    source = jnp.array([[5, 6, 7, 8, EOS], [9, 4, EOS, 0, 0]], jnp.int32)
    target = jnp.array([[4, 5, EOS, 0], [9, 8, 7, EOS]], jnp.int32)
    batch = unpacked(source, target)
    params = randomized(jax.jit(ours.init)(jax.random.key(0), batch))
    config = transformers.MarianConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=N,
        decoder_attention_heads=N,
        encoder_ffn_dim=F,
        decoder_ffn_dim=F,
        activation_function="swish",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
        max_position_embeddings=16,
    )
    theirs = transformers.MarianMTModel(config).eval()
    weights = params["params"]
    theirs.model.shared.weight.data = tensor(weights["source_embedding"]["table"])
    theirs.tie_weights()
    theirs.final_logits_bias.zero_()
    for name in ("encoder", "decoder"):
        for index, layer in enumerate(getattr(theirs.model, name).layers):
            marian_layer(layer, weights[name][f"layers_{index}"])
    for module in theirs.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-6
    with torch.no_grad():
        logits = theirs(
            input_ids=tensor(source).long(),
            attention_mask=tensor(source != 0).long(),
            decoder_input_ids=tensor(batch.target_input).long(),
        ).logits
    real = np.asarray(batch.target_segments) != 0
    np.testing.assert_allclose(np.asarray(jax.jit(ours.apply)(params, batch))[real], logits.numpy()[real], atol=1e-4)
