"""The configuration of an experiment: plain typed dataclasses, one for each floor of the library.

A file in `configs/` returns a `Config`; any field can be changed from the command line:

    python3 train.py --config=configs/multi30k.py --config.optimizer.warmup=800

`transformer_jax.config_check` says what is wrong with one; `to_json` and `from_json` keep it beside the run.
"""

import dataclasses
import enum
import json
import types
import typing

from transformer_jax.errors import UserError


class Norm(enum.StrEnum):
    """Which normalisation: LayerNorm (Ba et al., 2016) or RMSNorm (Zhang and Sennrich, 2019)."""

    LAYER = "layer"
    RMS = "rms"


class NormPlace(enum.StrEnum):
    """`post`: norm(x + f(x)), the paper; `pre`: x + f(norm(x)) and a last norm on top of each stack."""

    POST = "post"
    PRE = "pre"


class Activation(enum.StrEnum):
    """`gelu` is x Φ(x) itself, `gelu_tanh` its approximation (Hendrycks and Gimpel, 2016)."""

    RELU = "relu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWISH = "swish"


class Positions(enum.StrEnum):
    """How order enters the model: the paper's sinusoids, a learned table, rotary or relative positions."""

    SINUSOIDAL = "sinusoidal"
    LEARNED = "learned"
    ROTARY = "rotary"
    RELATIVE = "relative"


class SinusoidLayout(enum.StrEnum):
    """`interleaved`: sin, cos, sin, cos … (the paper); `concatenated`: all sines, then all cosines (Hugging Face);
    `t2t`: concatenated, with rates 10000^(−i / (D/2 − 1)) (T2T, Marian)."""

    INTERLEAVED = "interleaved"
    CONCATENATED = "concatenated"
    T2T = "t2t"


class Tying(enum.StrEnum):
    """Which of source embedding, target embedding and output projection are one matrix."""

    NONE = "none"
    DECODER = "decoder"
    ALL = "all"


class DType(enum.StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class AttentionKernel(enum.StrEnum):
    """`implementation` of `jax.nn.dot_product_attention`; `cudnn` needs an NVIDIA GPU and bfloat16."""

    XLA = "xla"
    CUDNN = "cudnn"


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class TransformerConfig:
    """The model. The defaults are the base model of the paper (table 3).

    It is hashable because Flax and `jit` take modules as static values: once it is in a model, don't change it.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512  # D
    heads: int = 8  # N
    key_width: int | None = None  # H of queries and keys; None: D / N
    value_width: int | None = None  # H of values; None: D / N
    feed_forward: int = 2048  # F
    activation: Activation = Activation.RELU
    gated: bool = False  # a gated feed-forward layer (Shazeer, 2020): two input projections, multiplied
    attention_bias: bool = False
    norm: Norm = Norm.LAYER
    norm_place: NormPlace = NormPlace.POST
    norm_epsilon: float = 1e-6
    embedding_scale: bool = True  # embeddings times √D (section 3.4)
    embedding_norm: bool = False  # a norm of embedding + position, on each side (BART)
    output_bias: bool = False  # a bias on the logits
    positions: Positions = Positions.SINUSOIDAL
    sinusoid_layout: SinusoidLayout = SinusoidLayout.INTERLEAVED
    first_position: int = 0  # what sinusoids count from; 2 in fairseq
    max_positions: int = 1024  # rows of the learned table
    relative_distance: int = 16  # k, where relative positions are clipped
    tying: Tying = Tying.ALL
    dropout: float = 0.1  # on the embeddings and on each sub-layer's output
    attention_dropout: float = 0.0  # on the attention weights
    feed_forward_dropout: float = 0.0  # on the hidden layer of the feed-forward block
    source_vocab: int | None = None  # None: the tokenizer's
    target_vocab: int | None = None
    vocab_multiple: int = 128  # embeddings are padded to a multiple of this; padded logits are masked
    dtype: DType = DType.FLOAT32  # of the computation; parameters are float32
    attention_kernel: AttentionKernel = AttentionKernel.XLA
    remat: bool = False  # recompute each layer in the backward pass
    scan: bool = False  # one compiled layer, scanned over stacked parameters


class TokenizerKind(enum.StrEnum):
    UNIGRAM = "unigram"
    BPE = "bpe"


@dataclasses.dataclass(kw_only=True)
class TokenizerConfig:
    """SentencePiece. Trained from the training corpus on first use unless files are given."""

    kind: TokenizerKind = TokenizerKind.UNIGRAM
    vocab: int = 32_000
    joint: bool = True  # one vocabulary for both languages
    byte_fallback: bool = False
    coverage: float = 1.0  # of characters
    split_digits: bool = False  # each digit is a piece of its own, so that numbers are copied digit by digit
    sample: int = 2_000_000  # lines of the corpus that training looks at
    source_model: str | None = None  # a ready .model file; with `joint`, for both languages
    target_model: str | None = None
    sampling: float = 0.0  # subword sampling in training: α of unigram (0.1 is usual), p of BPE-dropout; 0: off


class OnBadPair(enum.StrEnum):
    DROP = "drop"
    ERROR = "error"


class PlanKind(enum.StrEnum):
    BUCKETS = "buckets"
    PACKING = "packing"


@dataclasses.dataclass(kw_only=True)
class PlanConfig:
    """How pairs become batches of few shapes. See `transformer_jax.data.plan`."""

    kind: PlanKind = PlanKind.BUCKETS
    tokens: int = 4096  # of each side of a batch, padding included: rows × padded length never exceeds it
    shapes: int = 12  # buckets: how many shapes are compiled
    row_length: int = 128  # packing: the length of a row, of both sides
    rows_multiple: int = 1  # the rows of a batch are a multiple of this (devices × accumulation)


@dataclasses.dataclass(kw_only=True)
class DataConfig:
    """Where the text comes from. Each corpus is one string; see `transformer_jax.data.corpus`:

    `phrasebook` · `a.en,a.de` · `pairs.tsv` · `-` (TSV on stdin) · `tfds:wmt14_translate/de-en:train`.
    Text files may be gzipped. On the command line a flag that comes several times gives several corpora.
    """

    source: str = "en"
    target: str = "de"
    train: tuple[str, ...] = ("phrasebook",)
    weights: tuple[float, ...] = ()  # how often each training corpus is seen in an epoch; (): once each
    dev: tuple[str, ...] = ("phrasebook",)
    test: tuple[str, ...] = ()  # scored once, when training ends
    max_length: int = 256  # tokens of a side, EOS counted; longer training pairs are bad
    max_ratio: float | None = None  # longest allowed ratio of the two lengths in tokens
    bad_pairs: OnBadPair = OnBadPair.DROP
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)


class OptimizerKind(enum.StrEnum):
    ADAM = "adam"
    ADAMW = "adamw"
    ADAFACTOR = "adafactor"


class Schedule(enum.StrEnum):
    """Learning-rate schedules. See `transformer_jax.training.optimizer`."""

    NOAM = "noam"  # the paper, section 5.3: peak scales D^-0.5 · min(s^-0.5, s · warmup^-1.5)
    T2T_RSQRT = "t2t_rsqrt"  # T2T transformer_base v3
    INVERSE_SQRT = "inverse_sqrt"
    COSINE = "cosine"
    CONSTANT = "constant"
    ADAFACTOR = "adafactor"  # min(1e-2, 1/√s)


class Nonfinite(enum.StrEnum):
    """What becomes of a step whose loss or gradient is not finite: it `stop`s the run, or makes no update (`skip`)."""

    STOP = "stop"
    SKIP = "skip"


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
    kind: OptimizerKind = OptimizerKind.ADAM
    schedule: Schedule = Schedule.NOAM
    peak: float = 1.0  # noam and t2t_rsqrt: the factor; inverse_sqrt, cosine, constant: the highest rate
    warmup: int = 4000
    floor: float = 0.0  # cosine: the rate at the last step, as a part of the peak
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    weight_decay: float = 0.0  # adamw: not on biases and norms
    clip: float | None = None  # global gradient norm
    nonfinite: Nonfinite = Nonfinite.STOP  # steps whose loss or gradient is not finite
    accumulate: int = 1  # micro-batches an update
    ema: float = 0.0  # decay of the average of the parameters, which evaluation then uses; 0: off
    label_smoothing: float = 0.1


class Metric(enum.StrEnum):
    BLEU = "bleu"
    LOSS = "loss"


@dataclasses.dataclass(kw_only=True)
class RunConfig:
    steps: int = 100_000
    seed: int = 0
    log_every: int = 100
    eval_every: int = 1000
    checkpoint_every: int = 1000
    keep: int = 5  # newest checkpoints kept
    keep_best: int = 1  # best checkpoints kept, beside the newest
    best: Metric = Metric.BLEU
    patience: int | None = None  # evaluations without a better one before training stops; None: never
    samples: int = 4  # translations shown at each evaluation
    average: int = 1  # newest checkpoints averaged for the final score and as `decode.py`'s default
    tensorboard: bool = True


class LengthPenalty(enum.StrEnum):
    """LP(L), L counting EOS: gnmt ((5+L)/6)^α, power L^α, none 1."""

    GNMT = "gnmt"
    POWER = "power"
    NONE = "none"


class SearchMethod(enum.StrEnum):
    """`beam`: the most probable translations, by beam search; `sample`: translations drawn at random."""

    BEAM = "beam"
    SAMPLE = "sample"


class EnsembleMean(enum.StrEnum):
    """What an ensemble takes the mean of: the members' probabilities, or their logarithms (normalised again)."""

    PROBABILITIES = "probabilities"
    LOG_PROBABILITIES = "log_probabilities"


class Beam(enum.StrEnum):
    """What a hypothesis that ends does to the beam: it keeps its place, and the beam is `shrinking` (Marian), or it is
    set aside, and the beam stays `full` (Hugging Face, CTranslate2, fairseq)."""

    SHRINKING = "shrinking"
    FULL = "full"


@dataclasses.dataclass(kw_only=True)
class SearchConfig:
    """How translations are searched. The defaults are the paper's (section 6.1); what is off costs nothing."""

    method: SearchMethod = SearchMethod.BEAM
    beam_size: int = 4  # hypotheses that are followed; 1: greedy
    beam: Beam = Beam.SHRINKING
    top_beams: int = 1  # translations of each sentence: the n best, or so many independent samples
    penalty: LengthPenalty = LengthPenalty.GNMT
    alpha: float = 0.6  # of the length penalty; above 0 favours long translations
    length_factor: float = 1.0  # output limit: ⌊this × source tokens⌋ + extra_length
    extra_length: int = 50  # see length_factor
    min_length: int = 0  # tokens, EOS counted, before which no translation ends
    forced_prefix: tuple[int, ...] = ()  # ids with which every translation begins, before its own prefix
    suppressed: tuple[int, ...] = ()  # ids that are never generated
    repetition_penalty: float = 1.0  # what log-probabilities of tokens that are there already are multiplied by
    no_repeat_ngram: int = 0  # no n-gram of this length comes twice; 0: any may
    groups: int = 1  # of a diverse beam search, each beam_size / groups wide
    diversity: float = 0.5  # what a token costs a group for each earlier group's hypothesis that took it
    temperature: float = 1.0  # this and what follows: sampling only
    top_k: int = 0  # only the k most probable tokens; 0: all
    top_p: float = 1.0  # only the fewest tokens that have this much of the probability
    min_p: float = 0.0  # only tokens at least this times as probable as the most probable one
    epsilon: float = 0.0  # only tokens at least this probable
    seed: int = 0  # of the samples
    ensemble: EnsembleMean = EnsembleMean.PROBABILITIES
    tokens: int = 4096  # source tokens × beams of a batch, padding included


@dataclasses.dataclass(kw_only=True)
class MeshConfig:
    """Devices along each axis; -1, which one of them may be: all that are left. See parallel.py."""

    data: int = -1  # share the rows of a batch
    fsdp: int = 1  # share the rows too, and hold a part of every matrix each
    tensor: int = 1  # share the heads, the feed-forward layer and the vocabulary


@dataclasses.dataclass(kw_only=True)
class Config:
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)  # final score, `decode.py`
    dev_search: SearchConfig = dataclasses.field(default_factory=lambda: SearchConfig(beam_size=1))  # while training
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)


def with_vocabularies(config: TransformerConfig, *, source: int, target: int) -> TransformerConfig:
    """The config of a model for a tokenizer with so many pieces.

    Raises:
      UserError: if it names others.
    """
    sizes = {"source_vocab": source, "target_vocab": target}
    for name, size in sizes.items():
        if getattr(config, name) not in (None, size):
            raise UserError(
                f"config.model.{name} is {getattr(config, name)}, but the tokenizer has {size} pieces. Leave it unset, "
                "or restore the tokenizer that the model was trained with."
            )
    return dataclasses.replace(config, **sizes)


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """Field names with dots → values."""
    flat = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            flat |= flatten(value, f"{prefix}{field.name}.")
        else:
            flat[prefix + field.name] = value
    return flat


def difference(one: Config, other: Config) -> list[str]:
    """The fields in which two configurations differ, as `name: value → value`."""
    before, after = flatten(one), flatten(other)
    return [f"{name}: {before[name]!r} → {after[name]!r}" for name in before if before[name] != after[name]]


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, *, path: str) -> Config:
    """The configuration in `text`, which stands in the file `path` (for messages).

    Raises:
      UserError: for unknown fields and those that come twice, wrong types and text that is not JSON.
    """
    try:
        values = json.loads(text, object_pairs_hook=_fields)
        json.dumps(values, ensure_ascii=False).encode()  # half of a surrogate pair, which JSON can name, is no text
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}). Restore it, or train again in another workdir.") from error
    return _build(Config, values, where=path)


def _fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field comes twice")
    return fields


def _build(kind: type, values: object, *, where: str):
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected an object with the fields of {kind.__name__}, found {values!r:.60}.")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise UserError(f"{where}: unknown field {unknown[0]!r:.60}; {kind.__name__} has {', '.join(hints)}.")
    return kind(**{name: _value(hints[name], value, where=f"{where}: {name}") for name, value in values.items()})


def _value(hint, value, *, where: str):
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, where=where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else _value(arguments[0], value, where=where)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_value(arguments[0], item, where=where) for item in value)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum) and value in list(hint):
        return hint(value)
    if hint is float and type(value) is int and abs(value) < 2**1000:  # a larger one is no float
        return float(value)
    if type(value) is hint:
        return value
    expected = ", ".join(hint) if isinstance(hint, type) and issubclass(hint, enum.StrEnum) else hint
    raise UserError(f"{where} is {value!r:.60}; expected {expected}.")
