"""WMT17 German → English, the task and recipe of the Flax `wmt` example, for comparison with it.

    TFDS_DATA_DIR=DIR python3 train.py --config=configs/wmt17_de_en_flax.py --workdir=runs/wmt17_de_en_flax

`DIR` holds `wmt17_translate/de-en` and `wmt14_translate/de-en`, prepared by tensorflow-datasets in ArrayRecord form.
Not run here (the data cannot be had). The example's README has 32.87 BLEU on newstest2014 after 13 h 18 m on a TPU
v3-8: lower-cased, not sacreBLEU, with test pairs over 256 tokens left out.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    DType,
    NormPlace,
    OptimizerConfig,
    OptimizerKind,
    PlanConfig,
    PlanKind,
    RunConfig,
    Schedule,
    TokenizerConfig,
    TransformerConfig,
)


def get_config() -> Config:
    return Config(
        data=DataConfig(
            source="de",
            target="en",
            train=("tfds:wmt17_translate/de-en:train",),
            dev=("tfds:wmt17_translate/de-en:validation",),
            test=("tfds:wmt14_translate/de-en:test",),
            tokenizer=TokenizerConfig(vocab=32_000, coverage=0.9995, byte_fallback=True),
            plan=PlanConfig(kind=PlanKind.PACKING, tokens=65_536, row_length=256, rows_multiple=8),  # 256 rows of 256
        ),
        model=TransformerConfig(
            width=1024,
            heads=16,
            feed_forward=4096,
            norm_place=NormPlace.PRE,
            dropout=0.1,
            attention_dropout=0.1,
            feed_forward_dropout=0.1,
            dtype=DType.BFLOAT16,
        ),
        optimizer=OptimizerConfig(kind=OptimizerKind.ADAMW, schedule=Schedule.INVERSE_SQRT, peak=2e-3, warmup=1000),
        run=RunConfig(steps=100_000, eval_every=1000, checkpoint_every=10_000),
    )
