"""English → German phrases of the built-in phrasebook: dates, times, amounts, names, and lists of them.

    python3 train.py

2 CPU cores, 3 minutes 17 seconds from the command to its end: 99.9 % of 1000 test phrases match exactly (beam 4); of
500 dev phrases 76.4 % do after 300 steps, 95.8 % after 600, 98.6 % after 900 and 99.8 % at the end (greedy).
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    NormPlace,
    OptimizerConfig,
    PlanConfig,
    PlanKind,
    Positions,
    RunConfig,
    Schedule,
    TokenizerConfig,
    TransformerConfig,
)


def get_config() -> Config:
    return Config(
        data=DataConfig(
            source="en",
            target="de",
            train=("phrasebook",),
            dev=("phrasebook",),
            test=("phrasebook",),
            max_length=64,
            tokenizer=TokenizerConfig(vocab=1000, split_digits=True, sample=40_000),
            plan=PlanConfig(kind=PlanKind.PACKING, tokens=1024, row_length=64),
        ),
        model=TransformerConfig(
            encoder_layers=2,
            decoder_layers=2,
            width=128,
            heads=4,
            feed_forward=512,
            norm_place=NormPlace.PRE,
            positions=Positions.RELATIVE,
            relative_distance=8,
            dropout=0.0,  # every phrase is met about twice: there is nothing to overfit
        ),
        optimizer=OptimizerConfig(schedule=Schedule.COSINE, peak=3e-3, warmup=100, label_smoothing=0.05),
        run=RunConfig(steps=1500, log_every=50, eval_every=300, checkpoint_every=300, keep=2),
    )
