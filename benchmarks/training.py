"""Time of a training step against PyTorch's, on the same batch shape, model size and number of threads.

    python3 -m pip install -e '.[peers]' && python3 benchmarks/training.py

2 CPU cores (AMD EPYC), float32, seconds a step, with `--rounds 3`:

    model                         batch   ours s  torch s  torch / ours
    3+3 layers, D 256            128×20    0.745    0.790          1.06
    6+6 layers, D 512             64×24    3.102    3.504          1.13

Both sides: pre-norm, dropout 0.1, tied embeddings, sinusoids, label smoothing 0.1, Adam, float32, one pair a row. The
two alternate, and the medians of their steps are compared: these are ratios for one machine, not figures for others.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from transformer_jax.batch import unpacked
from transformer_jax.config import NormPlace, OptimizerConfig, TransformerConfig
from transformer_jax.nn.transformer import Transformer
from transformer_jax.training.objective import make_objective
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import init_state, make_train_step


def ours(config: TransformerConfig, source: np.ndarray, target: np.ndarray) -> Callable[[], float]:
    """A function that makes one update and returns the loss."""
    model, batch = Transformer(config), unpacked(jnp.asarray(source), jnp.asarray(target))
    options = OptimizerConfig()
    optimizer = make_optimizer(options, width=config.width, steps=1000)
    state = init_state(model.init(jax.random.key(0), batch), optimizer, seed=0, ema=0.0)
    train_step = make_train_step(
        make_objective(model, label_smoothing=0.1),
        optimizer,
        learning_rate=make_schedule(options, width=config.width, steps=1000),
    )

    def step() -> float:
        nonlocal state
        state, report = train_step(state, batch)
        return float(report.sums.loss / report.sums.weight)

    return step


class TorchTransformer(torch.nn.Module):
    """torch.nn.Transformer between a tied embedding and its logits."""

    def __init__(self, config: TransformerConfig, length: int):
        super().__init__()
        self.scale = math.sqrt(config.width)
        self.embedding = torch.nn.Embedding(config.source_vocab, config.width)
        torch.nn.init.normal_(self.embedding.weight, std=1 / self.scale)
        self.transformer = torch.nn.Transformer(
            config.width,
            config.heads,
            config.encoder_layers,
            config.decoder_layers,
            config.feed_forward,
            config.dropout,
            batch_first=True,
            norm_first=True,
        )
        positions = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, config.width, 2) / config.width)
        self.sinusoids = torch.stack([positions.sin(), positions.cos()], dim=-1).reshape(length, config.width)
        self.dropout = torch.nn.Dropout(config.dropout)

    def embed(self, ids):
        return self.dropout(self.embedding(ids) * self.scale + self.sinusoids[: ids.shape[1]])

    def forward(self, source, target_input):
        future = torch.nn.Transformer.generate_square_subsequent_mask(target_input.shape[1])
        padding = torch.where(source == 0, -torch.inf, 0.0)
        output = self.transformer(
            self.embed(source),
            self.embed(target_input),
            tgt_mask=future,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return output @ self.embedding.weight.T


def theirs(config: TransformerConfig, source: np.ndarray, target: np.ndarray) -> Callable[[], float]:
    model = TorchTransformer(config, length=max(source.shape[1], target.shape[1])).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    loss_of = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    source_ids, target_ids = torch.from_numpy(source).long(), torch.from_numpy(target).long()
    shifted = torch.nn.functional.pad(target_ids, (1, 0))[:, :-1]

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(source_ids, shifted).flatten(0, 1), target_ids.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    flags.add_argument("--threads", type=int, default=2, help="of PyTorch; XLA takes all cores it may use")
    flags.add_argument("--rounds", type=int, default=7)
    options = flags.parse_args()
    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    print(f"{'model':24} {'batch':>10} {'ours s':>8} {'torch s':>8} {'torch / ours':>13}")
    for width, hidden, layers, vocab, rows, length in ((256, 512, 3, 4000, 128, 20), (512, 2048, 6, 8000, 64, 24)):
        config = TransformerConfig(
            encoder_layers=layers,
            decoder_layers=layers,
            width=width,
            heads=width // 64,
            feed_forward=hidden,
            norm_place=NormPlace.PRE,
            source_vocab=vocab,
            target_vocab=vocab,
        )
        source, target = rng.integers(3, vocab, (2, rows, length)).astype(np.int32)
        lengths = rng.integers(length // 2, length + 1, (rows, 1))
        source[np.arange(length) >= lengths] = target[np.arange(length) >= lengths] = 0
        steps = ours(config, source, target), theirs(config, source, target)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(options.rounds + 1):
            for step, seconds in zip(steps, times, strict=True):
                begin = time.perf_counter()
                step()
                seconds.append(time.perf_counter() - begin)
        medians = [statistics.median(seconds[1:]) for seconds in times]  # the first one compiles
        name = f"{layers}+{layers} layers, D {width}"
        print(f"{name:24} {rows:>6}×{length:<3} {medians[0]:8.3f} {medians[1]:8.3f} {medians[1] / medians[0]:13.2f}")


if __name__ == "__main__":
    main()
