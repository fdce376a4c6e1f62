"""Whatever lies in the files of a run directory: an error that names the file, and nothing of it is executed."""

import ast
import dataclasses
import hashlib
import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from interop_models import marian_options, marian_weights, own_model, write_marian
from safetensors.numpy import load_file, save_file

import decode
from transformer_jax.batch import unpacked
from transformer_jax.data.segmenters import BytePieces, SentencePieces, Vocabulary, segmenter
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop.huggingface import read_json
from transformer_jax.interop.model import write_run
from transformer_jax.interop.vocab_yml import read_vocabulary
from transformer_jax.nn.transformer import Transformer
from transformer_jax.parameters import check_shapes, nested, read_parameters, shapes
from transformer_jax.run_directory import CONFIG, PARAMETERS, TOKENIZER, load_config

PACKAGE = pathlib.Path(__file__).parent.parent / "transformer_jax"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("whole") / "bundle"
    write_run(directory, own_model(encoder_layers=1, decoder_layers=1))
    return directory


@pytest.fixture
def bundle(whole, tmp_path) -> pathlib.Path:
    """A small model, to be spoiled."""
    return shutil.copytree(whole, tmp_path / "bundle")


def test_the_whole_bundle_is_one(bundle):
    Translator.load(str(bundle))


# Nothing is executed

WAYS_TO_RUN = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "torch"}
CALLS = {"exec", "eval", "compile", "__import__", "import_module", "unsafe_load", "full_load", "load_all"}
KNOWN = {
    "interop/torch_file.py": {"pickle"},  # with a short list of names in place of what the file says
    "inspect/__main__.py": {"import_module"},  # of this package's own modules
}


def ways_to_run(path: pathlib.Path) -> set[str]:
    """What a module of the package has that could run what stands in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & WAYS_TO_RUN
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & WAYS_TO_RUN
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") in ("re", "self")
            found |= {name} & CALLS if not is_method else set()
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and getattr(keyword.value, "value", None) is not False:
                    found.add("allow_pickle")
    return found


def test_no_module_has_a_way_to_run_what_stands_in_a_file():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 50
    found = {str(file.relative_to(PACKAGE)): ways for file in files if (ways := ways_to_run(file))}
    assert found == {name: ways for name, ways in KNOWN.items() if name in found}
    assert "interop/torch_file.py" in found  # so it is seen


WATCHED = """
import os, pathlib, pickle, sys
directory = sys.argv[1]

def watch(event, arguments):
    if event == "exec" and getattr(arguments[0], "co_filename", "").startswith(directory):
        found.append((event, arguments[0].co_filename))
    if event == "compile" and isinstance(arguments[1], (str, bytes)) and directory in str(arguments[1]):
        found.append((event, arguments[1]))
    if event in ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "marshal.loads"):
        if watching and not (event == "marshal.loads" and from_cache()):
            found.append((event, arguments[:2]))

def from_cache():
    frame = sys._getframe(2)
    while frame and "importlib" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None  # Python's own compiled modules

found, watching = [], False
sys.addaudithook(watch)
import jax
from transformer_jax.decoding.translator import Translator
from transformer_jax.errors import UserError
from transformer_jax.interop import marian, torch_file
from transformer_jax.interop.model import load_model
watching = True
exec(compile("1", directory + "control.py", "exec"))
pickle.loads(pickle.dumps(os.getcwd))
assert len(found) == 3, found  # so it is seen
found.clear()
for name in ("bundle", "run"):
    assert Translator.load(f"{directory}/{name}").translate(["a cat"], load_model(f"{directory}/{name}").config.search)
marian.read(pathlib.Path(directory, "marian"))
try:
    torch_file.read(f"{directory}/evil.pt")
except UserError as error:
    assert "wants to run" in str(error), error
else:
    raise AssertionError
watching = False
print("FOUND", found)
"""


class Evil:
    """A pickle of it, when it is loaded, makes a file."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.slow
def test_a_model_is_read_without_running_anything_that_lies_beside_it(bundle, tmp_path):
    """A bundle, a run's checkpoint, an imported model and a torch file, with modules and pickles among their files."""
    import orbax.checkpoint as ocp

    run = shutil.copytree(bundle, tmp_path / "run")
    params = read_parameters(run / PARAMETERS)
    (run / PARAMETERS).unlink()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(run / "checkpoints" / "5" / "params", params)
    (tmp_path / "marian").mkdir()
    pieces = [sentencepiece_pieces(90)] * 2
    vocab = len(pieces[0]), len(pieces[1])
    write_marian(tmp_path / "marian", marian_weights(vocab=vocab), marian_options(vocab=vocab), pieces)
    code = f"import os; os.mkdir({str(tmp_path / 'ran')!r})\n"
    for directory in (path for path in tmp_path.rglob("*") if path.is_dir()):
        for name in ("config.py", "__init__.py", "json.py", "sitecustomize.py", "conftest.py", "tokenizer.py"):
            (directory / name).write_text(code)
        for name in ("config.pkl", "checkpoint.pkl", "params.pickle"):
            (directory / name).write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    (tmp_path / "watched.py").write_text(WATCHED)
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "watched.py"), f"{tmp_path}/"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.rpartition("FOUND ")[2]) == []
    assert not (tmp_path / "ran").exists()


def sentencepiece_pieces(count: int) -> list[str]:
    return ["</s>", "<unk>", *(f"▁{number}" for number in range(count - 2))]


# config.json

HOSTILE_CONFIGS = {
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"model":' * 100_000,
    "a number of 5,000 digits": b'{"run": {"steps": ' + b"9" * 5000 + b"}}",
    "a billion layers": b'{"model": {"encoder_layers": 1000000000}}',
    "a billion units": b'{"model": {"width": 1000000000}}',
    "heads beyond int64": b'{"model": {"heads": 100000000000000000000}}',
    "a vocabulary beyond int32": b'{"model": {"source_vocab": 10000000000}}',
    "padding of a billion rows": b'{"model": {"vocab_multiple": 1000000000}}',
    "a billion beams": b'{"search": {"beam_size": 1000000000}}',
    "a billion more tokens": b'{"search": {"extra_length": 1000000000}}',
    "outputs as long as can be": b'{"search": {"length_factor": 1e308}}',
    "no number": b'{"model": {"dropout": NaN}}',
    "infinity": b'{"search": {"length_factor": Infinity}}',
    "too large for a float": b'{"optimizer": {"peak": 1e999}}',
    "an integer too large for a float": b'{"optimizer": {"peak": 1' + b"0" * 400 + b"}}",
    "text for a number": b'{"model": {"width": "512"}}',
    "a bool for a number": b'{"model": {"encoder_layers": true}}',
    "a list for an object": b'{"model": []}',
    "an object for text": b'{"data": {"source": {}}}',
    "a list for an enum": b'{"model": {"norm": ["layer"]}}',
    "a field twice": b'{"model": {"width": 16, "width": 32}}',
    "an unknown field": b'{"model": {"__class__": "x"}}',
    "a list": b"[]",
    "a number": b"1",
    "nothing": b"",
    "null": b"null",
    "half of a pair": b'{"data": {"source": "\\ud800"}}',
    "half of a pair as a name": b'{"\\ud800": 1}',
    "not UTF-8": b'{"data": {"source": "\xff"}}',
    "UTF-16": '{"run": {}}'.encode("utf-16"),
    "another model": b'{"model": {"width": 32}}',
    "no tokenizer's": b'{"model": {"source_vocab": 77}}',
    "cut": b'{"model": {"width": 16',
}


@pytest.mark.parametrize("name", HOSTILE_CONFIGS)
def test_a_hostile_configuration_is_an_error(bundle, name):
    (bundle / CONFIG).write_bytes(HOSTILE_CONFIGS[name])
    with pytest.raises(UserError) as error:
        Translator.load(str(bundle))
    assert str(bundle) in str(error.value) or "config.model" in str(error.value)
    assert len(str(error.value)) < 1000
    str(error.value).encode()


@pytest.mark.parametrize("name", ["deep lists", "a billion layers", "not UTF-8", "another model", "half of a pair"])
def test_the_command_says_it_in_a_line(bundle, name, capsys):
    (bundle / CONFIG).write_bytes(HOSTILE_CONFIGS[name])
    assert decode.main([f"--model={bundle}", f"--input={bundle / CONFIG}"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_more_memory_is_taken_than_a_configuration_needs(bundle):
    """A file of a gigabyte, an endless one, and a string of nearly all that is read."""
    path = bundle / "other.json"
    path.write_text('{"data": {"source": ["' + "x" * 900_000 + '"]}}')
    os.truncate(bundle / CONFIG, 2**30)
    for other in (bundle / CONFIG, path, pathlib.Path("/dev/zero")):
        if other != bundle / CONFIG:
            (bundle / CONFIG).unlink()
            (bundle / CONFIG).symlink_to(other)
        tracemalloc.start()
        with pytest.raises(UserError) as error:
            load_config(bundle)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20e6
        assert len(str(error.value)) < 1000


def test_a_configuration_that_can_not_be_read_is_named(bundle):
    (bundle / CONFIG).unlink()
    (bundle / CONFIG).mkdir()
    with pytest.raises(UserError, match=r"config\.json: can't be read"):
        load_config(bundle)


# parameters.safetensors


def safetensors(header: object, content: bytes = b"1234", *, size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + content


def tensor(*offsets: int, shape=(1,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE_PARAMETERS = {
    "a header of 2^63 bytes": safetensors({"a": tensor(0, 4)}, size=2**63),
    "a header of 2^64 - 1 bytes": safetensors({"a": tensor(0, 4)}, size=2**64 - 1),
    "a header longer than the file": safetensors({"a": tensor(0, 4)}, size=5000),
    "a header cut short": safetensors({"a": tensor(0, 4)}, size=5),
    "tensors on top of each other": safetensors({"a": tensor(0, 4), "b": tensor(0, 4)}),
    "a hole": safetensors({"a": tensor(4, 8)}, b"12345678"),
    "more after the end": safetensors({"a": tensor(0, 4)}, b"12345678"),
    "less than it says": safetensors({"a": tensor(0, 8, shape=(2,))}),
    "an end before its beginning": safetensors({"a": tensor(4, 0)}),
    "a shape of exabytes": safetensors({"a": tensor(0, 4, shape=(2**62, 4))}),
    "a shape of terabytes": safetensors({"a": tensor(0, 2**42, shape=(2**40,))}),
    "a negative shape": safetensors({"a": tensor(0, 4, shape=(-1,))}),
    "integers": safetensors({"a": tensor(0, 4, dtype="I32")}),
    "a dtype which NumPy has not": safetensors({"a": tensor(0, 4, shape=(4,), dtype="F8_E4M3")}),
    "a dtype of half a byte": safetensors({"a": tensor(0, 2, shape=(4,), dtype="F4")}, b"12"),
    "an unknown dtype": safetensors({"a": tensor(0, 4, dtype="F99")}),
    "a tensor below another": safetensors({"a": tensor(0, 4), "a/b": tensor(4, 8)}, b"12345678"),
    "a tensor above another": safetensors({"a/b": tensor(0, 4), "a": tensor(4, 8)}, b"12345678"),
    "a deep header": safetensors(b'{"a":' + b"[" * 100_000),
    "half of a pair": safetensors(b'{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "a header that is not UTF-8": safetensors(b'{"\xff":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    "a list": safetensors([]),
    "nothing": b"",
    "a few bytes": b"1234",
    "a pickle": pickle.dumps({"a": [1.0]}),
}


@pytest.mark.parametrize("name", HOSTILE_PARAMETERS)
def test_hostile_parameters_are_an_error(tmp_path, name):
    path = tmp_path / PARAMETERS
    path.write_bytes(HOSTILE_PARAMETERS[name])
    with pytest.raises(UserError, match=r"parameters\.safetensors: ") as error:
        read_parameters(path)
    assert len(str(error.value)) < 1000


def test_parameters_that_were_cut_or_changed_anywhere_are_an_error_or_of_the_model(bundle):
    """Of what is in the header; bits of the numbers themselves nobody can miss."""
    path, config = bundle / PARAMETERS, own_model(encoder_layers=1, decoder_layers=1).config.model
    content, draw = path.read_bytes(), random.Random(0)
    header = 8 + struct.unpack("<Q", content[:8])[0]
    refused = 0
    for _ in range(60):
        place = draw.randrange(header)
        changed = content[:place] + bytes([draw.randrange(256)]) + content[place + 1 :]
        path.write_bytes(changed if draw.random() < 0.7 else content[: draw.randrange(len(content))])
        try:
            check_shapes(read_parameters(path), config, name="bundle")
        except UserError:
            refused += 1
    assert refused > 40


@pytest.mark.parametrize(
    "change",
    [
        lambda leaves: leaves.pop(min(leaves)),
        lambda leaves: leaves.update({"more": np.zeros(1, np.float32)}),
        lambda leaves: leaves.update({"encoder//x": np.zeros(1, np.float32)}),
        lambda leaves: leaves.update({"": np.zeros(1, np.float32)}),
        lambda leaves: leaves.update({name: leaf.T.copy() for name, leaf in leaves.items() if leaf.ndim > 1}),
        lambda leaves: leaves.update({name: leaf[None] for name, leaf in leaves.items()}),
        lambda leaves: leaves.clear(),
    ],
)
def test_parameters_of_another_model_are_refused_by_name(bundle, change):
    leaves = load_file(bundle / PARAMETERS)
    change(leaves)
    save_file(leaves, bundle / PARAMETERS)
    with pytest.raises(UserError, match=r"bundle: the parameter .* has shape .*, but its configuration asks for"):
        Translator.load(str(bundle))


@pytest.mark.parametrize("scan", [False, True])
def test_the_shapes_that_are_expected_are_those_that_a_model_makes(scan):
    config = dataclasses.replace(own_model().config.model, encoder_layers=2, decoder_layers=3, scan=scan)

    def init(ids: jax.Array):
        return Transformer(config).init(jax.random.key(0), unpacked(ids, ids))

    made = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 1), np.int32))
    assert nested(shapes(config)) == jax.tree.map(lambda leaf: tuple(leaf.shape), made)


# The tokenizer


def put(bundle: pathlib.Path, name: str, content: bytes) -> None:
    """Puts a file into the place of the tokenizer's, and its hash among the others."""
    directory = bundle / TOKENIZER
    for path in directory.iterdir():
        path.unlink()
    (directory / name).write_bytes(content)
    (directory / "tokenizer.json").write_text(json.dumps({name: hashlib.sha256(content).hexdigest()}))


def test_a_file_of_the_tokenizer_that_was_changed_is_refused_by_its_hash(bundle):
    path = bundle / TOKENIZER / "joint.model"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"joint\.model has sha256 .* Restore it"):
        Translator.load(str(bundle))


@pytest.mark.parametrize(
    "hashes",
    [
        b"",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b"{}",
        b'{"joint.model": 1}',
        b'{"joint.model": ""}',
        b'{"joint.model": "", "/dev/zero": ""}',
        b'{"joint.model": "", "joint.../../secret": ""}',
        b'{"../../secret.model": ""}',
        b'{"source.model": ""}',
        b'{"joint.model": "", "source.model": ""}',
    ],
)
def test_a_list_of_files_that_is_none_is_refused_and_no_other_file_is_read(bundle, hashes):
    path = bundle / TOKENIZER / "tokenizer.json"
    path.write_bytes(hashes)
    with pytest.raises(UserError, match="bundle/tokenizer/"):
        Tokenizer.load(bundle / TOKENIZER)


def test_a_file_outside_the_tokenizer_is_not_read(bundle):
    """Its name begins as one of the tokenizer's files does; what is said of a file that was read is its hash."""
    (bundle / TOKENIZER / "joint.").mkdir()
    (bundle / "secret").write_text("secret")
    hashes = json.loads((bundle / TOKENIZER / "tokenizer.json").read_text()) | {"joint./../../secret": ""}
    (bundle / TOKENIZER / "tokenizer.json").write_text(json.dumps(hashes))
    with pytest.raises(UserError, match=r"tokenizer\.json: expected the hashes"):
        Tokenizer.load(bundle / TOKENIZER)


def test_a_sentencepiece_model_that_was_cut_or_changed_is_an_error_or_cuts_text(bundle):
    """With the hash of what it became, as whoever means harm would give it."""
    content, draw = (bundle / TOKENIZER / "joint.model").read_bytes(), random.Random(0)
    refused = 0
    for number in range(300):
        changed = bytearray(content[: draw.randrange(len(content))] if number % 3 == 0 else content)
        for _ in range(draw.choice([0, 1, 3, 30])):
            if changed:
                changed[draw.randrange(len(changed))] = draw.randrange(256)
        try:
            pieces = SentencePieces(bytes(changed), name="joint.model")
        except UserError:
            refused += 1
            continue
        "".join(pieces.pieces).encode()
        pieces.decode([ids[:-1] for ids in pieces.encode(["a cat", "", "\0"])])
    assert 150 < refused < 300


@pytest.mark.parametrize(
    "content", [b"", b"\0", b"x" * 1000, b"\n\x0e\n\x03\xff\xff\xff\x15\0\0\0\0\x18\1", pickle.dumps({"pieces": []})]
)
def test_what_is_no_sentencepiece_model_is_refused(bundle, content):
    put(bundle, "joint.model", content)
    with pytest.raises(UserError, match=r"joint\.model: "):
        Tokenizer.load(bundle / TOKENIZER)


NUMBERED = {"pieces": ["<pad>", "</s>", "<unk>", "a"], "ids": [None, 0, 1, 2]}


@pytest.mark.parametrize(
    "vocabulary",
    [
        b"",
        b"[" * 100_000,
        b"\xff",
        [],
        {},
        {"pieces": 1, "ids": 1},
        NUMBERED | {"ids": [None, 0, 1]},
        NUMBERED | {"ids": [None, 0, 1, "2"]},
        NUMBERED | {"ids": [None, 0, 1, 2.0]},
        NUMBERED | {"ids": [None, 0, 1, -1]},
        NUMBERED | {"ids": [None, 0, 1, 2**70]},
        NUMBERED | {"ids": [None, 0, 1, True]},
        NUMBERED | {"pieces": ["<pad>", "</s>", "<unk>", "<unk>"]},
        NUMBERED | {"pieces": ["<pad>", "</s>", "<unk>", None]},
        NUMBERED | {"pieces": ["<pad>", "</s>", "<unk>", ["a"]]},
        NUMBERED | {"pieces": ["<pad>", "</s>", "<unk>", "\ud800"]},
        {"pieces": [], "ids": []},
    ],
)
def test_a_hostile_vocabulary_is_an_error(vocabulary):
    model = next(iter(own_model().tokenizer.files.values()))
    content = vocabulary if isinstance(vocabulary, bytes) else json.dumps(vocabulary).encode()
    with pytest.raises(UserError, match=r"^joint\.vocabulary\.json: "):
        segmenter({"model": model, "vocabulary.json": content}, name="joint")


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"model": {"type": "BPE"}}', b"null"])
def test_a_hostile_definition_of_byte_pieces_is_an_error(content):
    pytest.importorskip("tokenizers")
    with pytest.raises(UserError, match=r"^x: not a tokenizer"):
        BytePieces(content, Vocabulary(("<pad>", "</s>", "<unk>"), (1, 2, 3)), name="x")


# Models of others


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.yml", b'"\\UFFFFFFFF": 0\n'),
        ("vocab.yml", b'"\\ud800": 0\n'),
        ("vocab.yml", b"a: " + b"9" * 5000),
        ("vocab.yml", b"\xff: 0"),
        ("vocab.json", b'{"a": 1e999}'),
        ("vocab.json", b'{"a": NaN}'),
        ("vocab.json", b'{"\\ud800": 0}'),
        ("vocab.json", b"[" * 100_000),
        ("vocab.json", b"1"),
        ("vocab.json", b'{"a": 1000000000000}'),
        ("vocab.spm", b"\n\x0e\n\x03\xff\xff\xff\x15\0\0\0\0\x18\1"),
        ("vocab.txt", b""),
    ],
)
def test_a_hostile_list_of_pieces_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}"):
        read_vocabulary(tmp_path / name)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"", b"1", b'{"a": ' + b"9" * 5000 + b"}"])
def test_a_hostile_configuration_of_another_system_is_an_error(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json: "):
        read_json(tmp_path / "config.json")
