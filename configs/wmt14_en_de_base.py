"""WMT14 English → German, the base model in the recipe of the paper (sections 5 and 6.1).

    TFDS_DATA_DIR=DIR python3 train.py --config=configs/wmt14_en_de_base.py --workdir=runs/wmt14_en_de_base

`DIR` holds `wmt14_translate/de-en`, prepared by tensorflow-datasets in ArrayRecord form.
Not run here (the data cannot be had). Published: 27.3 tokenised BLEU on newstest2014, with compounds split, after
12 hours on 8 P100 GPUs; that is not sacreBLEU.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    PlanConfig,
    PlanKind,
    RunConfig,
    TokenizerConfig,
    TokenizerKind,
    TransformerConfig,
)


def get_config() -> Config:
    return Config(
        data=DataConfig(
            source="en",
            target="de",
            train=("tfds:wmt14_translate/de-en:train",),
            dev=("tfds:wmt14_translate/de-en:validation",),
            test=("tfds:wmt14_translate/de-en:test",),
            tokenizer=TokenizerConfig(kind=TokenizerKind.BPE, vocab=37_000, byte_fallback=True, coverage=0.9995),
            plan=PlanConfig(kind=PlanKind.PACKING, tokens=24_576, row_length=256, rows_multiple=8),
        ),
        model=TransformerConfig(),  # 6+6 layers, D 512, F 2048, N 8, dropout 0.1
        optimizer=OptimizerConfig(),  # Adam with the paper's schedule, warm-up 4000, label smoothing 0.1
        run=RunConfig(steps=100_000, eval_every=5000, checkpoint_every=1500, keep=5, average=5),
    )
