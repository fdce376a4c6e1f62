"""WMT14 English → French, the big model in the recipe of the paper: dropout 0.1, 32k word pieces.

    TFDS_DATA_DIR=DIR python3 train.py --config=configs/wmt14_en_fr_big.py --workdir=runs/wmt14_en_fr_big

`DIR` holds `wmt14_translate/fr-en`, prepared by tensorflow-datasets in ArrayRecord form. Not run here (the data
cannot be had). Published: 41.8 tokenised BLEU on newstest2014 after 3.5 days on 8 P100 GPUs; that is not sacreBLEU.
"""

from configs import wmt14_en_de_big
from transformer_jax.config import Config


def get_config() -> Config:
    config = wmt14_en_de_big.get_config()
    config.data.target = "fr"
    config.data.train = ("tfds:wmt14_translate/fr-en:train",)
    config.data.dev = ("tfds:wmt14_translate/fr-en:validation",)
    config.data.test = ("tfds:wmt14_translate/fr-en:test",)
    config.data.tokenizer.vocab = 32_000
    config.model.dropout = 0.1
    return config
