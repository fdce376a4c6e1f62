"""Models that transformers itself saved give the same logits here, and what is wrong is said by name."""

import json
import pathlib

import jax
import numpy as np
import pytest
from interop_models import LAYERS, LINES, PAIRS, D, F, N, joint_pieces, own_pieces, write_segmenters
from safetensors.numpy import load_file, save_file

from transformer_jax.batch import EOS, UNK
from transformer_jax.config import LengthPenalty, SearchConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import huggingface, huggingface_export
from transformer_jax.interop.__main__ import main
from transformer_jax.nn.transformer import Transformer

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e '.[peers]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

TARGETS = [pair.target for pair in PAIRS[:6]]


def write_model(directory: pathlib.Path, *, separate=False, bias=True, half=False, pickled=False, **options):
    """What `save_pretrained` writes for a random model; transformers' own model."""
    sides = [own_pieces("source"), own_pieces("target")] if separate else [joint_pieces()] * 2
    write_segmenters(directory)
    vocabularies = [dict(zip((*pieces, "<pad>"), range(len(pieces) + 1), strict=True)) for pieces in sides]
    for name, vocabulary in zip(("vocab.json", "target_vocab.json"), vocabularies, strict=True):
        if name == "vocab.json" or separate:
            (directory / name).write_text(json.dumps(vocabulary))
    tokenizer = {"source_lang": "en", "target_lang": "de", "separate_vocabs": separate}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    eos, pad = vocabularies[1]["</s>"], vocabularies[1]["<pad>"]
    defaults = dict(
        vocab_size=len(vocabularies[0]),
        decoder_vocab_size=len(vocabularies[1]),
        share_encoder_decoder_embeddings=not separate,
        d_model=D,
        **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIZES.items()},
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=eos,
        forced_eos_token_id=eos,
        init_std=0.3,
    )
    torch.manual_seed(0)
    model = transformers.MarianMTModel(transformers.MarianConfig(**{**defaults, **options})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
        if bias:
            model.final_logits_bias.normal_()
    (model.half() if half else model).save_pretrained(directory)
    if pickled:
        torch.save(model.state_dict(), directory / "pytorch_model.bin")
        (directory / "model.safetensors").unlink()
    return transformers.MarianMTModel.from_pretrained(directory, dtype=torch.float32).eval() if half else model


SIZES = {"layers": LAYERS, "attention_heads": N, "ffn_dim": F}


def their_scores(directory, model) -> list[float]:
    tokenizer = transformers.MarianTokenizer.from_pretrained(directory)
    found = []
    for line, target in zip(LINES, TARGETS, strict=True):
        batch = tokenizer([line], text_target=[target], return_tensors="pt")
        with torch.no_grad():
            log_probs = torch.log_softmax(model(**batch).logits, -1)[0]
        found.append(float(log_probs.gather(1, batch["labels"][0][:, None]).sum()))
    return found


MODELS = {
    "as OPUS-MT": {},
    "separate vocabularies, in half precision": {"separate": True, "half": True, "activation_function": "relu"},
    "a pickle": {"pickled": True, "scale_embedding": False, "activation_function": "gelu"},
    "untied": {"separate": True, "tie_word_embeddings": False, "decoder_ffn_dim": F + 6},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS.keys())
def test_log_probabilities_equal_those_of_transformers(tmp_path, options):
    theirs = write_model(tmp_path, **options)
    model = huggingface.read(tmp_path).model
    translator = Translator(Transformer(model.config.model), model.params, model.tokenizer)
    found = [one.log_prob for one in translator.score(LINES, TARGETS, SearchConfig())]
    np.testing.assert_allclose(found, their_scores(tmp_path, theirs), atol=2e-4)


def test_an_export_has_the_ids_that_the_import_came_with(tmp_path):
    write_model(tmp_path / "one")
    huggingface_export.write(huggingface.read(tmp_path / "one").model, tmp_path / "two")
    assert json.loads((tmp_path / "one" / "vocab.json").read_text()) == json.loads(
        (tmp_path / "two" / "vocab.json").read_text()
    )
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name in one.keys() & two.keys():
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)
    assert set(two) <= set(one) | {"final_logits_bias"}


@pytest.mark.parametrize("line", [">>deu<< Good morning!", "the m² of </s> and <pad> 中文 …", "“a” – b", "  a   b "])
def test_text_is_cut_as_transformers_cuts_it(tmp_path, line):
    write_model(tmp_path)
    tokenizer = huggingface.read(tmp_path).model.tokenizer
    (ours,) = tokenizer.encode_source([line])
    assert ours[-1] == EOS
    assert EOS not in ours[:-1]
    if "</s>" not in line:  # there a text may contain its own end
        theirs = transformers.MarianTokenizer.from_pretrained(tmp_path)([line])["input_ids"][0]
        assert [tokenizer.source.vocabulary.ids[token] for token in ours] == theirs


def test_the_search_is_that_of_generation_config(tmp_path):
    write_model(tmp_path)
    pad, unk = len(joint_pieces()), joint_pieces().index("<unk>")
    values = {"num_beams": 6, "length_penalty": 0.8, "max_length": 100, "bad_words_ids": [[pad], [unk]]}
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    config = huggingface.read(tmp_path).model.config
    search = config.search
    assert (search.beam_size, search.penalty, search.alpha) == (6, LengthPenalty.POWER, 0.8)
    assert (search.length_factor, search.extra_length) == (0.0, 98)  # without the start and the forced end
    assert search.suppressed == (UNK,)
    assert (config.data.source, config.data.target) == ("en", "de")


# What is wrong is said by name


def change_json(path: pathlib.Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d_model", 32),
        ("vocab_size", 10**9),
        ("encoder_layers", 10**9),
        ("decoder_layers", 1),
        ("encoder_ffn_dim", 4),
        ("decoder_attention_heads", 2),
        ("activation_function", "tanh"),
        ("eos_token_id", 10**6),
        ("decoder_start_token_id", -1),
        ("scale_embedding", "yes"),
        ("d_model", "16"),
    ],
)
def test_a_configuration_that_lies_is_refused_by_its_field(tmp_path, field, value):
    write_model(tmp_path)
    change_json(tmp_path / "config.json", **{field: value})
    with pytest.raises(UserError, match=rf"config\.json: {field} is "):
        huggingface.read(tmp_path)


FC1 = "model.encoder.layers.0.fc1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.encoder.layers.1.fc2.bias"), "model.encoder.layers.1.fc2.bias is missing"),
        (lambda tensors: tensors.update(extra=np.ones(3, np.float32)), "has not: extra"),
        (lambda tensors: tensors.update({FC1: tensors[FC1] * np.float32(np.nan)}), f"{FC1} .*not finite"),
        (lambda tensors: tensors.update({FC1: tensors[FC1][:, :3].copy()}), f"{FC1} has shape"),
        (lambda tensors: tensors.pop("model.shared.weight"), "embed_tokens.weight is missing"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tmp_path, change, message):
    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"model\.safetensors: .*{message}"):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "pickle", "code"])
def test_damaged_weights_are_refused_and_nothing_is_executed(tmp_path, damage):
    write_model(tmp_path)
    path, mark = tmp_path / "model.safetensors", tmp_path / "executed"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "pickle":
        torch.save({"model.shared.weight": torch.ones(2)}, path)
    else:

        class Evil:
            def __reduce__(self):
                return (pathlib.Path.touch, (mark,))

        path.unlink()
        torch.save({"model.shared.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"model\.safetensors: not a whole|pytorch_model\.bin: the file wants to run"):
        huggingface.read(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"</s>": 0, "<unk>": 1, "a": 2, "a": 3}', r"'a' comes twice"),
        ('{"</s>": 0, "<unk>": 0}', r"'</s>' and '<unk>' have one id, 0"),
        ('{"</s>": 0, "<unk>": 1}', r"no piece has the id 2"),
        ('{"</s>": 0, "<unk>": 100000}', r"'<unk>' has the id 100000, but the table has"),
        ("[1]", r"expected a JSON object"),
        ("{", r"not JSON"),
    ],
)
def test_a_bad_vocabulary_is_refused(tmp_path, text, message):
    write_model(tmp_path)
    (tmp_path / "vocab.json").write_text(text)
    with pytest.raises(UserError, match=rf"vocab\.json: .*{message}"):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("name", ["source.spm", "vocab.json", "model.safetensors"])
def test_a_missing_file_is_named_and_nothing_is_left(tmp_path, name, capsys):
    write_model(tmp_path / "hf")
    (tmp_path / "hf" / name).unlink()
    assert main(["import", str(tmp_path / "hf"), "--workdir", str(tmp_path / "run")]) == 2
    assert name in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# What an import is good for


@pytest.mark.slow
def test_an_imported_model_is_trained_further_from_its_weights(tmp_path, capsys):
    import train

    write_model(tmp_path / "hf")
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / "hf"), "--workdir", str(run)]) == 0
    assert "model.shared.weight" in capsys.readouterr().out  # what was mapped is shown
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:8]), encoding="utf-8")
    command = [f"--config={run}/config.py", f"--workdir={run}", f"--config.data.train={pairs}"]
    command += [f"--config.data.dev={pairs}", "--config.run.steps=1", "--config.optimizer.peak=0.0"]
    assert train.main(["train.py", *command, "--config.model.heads=2"]) == 2
    assert "model.heads: 4 → 2" in capsys.readouterr().err
    with jax.numpy_dtype_promotion("standard"):  # optax' arithmetic is not strict
        assert train.main(["train.py", *command]) == 0
    assert "beginning with the parameters in" in capsys.readouterr().out
    trained = Translator.load(str(run))
    imported = huggingface.read(tmp_path / "hf").model
    own = Translator(Transformer(imported.config.model), imported.params, imported.tokenizer)
    for one, other in zip(*(each.score(LINES, TARGETS, SearchConfig()) for each in (trained, own)), strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
