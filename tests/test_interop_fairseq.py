"""fairseq's checkpoints, made here with fairseq's names and shapes, against its model written once more in PyTorch."""

import argparse
import dataclasses
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

from transformer_jax.batch import unpacked
from transformer_jax.config import TokenizerConfig
from transformer_jax.config_check import check
from transformer_jax.data.corpus import Pair
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import fairseq
from transformer_jax.interop.__main__ import main
from transformer_jax.interop.model import check_shapes
from transformer_jax.nn.transformer import Transformer
from transformer_jax.run_directory import load_config

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")
nn = torch.nn

D, N, F, V = 16, 2, 24, 21


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x, memory, mask):  # True in `mask`: not seen
        def heads(y):
            return y.reshape(*y.shape[:2], N, D // N).transpose(1, 2)

        scores = heads(self.q_proj(x)) @ heads(self.k_proj(memory)).transpose(2, 3) / math.sqrt(D // N)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return self.out_proj((weights @ heads(self.v_proj(memory))).transpose(1, 2).reshape(x.shape))


class Layer(nn.Module):
    def __init__(self, args, decoder):
        super().__init__()
        self.pre, self.activation = args.encoder_normalize_before, args.activation_fn
        self.self_attn, self.self_attn_layer_norm = Attention(), nn.LayerNorm(D)
        if decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = Attention(), nn.LayerNorm(D)
        hidden = args.decoder_ffn_embed_dim if decoder else args.encoder_ffn_embed_dim
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(D, hidden), nn.Linear(hidden, D), nn.LayerNorm(D)

    def residual(self, x, norm, f):
        return x + f(norm(x)) if self.pre else norm(x + f(x))

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.residual(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, y, mask))
        if memory is not None:
            attend = lambda y: self.encoder_attn(y, memory, memory_mask)  # noqa: E731
            x = self.residual(x, self.encoder_attn_layer_norm, attend)
        activations = {
            "relu": torch.relu,
            "gelu": nn.functional.gelu,
            "gelu_accurate": lambda y: nn.functional.gelu(y, approximate="tanh"),
        }
        activation = activations[self.activation]
        return self.residual(x, self.final_layer_norm, lambda y: self.fc2(activation(self.fc1(y))))


class Stack(nn.Module):
    def __init__(self, args, decoder, vocab):
        super().__init__()
        self.args = args
        self.embed_tokens = nn.Embedding(vocab, D, padding_idx=1)
        if args.encoder_learned_pos:
            self.embed_positions = nn.Embedding(30 + 2, D, padding_idx=1)
        if args.layernorm_embedding:
            self.layernorm_embedding = nn.LayerNorm(D)
        self.layers = nn.ModuleList(Layer(args, decoder) for _ in range(2))
        if args.encoder_normalize_before:
            self.layer_norm = nn.LayerNorm(D)
        self.register_buffer("version", torch.tensor([3.0]))

    def embed(self, ids):
        x = self.embed_tokens(ids) * (1.0 if self.args.no_scale_embedding else math.sqrt(D))
        positions = torch.cumsum(ids != 1, dim=1) + 1
        if self.args.encoder_learned_pos:
            x = x + self.embed_positions(positions)
        else:
            rates = torch.exp(torch.arange(D // 2) * -(math.log(10000) / (D // 2 - 1)))
            angles = positions[:, :, None] * rates
            x = x + torch.cat([angles.sin(), angles.cos()], dim=-1)
        return self.layernorm_embedding(x) if self.args.layernorm_embedding else x

    def leave(self, x):
        return self.layer_norm(x) if self.args.encoder_normalize_before else x


class Reference(nn.Module):
    def __init__(self, args, source_vocab, target_vocab):
        super().__init__()
        self.encoder, self.decoder = Stack(args, False, source_vocab), Stack(args, True, target_vocab)
        self.decoder.output_projection = nn.Linear(D, target_vocab, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3)
        if args.share_all_embeddings:
            self.encoder.embed_tokens.weight = self.decoder.embed_tokens.weight
        if args.share_all_embeddings or args.share_decoder_input_output_embed:
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight

    @torch.no_grad()
    def forward(self, source, decoder_input):
        padding = (source == 1)[:, None, None]
        x = self.encoder.embed(source)
        for layer in self.encoder.layers:
            x = layer(x, padding)
        memory = self.encoder.leave(x)
        x = self.decoder.embed(decoder_input)
        future = torch.ones(2 * (x.shape[1],), dtype=torch.bool).triu(1)
        for layer in self.decoder.layers:
            x = layer(x, future, memory, padding)
        return self.decoder.output_projection(self.decoder.leave(x))


def options(**changes):
    args = dict(
        arch="transformer_iwslt_de_en",
        task="translation",
        source_lang="de",
        target_lang="en",
        encoder_layers=2,
        decoder_layers=2,
        encoder_embed_dim=D,
        decoder_embed_dim=D,
        encoder_ffn_embed_dim=F,
        decoder_ffn_embed_dim=F,
        encoder_attention_heads=N,
        decoder_attention_heads=N,
        encoder_normalize_before=False,
        decoder_normalize_before=False,
        encoder_learned_pos=False,
        decoder_learned_pos=False,
        activation_fn="relu",
        dropout=0.1,
        layernorm_embedding=False,
        no_scale_embedding=False,
        share_all_embeddings=False,
        share_decoder_input_output_embed=True,
        adaptive_softmax_cutoff=None,
        quant_noise_pq=0,
        cross_self_attention=False,
        encoder_layerdrop=0.2,
    )
    return argparse.Namespace(**(args | changes))


def reference(args, sizes=(V, V)):
    torch.manual_seed(3)
    return Reference(args, *sizes).eval()


def to_ours(ids, size=V):
    """fairseq's ids as this library's."""
    ours = {theirs: number for number, theirs in enumerate(fairseq.id_order(size), start=1)}
    return [ours[token] for token in ids]


VARIANTS = {
    "post_norm": {},
    "pre_norm": dict(encoder_normalize_before=True, decoder_normalize_before=True, activation_fn="gelu"),
    "all_shared": dict(share_all_embeddings=True, activation_fn="gelu_accurate"),
    "nothing_shared": dict(share_decoder_input_output_embed=False),
    "learned": dict(encoder_learned_pos=True, decoder_learned_pos=True, no_scale_embedding=True),
    "embedding_norm": dict(layernorm_embedding=True),
    "narrow_decoder": dict(decoder_ffn_embed_dim=F - 7),
}
SOURCES = [[7, 9, 5, 20, 2], [11, 4, 2]]
TARGETS = [[6, 8, 2], [15, 3, 10, 17, 2]]


def save(directory, args, theirs, *, entries=None, zipped=True, sizes=(V, V)):
    """A directory as fairseq leaves it; its vocabulary is one of pieces that are cut already."""
    directory.mkdir(exist_ok=True)
    entries = {"args": args} if entries is None else entries
    saved = entries | {"model": theirs.state_dict(), "optimizer_history": [{"num_updates": 3}]}
    torch.save(saved, directory / "model.pt", _use_new_zipfile_serialization=zipped)
    for language, size in zip(("de", "en"), sizes, strict=True):
        (directory / f"dict.{language}.txt").write_text(
            "".join(f"{word} 9\n" for word in words(size)), encoding="utf-8"
        )
    return directory


def words(size=V):
    return [f"w{number}" + "@@" * (number % 3 == 0) for number in range(4, size)]


def logits_of_both(theirs, model, params, sizes):
    """For each sentence, [position, their vocabulary] of ours and of theirs."""
    length = max(map(len, SOURCES + TARGETS))
    ours = [
        np.array([to_ours(row, size) + [0] * (length - len(row)) for row in rows], np.int32)
        for rows, size in zip((SOURCES, TARGETS), sizes, strict=True)
    ]
    found = np.asarray(jax.jit(model.apply)(params, unpacked(*map(jnp.asarray, ours))))
    np.testing.assert_array_equal(jax.nn.softmax(found)[:, :, 0], 0.0)
    columns = np.argsort(fairseq.id_order(sizes[1])) + 1
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        expected = theirs(torch.tensor([source]), torch.tensor([[2, *target[:-1]]]))[0].numpy()
        yield found[row, : len(target)][:, columns], expected


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_fairseqs_model(name, tmp_path):
    args = options(**VARIANTS[name])
    sizes = (V, V - 2) if name == "nothing_shared" else (V, V)
    theirs = reference(args, sizes)
    save(tmp_path, args, theirs, sizes=sizes)
    config, params, _ = fairseq.read(tmp_path).model
    check(config)
    check_shapes(params, config.model, name="params")
    for found, expected in logits_of_both(theirs, Transformer(config.model), params, sizes):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    tied = args.share_all_embeddings, args.share_decoder_input_output_embed
    assert config.model.tying == {(True, True): "all", (False, True): "decoder", (False, False): "none"}[tied]


def greedy(theirs, source, *, pad_is_never=True, end_is_not_first=True):
    """fairseq-generate with a beam of 1."""
    output = [2]
    while len(output) < 10 and output[1:][-1:] != [2]:
        logits = theirs(torch.tensor([source]), torch.tensor([output]))[0, -1]
        if pad_is_never:
            logits[1] = -torch.inf
        if end_is_not_first and len(output) == 1:
            logits[2] = -torch.inf
        output.append(int(logits.argmax()))
    return output[1:]


def test_a_run_directory_of_it_translates_as_fairseq_does(tmp_path):
    args = options(share_decoder_input_output_embed=False)
    theirs = reference(args)
    with torch.no_grad():
        theirs.decoder.output_projection.weight[1:3] *= 3  # so that pads are probable, and some end
    assert main(["import", str(save(tmp_path / "theirs", args, theirs)), "--workdir", str(tmp_path / "ours")]) == 0
    translator = Translator.load(str(tmp_path / "ours"))
    search = dataclasses.replace(load_config(tmp_path / "ours").search, beam_size=1, extra_length=9)
    sources = [[4 + (7 * row + 3 * place) % 17 for place in range(1 + row)] + [2] for row in range(8)]
    lines = [" ".join(words()[token - 4] for token in source[:-1]) for source in sources]
    translations = translator.translate(lines, search)
    expected = [greedy(theirs, source) for source in sources]
    assert [list(best.tokens) for (best,) in translations] == [to_ours(tokens) for tokens in expected]
    for rule in ("pad_is_never", "end_is_not_first"):
        assert expected != [greedy(theirs, source, **{rule: False}) for source in sources]
    assert {len(tokens) for tokens in expected} != {9}  # some end by themselves
    symbols = ["<s>", "<pad>", "</s>", "<unk>", *words()]
    texts = [" ".join(symbols[token] for token in tokens if token != 2) + " " for tokens in expected]
    assert [best.text for (best,) in translations] == [text.replace("@@ ", "").rstrip() for text in texts]


@pytest.mark.parametrize("kind", ["old_file", "cfg_of_namespaces", "cfg_of_dictionaries", "nested_cfg", "half"])
def test_every_form_of_a_checkpoint_is_the_same_model(kind, tmp_path):
    args = options()
    theirs = reference(args)
    flat = vars(args)
    nested = {name: value for name, value in flat.items() if not name.startswith(("encoder_", "decoder_"))}
    for stack in ("encoder", "decoder"):
        part = {name[8:]: value for name, value in flat.items() if name.startswith(f"{stack}_")}
        nested[stack] = part
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    entries = {
        "cfg_of_namespaces": {"args": None, "cfg": {"model": args, "task": argparse.Namespace(**task)}},
        "cfg_of_dictionaries": {"args": None, "cfg": {"model": flat | {"_name": "transformer"}, "task": task}},
        "nested_cfg": {"args": None, "cfg": {"model": nested | {"_name": "transformer"}, "task": task}},
    }
    if kind == "half":
        theirs = theirs.half().float()
    expected = fairseq.read(save(tmp_path / "expected", args, theirs)).model
    if kind == "half":
        theirs = theirs.half()
    found = fairseq.read(
        save(tmp_path / kind, args, theirs, entries=entries.get(kind), zipped=kind != "old_file")
    ).model
    assert found.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_names_of_before_0_9_are_read(tmp_path):
    args = options(share_decoder_input_output_embed=False)
    theirs = reference(args)
    tensors = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    expected = fairseq.weights(tensors, vars(args), path="model.pt").params
    old = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if stem.endswith("q_proj"):
            rest = [tensors[f"{stem[:-6]}{part}_proj.{last}"] for part in "kv"]
            old[f"{stem[:-7]}.in_proj_{last}"] = np.concatenate([tensor, *rest])
        elif not stem.endswith(("k_proj", "v_proj")):
            old[name] = tensor
    numbers = {"encoder": ("self_attn", "final"), "decoder": ("self_attn", "encoder_attn", "final")}
    for name in list(old):
        for number, norm in enumerate(numbers[name[:7]]):
            new = name.replace(f".{norm}_layer_norm.", f".layer_norms.{number}.")
            old[new] = old.pop(name) if new != name else old.get(new)
    old = {name: tensor for name, tensor in old.items() if tensor is not None}
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    old["encoder.embed_positions._float_tensor"] = np.zeros(1)
    assert not any("q_proj" in name or "attn_layer_norm" in name for name in old)
    jax.tree.map(np.testing.assert_array_equal, fairseq.weights(old, vars(args), path="model.pt").params, expected)


REFUSED = {
    "adaptive_softmax_cutoff": dict(adaptive_softmax_cutoff="10,20"),
    "quant_noise_pq": dict(quant_noise_pq=0.1),
    "cross_self_attention": dict(cross_self_attention=True),
    "transformer_lm": dict(arch="transformer_lm_gpt"),
    "fconv": dict(arch="fconv_wmt_en_de"),
    "multilingual_translation": dict(task="multilingual_translation"),
    "decoder_attention_heads 4": dict(decoder_attention_heads=4),
    "decoder_normalize_before True": dict(decoder_normalize_before=True),
    "tanh": dict(activation_fn="tanh"),
    "dropout is 'much'": dict(dropout="much"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_of_another_kind_is_refused_by_name(name):
    tensors = {name: tensor.numpy() for name, tensor in reference(options()).state_dict().items()}
    with pytest.raises(UserError, match=name):
        fairseq.weights(tensors, vars(options(**REFUSED[name])), path="model.pt")


def test_parts_that_are_not_known_shapes_that_do_not_fit_and_numbers_that_are_none_are_refused_by_name():
    good = {name: tensor.numpy() for name, tensor in reference(options()).state_dict().items()}
    weight = "decoder.layers.1.encoder_attn.v_proj.weight"
    cases = [
        (good | {"encoder.layers.0.self_attn.bias_k": np.zeros(D)}, "has not: encoder.layers.0.self_attn.bias_k"),
        (good | {weight: np.zeros((D, D + 1))}, f"{weight} has shape .16, 17."),
        (good | {weight: np.zeros(())}, f"{weight} has shape"),
        (good | {weight: np.full((D, D), np.nan)}, f"{weight} has values that are not finite"),
        ({name: tensor for name, tensor in good.items() if name != weight}, f"{weight} is missing"),
        ({name: tensor for name, tensor in good.items() if "layer_norm.w" not in name}, "norm.weight is missing"),
        ({}, "encoder.embed_tokens.weight is missing"),
    ]
    for tensors, message in cases:
        with pytest.raises(UserError, match=message):
            fairseq.weights(tensors, vars(options()), path="model.pt")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 1\nb 2\na 3\n", "line 3: the word 'a' comes a second time"),
        ("<unk> 1\n", "line 1: the word '<unk>' comes"),
        ("a 1\nb\n", "line 2: expected `word count`, found 'b'"),
        ("a one\n", "line 1: expected"),
        ("\n", "line 1: expected"),
    ],
)
def test_a_bad_dictionary_is_refused_by_its_line(content, message, tmp_path):
    path = tmp_path / "dict.en.txt"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        fairseq.read_dictionary(path)


def test_a_word_is_what_stands_before_the_last_space_and_may_take_the_place_of_another(tmp_path):
    path = tmp_path / "dict.en.txt"
    path.write_bytes("\u2028 3\na b 4\n<unk> 1 #fairseq:overwrite\nmadeupword0000 0".encode())
    symbols = fairseq.read_dictionary(path)
    assert symbols[4:] == ["\u2028", "a b", "<unk>", "madeupword0000"]
    assert symbols[3] != "<unk>"
    assert len(set(symbols)) == len(symbols)


def test_a_dictionary_of_another_model_is_refused(tmp_path):
    args = options()
    save(tmp_path, args, reference(args), sizes=(V, V - 1))
    with pytest.raises(UserError, match=r"dict.en.txt: 20 symbols .* has 21"):
        fairseq.read(tmp_path)


@pytest.fixture
def dictionaries(tmp_path):
    for language in ("de", "en"):
        (tmp_path / f"dict.{language}.txt").write_text("ab@@ 5\nc 4\na 3\n\u2581a 2\nbc 2\n")
    return tmp_path


def encoded(directory, lines):
    """The symbols which lines are cut into, and the texts which they make."""
    tokenizer = fairseq._tokenizer(directory, ("de", "en"))
    ids = tokenizer.encode_source(lines)
    assert all(row[-1] == 1 for row in ids)
    return [[tokenizer.target.id_to_piece(token) for token in row[:-1]] for row in ids], tokenizer.decode_target(ids)


def test_text_that_is_cut_already_is_numbered_by_the_dictionary(dictionaries):
    pieces, texts = encoded(dictionaries, ["ab@@ c a", " a  bc ", "</s> ab", "a@@ c"])
    assert pieces == [["ab@@", "c", "a"], ["a", "bc"], ["<unk>", "<unk>"], ["<unk>", "c"]]
    assert texts[:2] == ["abc a", "a bc"]


@pytest.mark.parametrize("name", ["bpecodes", "code"])
@pytest.mark.parametrize("kind", ["fastbpe", "subword_nmt"])
def test_text_is_cut_by_merges(kind, name, dictionaries):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    merges = {"fastbpe": "a b 9\nb c</w> 5\n", "subword_nmt": "#version: 0.2\na b\nb c</w>\n"}[kind]
    (dictionaries / name).write_text(merges)
    pieces, texts = encoded(dictionaries, ["abc a", "bc", "cab zc"])
    assert pieces == [["ab@@", "c", "a"], ["bc"], ["<unk>", "<unk>", "<unk>", "<unk>", "c"]]
    assert texts[:2] == ["abc a", "bc"]


def test_merges_of_the_version_in_which_words_end_with_a_piece_are_refused(dictionaries):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    (dictionaries / "codes").write_text("a b\nb </w>\n")
    with pytest.raises(UserError, match=r"codes: merges of subword-nmt's version 0.1"):
        encoded(dictionaries, ["a"])


def test_text_is_cut_by_a_sentencepiece_model(dictionaries):
    words = ["ab", "abc", "bc", "a b", "c a"] * 20
    model = train_tokenizer([Pair(word, word) for word in words], TokenizerConfig(vocab=10)).source.files["model"]
    (dictionaries / "spm.model").write_bytes(model)
    cut = sentencepiece.SentencePieceProcessor(model_proto=model).encode("a bc", out_type=str)
    known = {"\u2581a", "c", "a", "bc"}
    pieces, _ = encoded(dictionaries, ["a bc"])
    assert pieces == [[piece if piece in known else "<unk>" for piece in cut]]
    assert "\u2581a" in pieces[0]
    (dictionaries / "codes").write_text("")
    with pytest.raises(UserError, match=r"several files say how words are cut: spm.model, codes"):
        encoded(dictionaries, ["a"])


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["runs_code", "cut", "no_checkpoint", "no_options", "two_checkpoints"])
def test_a_hostile_or_damaged_checkpoint_is_told_in_a_line(kind, tmp_path, capsys):
    directory, args = tmp_path / "theirs", options()
    save(directory, args, reference(args))
    path = directory / "model.pt"
    if kind == "runs_code":
        torch.save({"args": Runs(tmp_path / "ran"), "model": {}}, path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    if kind == "no_checkpoint":
        torch.save({"weights": {}}, path)
    if kind == "no_options":
        torch.save({"model": {}, "args": None}, path)
    if kind == "two_checkpoints":
        path.rename(directory / "a.pt")
        (directory / "b.pt").write_bytes(b"")
    assert main(["import", str(directory), "--workdir", str(tmp_path / "ours")]) == 2
    message = {
        "runs_code": "posix.mkdir",
        "cut": "not a whole file",
        "no_checkpoint": "no",
        "no_options": "neither `args` nor `cfg`",
        "two_checkpoints": "found a.pt, b.pt",
    }[kind]
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "ours").exists()
