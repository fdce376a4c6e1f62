"""Files of `torch.save`, read without PyTorch, and files that want more than to be read."""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from transformer_jax.errors import UserError
from transformer_jax.interop import torch_file

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[peers]'")


def saved():
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    model = torch.nn.Linear(3, 2)
    return {
        "args": argparse.Namespace(layers=6, names=["a", "b"]),
        "model": model.state_dict(),
        "parameter": model.weight,
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1.5, -2.0]).half(),
        "bfloat16": torch.tensor([1.5, -2.0]).bfloat16(),
        "long": torch.tensor([2**40]),
        "bool": torch.tensor([True, False]),
        "byte": torch.tensor([255], dtype=torch.uint8),
        "size": torch.Size([2, 3]),
        "sets": {1, 2},
        "defaults": collections.defaultdict(list, {"a": [1]}),
        "number": np.float64(3.5),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "path": pathlib.PosixPath("/data"),
    }


@pytest.mark.parametrize("zipped", [True, False])
def test_all_kinds_of_tensors_are_those_that_torch_reads(zipped, tmp_path):
    torch.save(saved(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    found = torch_file.read(tmp_path / "a.pt")
    expected = torch.load(tmp_path / "a.pt", weights_only=False)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if isinstance(tensor, torch.Tensor):
            np.testing.assert_array_equal(np.asarray(found[name], np.float32), tensor.detach().float().numpy())
            assert str(found[name].dtype) == str(tensor.dtype).removeprefix("torch.")
    for name, tensor in expected["model"].items():
        np.testing.assert_array_equal(found["model"][name], tensor.numpy())
    assert torch_file.plain(found["args"]) == {"layers": 6, "names": ["a", "b"]}
    assert found["size"] == (2, 3)
    assert sorted(found["sets"]) == [1, 2]
    assert found["defaults"] == {"a": [1]}


def test_containers_of_omegaconf_become_plain_ones(tmp_path):
    omegaconf = pytest.importorskip("omegaconf", reason="omegaconf is not installed")
    config = omegaconf.OmegaConf.create({"model": {"_name": "transformer", "heads": 4}, "list": [1, "b"]})
    torch.save({"cfg": config}, tmp_path / "a.pt")
    expected = {"model": {"_name": "transformer", "heads": 4}, "list": [1, "b"]}
    assert torch_file.plain(torch_file.read(tmp_path / "a.pt")["cfg"]) == expected


class Runs:
    """Its pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "name"), [(os.system, "system"), (eval, "eval"), (os.mkdir, "mkdir"), (pickle.loads, "loads")]
)
def test_a_file_that_would_run_code_is_refused_by_the_name_of_what_it_calls(function, name, zipped, tmp_path):
    argument = f"__import__('pathlib').Path('{tmp_path}/ran').touch()" if function is eval else str(tmp_path / "ran")
    torch.save({"model": Runs(function, argument)}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=rf"a.pt: the file wants to run \w+\.{name}, "):
        torch_file.read(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def opcodes(*parts):
    """A pickle made by hand."""
    return b"\x80\x02" + b"".join(parts) + b"."


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x04tQ"  # of 4 elements


def tensor_of(*arguments):
    return opcodes(TENSOR, b"(", STORAGE, *arguments, b"\x89Nt", b"R")


MALICIOUS = {
    "an element beyond the storage": tensor_of(b"K\x01", b"K\x04\x85", b"K\x01\x85"),
    "a negative offset": tensor_of(b"J\xff\xff\xff\xff", b"K\x01\x85", b"K\x01\x85"),
    "a negative stride": tensor_of(b"K\x03", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "a stride of nothing, and billions of elements": tensor_of(b"K\0", b"J\0\0\0\x40\x85", b"K\0\x85"),
    "strides for other axes": tensor_of(b"K\0", b"K\x02\x85", b"K\x01K\x01\x86"),
    "a function with another state": opcodes(TENSOR, b"}X\x01\0\0\0aK\x01sb"),
    "a function with other defaults": opcodes(TENSOR, b"N}X\x0c\0\0\0__defaults__)s\x86b"),
    "a tensor with another state": opcodes(STORAGE, b")b"),
    "a storage of another kind": opcodes(b"(X\x07\0\0\0outsidectorch\nFloatStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x04tQ"),
    "a number for a tensor": opcodes(TENSOR, b"K\x01\x85R"),
    "nothing": b"",
    "a name of two parts": opcodes(b"X\x05\0\0\0torchX\x0d\0\0\0Size.__init__\x93"),
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_what_no_torch_save_writes_is_refused(name, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", MALICIOUS[name])
        archive.writestr("a/data/a", np.arange(4, dtype=np.float32).tobytes())
    before = {key: getattr(torch_file.KNOWN[key], "__dict__", None) for key in torch_file.KNOWN}
    with pytest.raises(UserError, match=r"a.pt: "):
        torch_file.read(tmp_path / "a.pt")
    assert before == {key: getattr(torch_file.KNOWN[key], "__dict__", None) for key in torch_file.KNOWN}


def test_the_pickle_made_by_hand_is_read_when_it_is_right(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", tensor_of(b"K\x01", b"K\x03\x85", b"K\x01\x85"))
        archive.writestr("a/data/a", np.arange(4, dtype=np.float32).tobytes())
    np.testing.assert_array_equal(torch_file.read(tmp_path / "a.pt"), [1, 2, 3])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_was_cut_or_changed_anywhere_is_an_error_or_the_same_and_never_a_crash(zipped, tmp_path):
    stream = io.BytesIO()
    torch.save({"model": {"w": torch.ones(30)}}, stream, _use_new_zipfile_serialization=zipped)
    content, path = stream.getvalue(), tmp_path / "a.pt"
    for end in range(0, len(content) - 1, 41):
        path.write_bytes(content[:end])
        with pytest.raises(UserError, match=r"a.pt: "):
            torch_file.read(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(content), size=150):
        changed = bytearray(content)
        changed[place] ^= int(rng.integers(1, 256))
        path.write_bytes(changed)
        with contextlib.suppress(UserError):  # any other error fails the test
            torch_file.read(path)


def test_a_compressed_archive_is_refused_and_so_is_a_missing_file(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps(list(range(1000))))
    with pytest.raises(UserError, match="compressed"):
        torch_file.read(tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"none.pt: can't be read"):
        torch_file.read(tmp_path / "none.pt")
