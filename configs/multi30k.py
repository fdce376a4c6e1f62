"""Multi30k, image captions, English → German (or any other pair of files), in at most 90 minutes on 2 CPU cores.

    python3 train.py --config=configs/multi30k.py --workdir=runs/multi30k \
        --config.data.train=DIR/train.en,DIR/train.de --config.data.dev=DIR/val.en,DIR/val.de \
        --config.data.test=DIR/test_2016_flickr.en,DIR/test_2016_flickr.de

@@MULTI30K@@
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
            train=("train.en,train.de",),
            dev=("val.en,val.de",),
            test=("test_2016_flickr.en,test_2016_flickr.de",),
            max_length=80,
            tokenizer=TokenizerConfig(vocab=4000),
            plan=PlanConfig(kind=PlanKind.PACKING, tokens=2400, row_length=80),
        ),
        model=TransformerConfig(
            encoder_layers=3,
            decoder_layers=3,
            width=256,
            heads=4,
            feed_forward=512,
            norm_place=NormPlace.PRE,
            positions=Positions.RELATIVE,
            relative_distance=8,
            dropout=0.2,
        ),
        optimizer=OptimizerConfig(schedule=Schedule.COSINE, peak=2e-3, warmup=400),
        run=RunConfig(steps=5000, log_every=50, eval_every=500, checkpoint_every=500, keep=3),
    )
