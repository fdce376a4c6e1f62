"""What is exported computes the same where it is read, and comes back as it was."""

import json

import jax
import numpy as np
import pytest
from interop_models import LINES, own_model

from transformer_jax.config import Activation, Norm, NormPlace, Positions, SearchConfig, SinusoidLayout, Tying
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import ctranslate2 as ctranslate2_format
from transformer_jax.interop import huggingface, huggingface_export
from transformer_jax.interop.__main__ import main
from transformer_jax.interop.model import Model, load_model, write_run
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import flat

TARGETS = ["der Baum", "Uhr", "das ist ein langer Satz", "ja", "nein", "blau"]


def scores(model: Model) -> list[float]:
    """Our log-probability of each target."""
    translator = Translator(Transformer(model.config.model), model.params, model.tokenizer)
    return [one.log_prob for one in translator.score(LINES, TARGETS, SearchConfig())]


def pieces(side, ids):
    return [side.id_to_piece(token) for token in ids[:-1]]


def ctranslate2_scores(path, model: Model) -> list[float]:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed: pip install -e '.[peers]'")
    tokenizer = model.tokenizer
    theirs = ctranslate2.Translator(str(path), compute_type="float32", inter_threads=1, intra_threads=1)
    sources = [pieces(tokenizer.source, ids) for ids in tokenizer.encode_source(LINES)]
    targets = [pieces(tokenizer.target, ids) for ids in tokenizer.encode_target(TARGETS)]
    return [sum(one.log_probs) for one in theirs.score_batch(sources, targets)]


def hugging_face_scores(path) -> list[float]:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.MarianTokenizer.from_pretrained(path)
    theirs = transformers.MarianMTModel.from_pretrained(path).eval()
    found = []
    for line, target in zip(LINES, TARGETS, strict=True):
        batch = tokenizer([line], text_target=[target], return_tensors="pt")
        with torch.no_grad():
            log_probs = torch.log_softmax(theirs(**batch).logits, -1)[0]
        found.append(float(log_probs.gather(1, batch["labels"][0][:, None]).sum()))
    return found


CTRANSLATE2 = {
    "the default": {},
    "pre-norm": {"norm_place": NormPlace.PRE, "norm_epsilon": 1e-3, "tying": Tying.DECODER},
    "RMS, gated": {"norm": Norm.RMS, "norm_place": NormPlace.PRE, "gated": True, "activation": Activation.SWISH},
    "biases": {"attention_bias": True, "output_bias": True, "tying": Tying.NONE, "activation": Activation.GELU},
    "learned": {"positions": Positions.LEARNED, "max_positions": 40, "embedding_scale": False, "embedding_norm": True},
    "relative": {"positions": Positions.RELATIVE, "relative_distance": 2, "activation": Activation.GELU_TANH},
    "rotary": {"positions": Positions.ROTARY},
    "t2t from 2": {"sinusoid_layout": SinusoidLayout.T2T, "first_position": 2},
}


@pytest.mark.parametrize("fields", CTRANSLATE2.values(), ids=CTRANSLATE2.keys())
def test_ctranslate2_gives_the_same_log_probabilities(tmp_path, fields):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed: pip install -e '.[peers]'")
    model = own_model(**fields)
    ctranslate2_format.write(model, tmp_path / "ct2")
    np.testing.assert_allclose(ctranslate2_scores(tmp_path / "ct2", model), scores(model), atol=1e-4)


HUGGING_FACE = {
    "the default": {},
    "biases": {"attention_bias": True, "output_bias": True, "tying": Tying.NONE, "activation": Activation.GELU},
    "learned": {"positions": Positions.LEARNED, "max_positions": 40, "tying": Tying.DECODER},
    "t2t from 2": {"sinusoid_layout": SinusoidLayout.T2T, "first_position": 2, "activation": Activation.GELU_TANH},
    "their own table": {"sinusoid_layout": SinusoidLayout.CONCATENATED, "norm_epsilon": 1e-5, "embedding_scale": False},
}


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("fields", HUGGING_FACE.values(), ids=HUGGING_FACE.keys())
def test_hugging_face_gives_the_same_log_probabilities_and_the_model_comes_back(tmp_path, fields):
    model = own_model(**fields)
    huggingface_export.write(model, tmp_path / "hf")
    again = huggingface.read(tmp_path / "hf").model
    assert again.config.model == model.config.model
    assert_equal(again.params, model.params)
    assert again.tokenizer.encode_source(LINES) == model.tokenizer.encode_source(LINES)
    np.testing.assert_allclose(hugging_face_scores(tmp_path / "hf"), scores(model), atol=1e-4)


def assert_equal(one, other) -> None:
    one, other = flat(one), flat(other)
    assert one.keys() == other.keys()
    for path, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[path], err_msg=path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm", Norm.RMS),
        ("norm_place", NormPlace.PRE),
        ("gated", True),
        ("embedding_norm", True),
        ("positions", Positions.ROTARY),
        ("key_width", 8),
    ],
)
def test_what_hugging_face_has_not_is_refused_by_its_field(tmp_path, field, value):
    with pytest.raises(UserError, match=rf"config\.model\.{field} is "):
        huggingface_export.write(own_model(**{field: value}), tmp_path / "hf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", ["key_width", "value_width"])
def test_what_ctranslate2_has_not_is_refused_by_its_field(tmp_path, field):
    with pytest.raises(UserError, match=rf"config\.model\.{field} is 8"):
        ctranslate2_format.write(own_model(**{field: 8}), tmp_path / "ct2")


# Bundles


def test_a_bundle_is_the_same_model(tmp_path):
    model = own_model()
    write_run(tmp_path / "run", model)
    assert (
        main(["export", "--model", str(tmp_path / "run"), "--format", "bundle", "--output", str(tmp_path / "b")]) == 0
    )
    assert_equal(load_model(tmp_path / "b").params, model.params)
    translator = Translator.load(str(tmp_path / "b"))
    found = [one.log_prob for one in translator.score(LINES, TARGETS, SearchConfig())]
    np.testing.assert_allclose(found, scores(model), rtol=1e-6)


def test_a_bundle_in_bfloat16_is_half_as_large_and_rounded(tmp_path):
    model = own_model()
    write_run(tmp_path / "whole", model)
    write_run(tmp_path / "half", model, dtype="bfloat16")
    sizes = [(tmp_path / name / "parameters.safetensors").stat().st_size for name in ("whole", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jax.numpy.bfloat16).astype(np.float32), model.params)
    assert_equal(load_model(tmp_path / "half").params, rounded)


def test_nothing_is_written_over(tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed: pip install -e '.[peers]'")
    write_run(tmp_path / "run", own_model())
    for kind in ("bundle", "huggingface", "ctranslate2"):
        output = tmp_path / kind
        output.mkdir()
        (output / "mine").write_text("kept")
        assert main(["export", "--model", str(tmp_path / "run"), "--format", kind, "--output", str(output)]) == 2
        assert [path.name for path in output.iterdir()] == ["mine"]
        assert "is not written over" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "bundle", "huggingface", "ctranslate2"}


@pytest.mark.parametrize("damage", ["truncated", "empty", "shape", "missing"])
def test_damaged_parameters_are_refused_by_name(tmp_path, damage):
    model = own_model()
    write_run(tmp_path / "run", model)
    file = tmp_path / "run" / "parameters.safetensors"
    content = file.read_bytes()
    if damage == "shape":
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        config["model"]["feed_forward"] = 32
        (tmp_path / "run" / "config.json").write_text(json.dumps(config))
        match = r"feed_forward/hidden/bias has shape \(24,\).*asks for \(32,\)"
    elif damage == "missing":
        file.unlink()
        match = "no checkpoint"
    else:
        file.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
        match = r"parameters\.safetensors: not a whole file"
    with pytest.raises(UserError, match=match):
        load_model(tmp_path / "run")
