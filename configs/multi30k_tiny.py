"""Multi30k with the published Transformer-Tiny (Wu et al., 2021), English → German.

    python3 train.py --config=configs/multi30k_tiny.py --workdir=runs/multi30k_tiny \
        --config.data.train=DIR/train.en,DIR/train.de --config.data.dev=DIR/val.en,DIR/val.de \
        --config.data.test=DIR/test_2016_flickr.en,DIR/test_2016_flickr.de

4+4 layers of width 128, joint BPE, dropout 0.3, fairseq's inverse square root with rate 0.005 and warm-up 2000,
2 × 4096 tokens, at most 8000 updates, patience 10, average of the last 10, beam 5.
Not run here. Published, from memory and so unverified: about 41.0 tokenised BLEU on test_2016_flickr.
"""

from transformer_jax.config import (
    Config,
    DataConfig,
    NormPlace,
    OptimizerConfig,
    PlanConfig,
    RunConfig,
    Schedule,
    SearchConfig,
    TokenizerConfig,
    TokenizerKind,
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
            max_length=256,
            tokenizer=TokenizerConfig(kind=TokenizerKind.BPE, vocab=10_000),
            plan=PlanConfig(tokens=8192, rows_multiple=2),
        ),
        model=TransformerConfig(
            encoder_layers=4,
            decoder_layers=4,
            width=128,
            heads=4,
            feed_forward=256,
            norm_place=NormPlace.POST,
            attention_bias=True,
            dropout=0.3,
        ),
        optimizer=OptimizerConfig(schedule=Schedule.INVERSE_SQRT, peak=5e-3, warmup=2000, epsilon=1e-8, accumulate=2),
        run=RunConfig(steps=8000, eval_every=70, checkpoint_every=70, keep=10, patience=10, average=10),
        search=SearchConfig(beam_size=5),
    )
