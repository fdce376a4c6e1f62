"""IWSLT14 German → English in fairseq's recipe.

    python3 train.py --config=configs/iwslt14_de_en.py --workdir=runs/iwslt14_de_en \
        --config.data.train=DIR/train.de,DIR/train.en --config.data.dev=DIR/valid.de,DIR/valid.en \
        --config.data.test=DIR/test.de,DIR/test.en

D 512, F 1024, 4 heads, dropout 0.3, rate 5e-4 with warm-up 4000, weight decay 1e-4, 4096 tokens, beam 5.
Not run here (the data cannot be had). fairseq's figure is about 34.5 to 35 tokenised BLEU.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    OptimizerConfig,
    OptimizerKind,
    PlanConfig,
    RunConfig,
    Schedule,
    SearchConfig,
    TokenizerConfig,
    TokenizerKind,
    TransformerConfig,
    Tying,
)


def get_config() -> Config:
    return Config(
        data=DataConfig(
            source="de",
            target="en",
            train=("train.de,train.en",),
            dev=("valid.de,valid.en",),
            test=("test.de,test.en",),
            tokenizer=TokenizerConfig(kind=TokenizerKind.BPE, vocab=10_000),
            plan=PlanConfig(tokens=4096),
        ),
        model=TransformerConfig(
            width=512, heads=4, feed_forward=1024, tying=Tying.DECODER, attention_bias=True, dropout=0.3
        ),
        optimizer=OptimizerConfig(
            kind=OptimizerKind.ADAMW,
            schedule=Schedule.INVERSE_SQRT,
            peak=5e-4,
            warmup=4000,
            epsilon=1e-8,
            weight_decay=1e-4,
        ),
        run=RunConfig(steps=50_000, eval_every=1000, checkpoint_every=1000, keep=5, average=5),
        search=SearchConfig(beam_size=5),
    )
