"""WMT14 English → German, the big model in the recipe of the paper (sections 5 and 6.1).

    TFDS_DATA_DIR=DIR python3 train.py --config=configs/wmt14_en_de_big.py --workdir=runs/wmt14_en_de_big

`DIR` as in `wmt14_en_de_base.py`. Not run here (the data cannot be had). Published: 28.4 tokenised BLEU on
newstest2014, with compounds split, after 3.5 days on 8 P100 GPUs; that is not sacreBLEU.
"""

from configs import wmt14_en_de_base
from transformer_jax.config import Config, TransformerConfig


def get_config() -> Config:
    config = wmt14_en_de_base.get_config()
    config.model = TransformerConfig(width=1024, heads=16, feed_forward=4096, dropout=0.3)
    config.run.steps = 300_000
    config.run.checkpoint_every = 1000
    config.run.keep = config.run.average = 20
    return config
