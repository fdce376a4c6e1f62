"""Speed of training: this library, the same mathematics in bare JAX, PyTorch and Marian, on the same batches.

    python3 -m pip install -e '.[peers]' pymarian
    python3 benchmarks/train.py                    # the engines, and their compile time and memory
    python3 benchmarks/train.py --growth           # how the cost of a step grows with the sizes
    python3 benchmarks/train.py --end-to-end train.en,train.de   # from text to parameters, beside the steps alone

Everywhere the paper's model: post-norm, ReLU, sinusoids, one table of embeddings, dropout 0.1 on embeddings and
sub-layers only, label smoothing 0.1, Adam, float32, one pair a row, rows between half full and full. The engines take
turns, each in a process of its own, and medians of the times of a step are compared. A product of two 2048 × 2048
matrices takes its turn as well: the utilisation is what the model asks for (`model_flops`, padding included), as a part
of that speed.

2 CPU cores (AMD EPYC), JAX 0.10.2, PyTorch 2.13, pymarian 1.12; `--sizes small --rounds 5`, `--sizes base --rounds 3`:

    small, 190 GFLOP/s:         s a step  tokens/s  this / ours  utilisation  compile s  peak MB
    ours                           0.954      2013         1.00          65%        7.1     1329
    ours, memory given back        1.037      1851         1.09          60%        5.1     1418
    bare JAX, memory kept          0.909      2111         0.95          68%        4.7     1994
    bare JAX                       1.013      1895         1.06          61%        3.2     1404
    PyTorch                        1.032      1860         1.08          60%        0.0     1248
    PyTorch, compiled              1.049      1831         1.10          59%       38.6     1088
    Marian                         1.295      1483         1.36          48%

    base, 197 GFLOP/s:
    ours                           3.582       319         1.00          80%       11.1     2942
    ours, memory given back        4.476       255         1.25          64%        7.1     2984
    bare JAX, memory kept          3.716       308         1.04          77%        7.7     3205
    bare JAX                       4.728       242         1.32          60%        7.9     3318
    PyTorch                        4.441       257         1.24          64%        1.0     2809
    PyTorch, compiled              4.824       237         1.35          59%       61.7     2289
    Marian                         4.545       251         1.27          63%

    --sizes small --growth --rounds 4; one size doubled, time × and products ×:
    rows 2.20, 2.00    length 2.22, 2.02    layers 1.70, 1.73    vocab 1.26, 1.27

    --sizes small --rounds 2 --end-to-end, on Multi30k, tokens of both sides a second:
    text to parameters         5,140
    steps alone                5,199
    loader alone           6,038,092

"Ours" and "memory kept" are as train.py is (`transformer_jax/memory.py`); Marian's time is of its own log. tokens/s are
target tokens that are not padding.
"""

import argparse
import contextlib
import io
import math
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax.memory import keep_freed_memory

ROOT = pathlib.Path(__file__).parents[1]
CEILING = "a product of two matrices"
PRODUCT = 2048  # rows and columns of the matrices that are multiplied for the ceiling
GROWING = ("rows", "length", "layers", "vocab")
DROPOUT, SMOOTHING, RATE, BETAS, EPSILON = 0.1, 0.1, 1e-4, (0.9, 0.98), 1e-9

Step = Callable[[], float]  # one update; the mean loss


class Size(NamedTuple):
    width: int  # D
    hidden: int  # F
    heads: int  # N
    layers: int  # of each stack
    vocab: int  # V
    rows: int  # B
    length: int  # S = T


SIZES = {"small": Size(256, 1024, 4, 3, 8_000, 128, 20), "base": Size(512, 2048, 8, 6, 32_000, 64, 24)}


def random_pairs(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Source and target ids, int32 [B, T]: rows between half full and full, then padding."""
    rng = np.random.default_rng(0)
    source, target = rng.integers(3, size.vocab, (2, size.rows, size.length)).astype(np.int32)
    padding = np.arange(size.length) >= rng.integers(size.length // 2, size.length + 1, (size.rows, 1))
    source[padding] = target[padding] = 0
    return source, target


def model_flops(size: Size) -> float:
    """Of the matrix products of one step: each forward, and twice that backward."""
    width, tokens = size.width, size.rows * size.length
    attention = 4 * width**2  # query, key, value, output; cross-attention projects as much
    mixing = 2 * size.length * width  # q kᵀ and weights times values, a token
    encoder = attention + 2 * width * size.hidden + mixing
    decoder = 2 * attention + 2 * width * size.hidden + 2 * mixing
    return 3 * 2 * tokens * (size.layers * (encoder + decoder) + width * size.vocab)


def ours(size: Size) -> Step:
    import jax

    from transformer_jax.batch import unpacked
    from transformer_jax.config import OptimizerConfig, Schedule, TransformerConfig
    from transformer_jax.nn.transformer import Transformer
    from transformer_jax.training.objective import make_objective
    from transformer_jax.training.optimizer import make_optimizer, make_schedule
    from transformer_jax.training.step import init_state, make_train_step

    config = TransformerConfig(
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        width=size.width,
        heads=size.heads,
        feed_forward=size.hidden,
        dropout=DROPOUT,
        source_vocab=size.vocab,
        target_vocab=size.vocab,
    )
    options = OptimizerConfig(schedule=Schedule.CONSTANT, peak=RATE, warmup=0, label_smoothing=SMOOTHING)
    model, batch = Transformer(config), unpacked(*map(jax.numpy.asarray, random_pairs(size)))
    optimizer = make_optimizer(options, width=size.width, steps=1000)
    state = init_state(jax.jit(model.init)(jax.random.key(0), batch), optimizer, seed=0, ema=0.0)
    train_step = make_train_step(
        make_objective(model, label_smoothing=SMOOTHING),
        optimizer,
        learning_rate=make_schedule(options, width=size.width, steps=1000),
    )

    def step() -> float:
        nonlocal state
        state, report = train_step(state, batch)
        return float(report.sums.loss / report.sums.weight)

    return step


def bare(size: Size) -> Step:
    """What someone would write without a library: a dict of arrays and a function."""
    import jax
    import jax.numpy as jnp
    import optax

    width, heads = size.width, size.heads

    def init(key: jax.Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 20 * size.layers + 1))

        def matrix(rows: int, columns: int) -> jax.Array:
            return jax.random.normal(next(keys), (rows, columns)) * (2 / (rows + columns)) ** 0.5

        def norm() -> dict[str, jax.Array]:
            return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}

        def attention() -> dict[str, Any]:
            return {name: matrix(width, width) for name in "qkvo"} | {"norm": norm()}

        def feed_forward() -> dict[str, Any]:
            biases = {"b1": jnp.zeros(size.hidden), "b2": jnp.zeros(width)}
            return {"w1": matrix(width, size.hidden), "w2": matrix(size.hidden, width), **biases, "norm": norm()}

        def layer(*attentions: str) -> dict[str, Any]:
            return {name: attention() for name in attentions} | {"feed_forward": feed_forward()}

        table = jax.random.normal(next(keys), (size.vocab, width)) * width**-0.5
        encoder = [layer("own") for _ in range(size.layers)]
        return {"table": table, "encoder": encoder, "decoder": [layer("own", "cross") for _ in range(size.layers)]}

    def dropped(x: jax.Array, key: jax.Array) -> jax.Array:
        words = jax.random.bits(key, (*x.shape[:-1], x.shape[-1] // 2), jnp.uint32)
        bits = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(x.shape)
        return jnp.where(bits >= round(DROPOUT * 2**16), x / (1 - DROPOUT), 0)

    def normed(p: dict, x: jax.Array) -> jax.Array:
        mean, square = x.mean(-1, keepdims=True), (x**2).mean(-1, keepdims=True)
        return (x - mean) * (jax.lax.rsqrt(square - mean**2 + 1e-6) * p["scale"]) + p["shift"]

    def attended(p: dict, x: jax.Array, memory: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        q, k, v = (
            (y @ p[name]).reshape(*y.shape[:2], heads, -1) for name, y in zip("qkv", (x, memory, memory), strict=True)
        )
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / (width // heads) ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
        mixed = jnp.einsum("bnqk,bknh->bqnh", weights, v).reshape(x.shape)
        return normed(p["norm"], x + dropped(mixed @ p["o"], key))

    def fed(p: dict, x: jax.Array, key: jax.Array) -> jax.Array:
        y = jax.nn.relu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return normed(p["norm"], x + dropped(y, key))

    angles = np.arange(size.length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    sinusoids = jnp.asarray(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(size.length, width), jnp.float32)

    def loss_of(params: dict, source: jax.Array, target: jax.Array, key: jax.Array) -> jax.Array:
        keys = iter(jax.random.split(key, 5 * size.layers + 2))

        def embedded(ids: jax.Array) -> jax.Array:
            return dropped(params["table"][ids] * width**0.5 + sinusoids, next(keys))

        mask = (source != 0)[:, None, None]
        x = embedded(source)
        for p in params["encoder"]:
            x = fed(p["feed_forward"], attended(p["own"], x, x, mask, next(keys)), next(keys))
        y = embedded(jnp.pad(target, ((0, 0), (1, 0)))[:, :-1])
        causal = jnp.tril(jnp.ones((size.length, size.length), bool))
        for p in params["decoder"]:
            y = attended(p["own"], y, y, causal, next(keys))
            y = fed(p["feed_forward"], attended(p["cross"], y, x, mask, next(keys)), next(keys))
        logits = y @ params["table"].T
        log_sum = jax.nn.logsumexp(logits, axis=-1)
        true = jax.nn.one_hot(target, size.vocab, dtype=bool)
        smoothed = jnp.where(true, 1 - SMOOTHING, SMOOTHING / (size.vocab - 1))
        counts = target != 0
        return jnp.where(counts, log_sum - (smoothed * logits).sum(-1), 0).sum() / counts.sum()

    optimizer = optax.adam(RATE, *BETAS, EPSILON)
    params = jax.jit(init)(jax.random.key(0))
    state = (params, optimizer.init(params), jnp.int32(0))
    source, target = map(jnp.asarray, random_pairs(size))

    def update(state, source, target):
        params, moments, count = state
        key = jax.random.fold_in(jax.random.key(1), count)
        loss, gradient = jax.value_and_grad(loss_of)(params, source, target, key)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments, count + 1), loss

    compiled = jax.jit(update, donate_argnums=0)

    def step() -> float:
        nonlocal state
        state, loss = compiled(state, source, target)
        return float(loss)

    return step


def pytorch(size: Size, *, compiled: bool) -> Step:
    """`torch.nn.Transformer` between a tied embedding and its logits, without the dropouts which the paper has not."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    width, scale = size.width, math.sqrt(size.width)
    angles = torch.arange(size.length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(size.vocab, width)
            torch.nn.init.normal_(self.embedding.weight, std=1 / scale)
            sizes = (width, size.heads, size.layers, size.layers, size.hidden, DROPOUT)
            self.transformer = torch.nn.Transformer(*sizes, batch_first=True)
            for module in self.transformer.modules():
                if isinstance(module, torch.nn.MultiheadAttention):
                    module.dropout = 0.0
                if isinstance(module, torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer):
                    module.dropout.p = 0.0  # on the hidden layer
            self.dropout = torch.nn.Dropout(DROPOUT)
            sinusoids = torch.stack([angles.sin(), angles.cos()], dim=-1).reshape(size.length, width)
            self.register_buffer("sinusoids", sinusoids)

        def embed(self, ids):
            return self.dropout(self.embedding(ids) * scale + self.sinusoids)

        def forward(self, source, target_input):
            future = torch.nn.Transformer.generate_square_subsequent_mask(size.length)
            padding = torch.where(source == 0, -torch.inf, 0.0)
            masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
            inputs = self.embed(source), self.embed(target_input)
            output = self.transformer(*inputs, tgt_mask=future, tgt_is_causal=True, **masks)
            return output @ self.embedding.weight.T

    model = Model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=BETAS, eps=EPSILON)
    cross_entropy = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=SMOOTHING)
    source, target = (torch.from_numpy(ids).long() for ids in random_pairs(size))
    shifted = torch.nn.functional.pad(target, (1, 0))[:, :-1]

    def loss_of(source, shifted, target):
        return cross_entropy(model(source, shifted).flatten(0, 1), target.flatten())

    loss_of = torch.compile(loss_of) if compiled else loss_of

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(source, shifted, target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def product() -> Step:
    """A product of matrices, the ceiling."""
    import jax

    matrix = jax.random.normal(jax.random.key(0), (PRODUCT, PRODUCT))
    multiply = jax.jit(lambda x: (x @ x)[0, 0])
    return lambda: float(multiply(matrix))


def kept(engine: Callable[[Size], Step]) -> Callable[[Size], Step]:
    """The engine in a process that keeps what it frees, as train.py's does."""

    def made(size: Size) -> Step:
        keep_freed_memory()
        return engine(size)

    return made


ENGINES: dict[str, Callable[[Size], Step]] = {
    "ours": kept(ours),
    "ours, memory given back": ours,
    "bare JAX, memory kept": kept(bare),
    "bare JAX": bare,
    "PyTorch": lambda size: pytorch(size, compiled=False),
    "PyTorch, compiled": lambda size: pytorch(size, compiled=True),
}


def marian(size: Size, updates: int) -> list[float]:
    """Seconds of each update as the log of Marian's own trainer (pymarian) has them, but of the first two."""
    with tempfile.TemporaryDirectory() as directory:
        texts = [f"{directory}/{name}" for name in ("source", "target", "words.yml")]
        for path, ids in zip(texts, random_pairs(size), strict=False):
            rows = [ids[row][ids[row] != 0][:-1] for row in range(size.rows)]  # Marian adds an EOS to each
            lines = [" ".join(f"w{token}" for token in row) + "\n" for row in rows]
            pathlib.Path(path).write_text("".join(lines * updates))
        words = ["</s>", "<unk>", *(f"w{token}" for token in range(2, size.vocab))]
        pathlib.Path(texts[2]).write_text("".join(f"{word}: {number}\n" for number, word in enumerate(words)))
        options = {
            **{"type": "transformer", "model": f"{directory}/model.npz", "train-sets": texts[:2]},
            **{"vocabs": [texts[2]] * 2, "dim-vocabs": [size.vocab] * 2},
            **{"dim-emb": size.width, "transformer-dim-ffn": size.hidden, "transformer-heads": size.heads},
            **{"enc-depth": size.layers, "dec-depth": size.layers, "transformer-dropout": DROPOUT},
            **{"label-smoothing": SMOOTHING, "learn-rate": RATE, "optimizer-params": [*BETAS, EPSILON]},
            **{"cpu-threads": os.cpu_count(), "mini-batch": size.rows, "maxi-batch": 1, "workspace": 2000},
            **{"after-batches": updates, "disp-freq": 1},
        }
        flags = ["--tied-embeddings-all", "--sync-sgd", "--no-shuffle"]
        for name, value in options.items():
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        command = [sys.executable, "-m", "pymarian", "train", *flags]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return [float(seconds) for seconds in re.findall(r": Time ([\d.]+)s :", log)][2:]


class Engine:
    """An engine in a process of its own, which makes one step when it is told to."""

    def __init__(self, name: str, size: str):
        command = [sys.executable, __file__, "--sizes", size, "--one", name]
        self.caches = tempfile.TemporaryDirectory()  # empty, so that the first step compiles
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": self.caches.name,
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        first, second = self(), self()
        self.compiling = first - second

    def __call__(self) -> float:
        """The seconds of a step."""
        return self._ask("step")

    def memory(self) -> float:
        """The most it had so far, in MB."""
        return self._ask("memory")

    def close(self) -> None:
        self.process.communicate()
        self.caches.cleanup()

    def _ask(self, what: str) -> float:
        assert self.process.stdin
        assert self.process.stdout
        print(what, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def answer(name: str, size: str) -> None:
    """What the process of an `Engine` does."""
    step = product() if name == CEILING else ENGINES[name](SIZES[size])
    for line in sys.stdin:
        start = time.perf_counter()
        if line == "step\n":
            step()
        print(time.perf_counter() - start if line == "step\n" else highest_memory(), flush=True)


def compare(name: str, engines: Sequence[str], rounds: int) -> None:
    """Prints the times of the engines, which take turns, and their compile times and memory."""
    size = SIZES[name]
    tokens = int((random_pairs(size)[1] != 0).sum())
    padding = 1 - tokens / (size.rows * size.length)
    print(f"\n{name}: {size}, {padding:.0%} padding, {model_flops(size) / 1e9:.0f} GFLOP a step")
    processes = {engine: Engine(engine, name) for engine in [CEILING, *engines] if engine != "Marian"}
    seconds: dict[str, list[float]] = {engine: [] for engine in [CEILING, *engines]}
    for round in range(rounds):
        for engine in list(seconds) if round % 2 == 0 else list(seconds)[::-1]:
            seconds[engine] += marian(size, updates=4) if engine == "Marian" else [processes[engine]()]
    median = {engine: statistics.median(times) for engine, times in seconds.items()}
    ceiling = 2 * PRODUCT**3 / median.pop(CEILING)
    print(f"{CEILING}: {ceiling / 1e9:.0f} GFLOP/s")
    print(f"{'engine':26}{'s a step':>10}{'tokens/s':>10}{'this / ours':>13}{'utilisation':>13}", end="")
    print(f"{'compile s':>11}{'peak MB':>9}")
    for engine, time_ in median.items():
        utilisation = model_flops(size) / time_ / ceiling
        print(
            f"{engine:26}{time_:10.3f}{tokens / time_:10.0f}{time_ / median['ours']:13.2f}{utilisation:13.0%}", end=""
        )
        if engine in processes:
            print(f"{processes[engine].compiling:11.1f}{processes[engine].memory():9.0f}", end="")
        print(flush=True)
    for process in processes.values():
        process.close()


def highest_memory() -> float:
    """Of this process, in MB (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e3


def growth(name: str, rounds: int) -> None:
    """Prints how a step's time grows when one size is doubled, beside how its products grow."""
    keep_freed_memory()
    size = SIZES[name]
    doubled = {field: size._replace(**{field: 2 * getattr(size, field)}) for field in GROWING}
    variants = {"": size, **doubled}
    steps = {field: ours(variant) for field, variant in variants.items()}
    seconds: dict[str, list[float]] = {field: [] for field in variants}
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for field, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[field].append(time.perf_counter() - start)
    print(f"\n{name}, ours: {size}\n{'twice':10}{'s a step':>10}{'time ×':>8}{'products ×':>12}")
    base = statistics.median(seconds[""])
    for field, variant in variants.items():
        median, flops = statistics.median(seconds[field]), model_flops(variant) / model_flops(size)
        print(f"{field:10}{median:10.3f}{median / base:8.2f}{flops:12.2f}", flush=True)


def end_to_end(train: Sequence[str], name: str, rounds: int, updates: int = 40) -> None:
    """Prints target and source tokens/s of runs from text to updated parameters, of their steps alone on batches that
    are there, and of their loader alone.

    The text is `data.train`; rows are packed, so that one program is compiled.
    """
    keep_freed_memory()
    import jax

    from transformer_jax.batch import Batch
    from transformer_jax.config import Config, DataConfig, PlanConfig, PlanKind, RunConfig, TokenizerConfig
    from transformer_jax.data.loader import batches
    from transformer_jax.parallel import shard_batch
    from transformer_jax.training.corpora import prepare
    from transformer_jax.training.journal import records
    from transformer_jax.training.learner import make_learner
    from transformer_jax.training.loop import train as run

    size = SIZES[name]
    plan = PlanConfig(kind=PlanKind.PACKING, tokens=size.rows * size.length, row_length=96)
    config = Config(
        data=DataConfig(train=tuple(train), dev=(), max_length=96, plan=plan, tokenizer=TokenizerConfig(vocab=8000)),
        run=RunConfig(steps=updates, log_every=updates // 4, eval_every=updates, checkpoint_every=updates),
    )
    config.model.width, config.model.feed_forward, config.model.heads = size.width, size.hidden, size.heads
    config.model.encoder_layers = config.model.decoder_layers = size.layers

    def tokens(batch: Batch) -> int:
        return int((batch.source_segments != 0).sum() + (batch.target_segments != 0).sum())

    rates: dict[str, list[float]] = {"text to parameters": [], "steps alone": [], "loader alone": []}
    with tempfile.TemporaryDirectory() as directory:
        corpora = prepare(config, f"{directory}/0", say=lambda line: None)
        learner = make_learner(config, corpora.tokenizer)
        for number in range(rounds):
            data = batches(corpora.store_of_epoch, corpora.plan, seed=0)
            next(data)  # makes the plan
            start = time.perf_counter()
            some = [batch for (_, batch), _ in zip(data, range(updates), strict=False)]
            rates["loader alone"].append(sum(map(tokens, some)) / (time.perf_counter() - start))

            shutil.copytree(f"{directory}/0", f"{directory}/{number + 1}")
            with contextlib.redirect_stdout(io.StringIO()):
                run(config, f"{directory}/{number + 1}")
            lines = [line for line in records(f"{directory}/{number + 1}") if line["split"] == "train"]
            rates["text to parameters"].append(statistics.median(line["tokens_per_second"] for line in lines[1:]))

            state, there = learner.init(), [shard_batch(batch, learner.mesh) for batch in some[: updates // 2]]
            state, report = learner.train_step(state, there[0])
            jax.block_until_ready(report)
            start = time.perf_counter()
            for batch in there:
                state, report = learner.train_step(state, batch)
            jax.block_until_ready(report)
            rates["steps alone"].append(sum(map(tokens, some[: updates // 2])) / (time.perf_counter() - start))
    print(f"\n{name}, {' '.join(train)}, tokens of both sides a second")
    for what, measured in rates.items():
        print(f"{what:20}{statistics.median(measured):12,.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", choices=[*ENGINES, "Marian"], default=[*ENGINES, "Marian"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--growth", action="store_true", help="time and arithmetic when one size is doubled")
    parser.add_argument("--end-to-end", nargs="+", metavar="CORPUS", help="corpora as in config.data.train")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        answer(options.one, options.sizes[0])
        return
    for name in options.sizes:
        if options.growth:
            growth(name, options.rounds)
        elif options.end_to_end:
            end_to_end(options.end_to_end, name, options.rounds)
        else:
            compare(name, options.engines, options.rounds)


if __name__ == "__main__":
    main()
