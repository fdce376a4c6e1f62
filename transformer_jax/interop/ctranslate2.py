"""A CTranslate2 model directory, written through that library's own specifications.

    translator = ctranslate2.Translator(PATH)
    pieces = source.encode(line, out_type=str)  # source.spm is in PATH
    translator.translate_batch([pieces], beam_size=4, length_penalty=…)

The decoder starts from our id 0, a piece of the target vocabulary like any other there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.batch import EOS, PAD, UNK
from transformer_jax.config import Activation, Norm, NormPlace, Positions, TransformerConfig, Tying
from transformer_jax.data.segmenters import MODEL
from transformer_jax.errors import UserError
from transformer_jax.interop.huggingface_export import position_table
from transformer_jax.interop.model import Mapped, Model, Path, new_directory
from transformer_jax.parameters import flat

POSITIONS = 2048  # rows of the table of sinusoids: longer texts are refused there


def write(model: Model, path: Path, *, dtype: str = "float32") -> list[Mapped]:
    """
    Raises:
      UserError: if CTranslate2 is not installed, or the model has a part that it has not; it names the field.
    """
    _check_writable(model.config.model)
    export = _Export(model)
    spec = export.spec()
    tokenizer = model.tokenizer
    spec.register_source_vocabulary(list(tokenizer.source.pieces))
    spec.register_target_vocabulary(list(tokenizer.target.pieces))
    pieces = tokenizer.target.pieces
    spec.config.bos_token = spec.config.decoder_start_token = pieces[PAD]
    spec.config.eos_token, spec.config.unk_token = pieces[EOS], pieces[UNK]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = model.config.model.norm_epsilon
    spec.validate()
    spec.optimize(quantization=dtype)
    with new_directory(path) as unfinished:
        spec.save(str(unfinished))
        for side, segmenter in (("source", tokenizer.source), ("target", tokenizer.target)):
            if MODEL in segmenter.files:
                (unfinished / f"{side}.spm").write_bytes(segmenter.files[MODEL])
    return export.mapped


def _check_writable(config: TransformerConfig) -> None:
    head = config.width // config.heads
    widths = {"key_width": config.key_width or head, "value_width": config.value_width or head}
    for field, width in widths.items():
        if width != head:
            raise UserError(
                f"config.model.{field} is {width}; a head of CTranslate2's is width / heads wide, {head}. "
                "Export the model as a bundle."
            )


class _Export:
    """The specification of a model, and what became of what."""

    def __init__(self, model: Model):
        self.config, self.leaves = model.config.model, flat(model.params)
        self.mapped: list[Mapped] = []
        self._specs = _specs()

    def spec(self) -> Any:
        config, specs = self.config, self._specs
        activations = {
            Activation.RELU: specs.common_spec.Activation.RELU,
            Activation.GELU: specs.common_spec.Activation.GELU,
            Activation.GELU_TANH: specs.common_spec.Activation.GELUTanh,
            Activation.SWISH: specs.common_spec.Activation.SWISH,
        }
        options = {
            "pre_norm": config.norm_place == NormPlace.PRE,
            "activation": activations[Activation(config.activation)],
            "layernorm_embedding": config.embedding_norm,
            "relative_position": config.positions == Positions.RELATIVE,
            "ffn_glu": config.gated,
            "rms_norm": config.norm == Norm.RMS,
            "rotary_dim": 0 if config.positions == Positions.ROTARY else None,
            "rotary_interleave": True,
        }
        spec = specs.transformer_spec
        encoder = spec.TransformerEncoderSpec(config.encoder_layers, config.heads, **options)
        decoder = spec.TransformerDecoderSpec(config.decoder_layers, config.heads, **options)
        for stack, name, side in ((encoder, "encoder", "source"), (decoder, "decoder", "target")):
            self._stack(stack, name, side)
        self._set(encoder.embeddings[0], "weight", "source_embedding/table", rows=config.source_vocab)
        target = "source_embedding/table" if config.tying == Tying.ALL else "target_embedding/table"
        self._set(decoder.embeddings, "weight", target, rows=config.target_vocab)
        output = "projection/table" if config.tying == Tying.NONE else target
        self._set(decoder.projection, "weight", output, rows=config.target_vocab)
        if config.output_bias:
            self._set(decoder.projection, "bias", "output_bias", rows=config.target_vocab)
        return spec.TransformerSpec(encoder, decoder)

    def _stack(self, spec: Any, name: str, side: str) -> None:
        config = self.config
        spec.scale_embeddings = config.embedding_scale
        if config.positions == Positions.SINUSOIDAL:
            spec.position_encodings.encodings = position_table(config, POSITIONS)
        elif config.positions == Positions.LEARNED:
            self._set(spec.position_encodings, "encodings", f"{side}_positions")
        elif hasattr(spec, "position_encodings"):  # rotary and relative positions are in the layers
            del spec.position_encodings
        if config.embedding_norm:
            self._norm(spec.layernorm_embedding, f"{side}_embedding_norm")
        if config.norm_place == NormPlace.PRE:
            self._norm(spec.layer_norm, f"{name}/final_norm")
        for index, layer in enumerate(spec.layer):
            path = f"{name}/layers_{index}"
            self._attention(layer.self_attention, f"{path}/self_attention", fused=("query", "key", "value"))
            if name == "decoder":
                self._attention(layer.attention, f"{path}/cross_attention", fused=("key", "value"))
            self._linear(layer.ffn.linear_0, [f"{path}/feed_forward/hidden"])
            self._linear(layer.ffn.linear_1, [f"{path}/feed_forward/output"])
            if config.gated:
                self._linear(layer.ffn.linear_0_noact, [f"{path}/feed_forward/gate"])
            self._norm(layer.ffn.layer_norm, f"{path}/feed_forward_residual/normalize")

    def _attention(self, spec: Any, path: str, *, fused: Sequence[str]) -> None:
        if "query" not in fused:
            self._linear(spec.linear[0], [f"{path}/query"])
        self._linear(spec.linear[-2], [f"{path}/{part}" for part in fused])
        self._linear(spec.linear[-1], [f"{path}/output"])
        self._norm(spec.layer_norm, f"{path}_residual/normalize")
        for part in ("keys", "values"):
            if f"{path}/relative_{part}" in self.leaves:
                self._set(spec, f"relative_position_{part}", f"{path}/relative_{part}")

    def _linear(self, spec: Any, paths: Sequence[str]) -> None:
        """The projections side by side, stored as [out, in]."""
        spec.weight = np.concatenate([self._leaf(f"{path}/kernel").T for path in paths])
        if f"{paths[0]}/bias" in self.leaves:
            spec.bias = np.concatenate([self._leaf(f"{path}/bias") for path in paths])

    def _norm(self, spec: Any, path: str) -> None:
        self._set(spec, "gamma", f"{path}/scale")
        if self.config.norm == Norm.LAYER:
            self._set(spec, "beta", f"{path}/bias")

    def _set(self, spec: Any, name: str, path: str, rows: int | None = None) -> None:
        setattr(spec, name, self._leaf(path)[:rows])

    def _leaf(self, path: str) -> np.ndarray:
        leaf = np.ascontiguousarray(self.leaves[path], np.float32)
        self.mapped.append(Mapped("→ model.bin", path, leaf.shape))
        return leaf


def _specs() -> Any:
    try:
        import ctranslate2.specs  # its own package, not this module: imports here are absolute
    except ImportError as error:
        raise UserError("an export to CTranslate2 needs it: pip install ctranslate2.") from error
    return ctranslate2.specs
