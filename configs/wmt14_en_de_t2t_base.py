"""WMT14 English → German in the recipe of Tensor2Tensor's `transformer_base` (v3), which is not the paper's.

    TFDS_DATA_DIR=DIR python3 train.py --config=configs/wmt14_en_de_t2t_base.py --workdir=runs/wmt14_en_de_t2t_base

Pre-norm, three kinds of dropout, β₂ 0.997, twice the learning rate, 4096 tokens on each of 8 devices. `DIR` as in
`wmt14_en_de_base.py`. Not run here (the data cannot be had). Published for a checkpoint of this recipe: 27.52
sacreBLEU on newstest2014, which other ways of scoring call 28.33 to 29.02.
"""

from configs import wmt14_en_de_base
from transformer_jax.config import Config, NormPlace, OptimizerConfig, Schedule, SinusoidLayout, TransformerConfig


def get_config() -> Config:
    config = wmt14_en_de_base.get_config()
    config.model = TransformerConfig(
        norm_place=NormPlace.PRE,
        sinusoid_layout=SinusoidLayout.T2T,
        dropout=0.1,
        attention_dropout=0.1,
        feed_forward_dropout=0.1,
    )
    config.optimizer = OptimizerConfig(schedule=Schedule.T2T_RSQRT, peak=2.0, warmup=8000, beta2=0.997)
    config.data.tokenizer.vocab = 32_768
    config.data.plan.tokens = 32_768
    return config
