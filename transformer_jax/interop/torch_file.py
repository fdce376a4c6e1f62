"""What `torch.save` wrote, read without PyTorch and without running anything that the file says.

Such a file is a pickle beside the bytes of its tensors, and a pickle may call any function by its name. Here a name
stands for one of a short list of things, which only store what they are given; any other is refused.
"""

import collections
import io
import math
import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from transformer_jax.errors import UserError

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of files from before PyTorch 1.6
TAR = 257, b"ustar"  # of the archives from before 0.4, which are not read

STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class Record:
    """An object of a class that is not loaded: nothing but its fields."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)


def read(path: str | os.PathLike) -> Any:
    """What was saved in a file, with NumPy arrays as tensors and `Record`s as objects.

    Raises:
      UserError: if the file is damaged, or names anything outside the short list.
    """
    path = pathlib.Path(path)
    try:
        with path.open("rb") as stream:
            return _zipped(stream, str(path)) if zipfile.is_zipfile(stream) else _sequence(stream, str(path))
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror or error}). Give the path of a .pt file.") from error
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever damaged bytes make of the unpickler
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}: not a whole file of torch.save ({what:.200}). Copy it again.") from error


def plain(value: Any) -> Any:
    """Namespaces and OmegaConf's containers in `value` → dictionaries and lists."""
    if isinstance(value, Record):
        fields = vars(value)
        for name in ("_content", "_val"):  # OmegaConf's containers and leaves
            if name in fields:
                return plain(fields[name])
        return {name: plain(field) for name, field in fields.items()}
    if isinstance(value, dict):
        return {plain(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _zipped(stream: BinaryIO, path: str) -> Any:
    """PyTorch 1.6 and later: NAME/data.pkl, and NAME/data/KEY for each storage."""
    with zipfile.ZipFile(stream) as archive:
        names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(names) != 1:
            raise UserError(f"{path}: a zip archive without the data.pkl of torch.save. Give the .pt file itself.")
        if any(file.compress_type != zipfile.ZIP_STORED for file in archive.infolist()):
            raise UserError(f"{path}: compressed, which torch.save never does. Give the file that it wrote.")
        root = names[0].removesuffix("data.pkl")
        if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
            raise UserError(f"{path}: written on a big-endian machine. Save it again on a usual one.")
        storages: dict[tuple[str, np.dtype], np.ndarray] = {}  # one may be seen as several types

        def storage(key: str, dtype: np.dtype, size: int) -> np.ndarray:
            if (key, dtype) not in storages:
                storages[key, dtype] = np.frombuffer(archive.read(f"{root}data/{key}"), dtype)
            if len(storages[key, dtype]) < size:
                raise ValueError(f"storage {key} has {len(storages[key, dtype])} of {size} elements")
            return storages[key, dtype]

        return _Unpickler(io.BytesIO(archive.read(names[0])), path, storage).load()


def _sequence(stream: BinaryIO, path: str) -> Any:
    """Before 1.6: the pickles of a magic number, a version, the machine, what was saved and the storages' keys,
    then for each key the number of its elements and their bytes."""
    stream.seek(TAR[0])
    if stream.read(len(TAR[1])) == TAR[1]:
        raise UserError(f"{path}: written by PyTorch before 0.4. Load and save it with a later one.")
    stream.seek(0)
    storages: dict[str, np.ndarray] = {}

    def storage(key: str, dtype: np.dtype, size: int) -> np.ndarray:
        # The bytes come after the pickle which asks for them, so it gets an array that is filled later.
        known = storages.setdefault(key, np.zeros(_bounded(size, dtype), dtype))
        if known.dtype != dtype or len(known) != size:
            raise ValueError(f"storage {key} is two different ones")
        return known

    left = os.fstat(stream.fileno()).st_size

    def _bounded(size: int, dtype: np.dtype) -> int:
        nonlocal left
        left -= size * dtype.itemsize
        if left < 0:
            raise ValueError("tensors are larger than the file")
        return size

    header = [_Unpickler(stream, path, storage).load() for _ in range(3)]
    if header[0] != MAGIC:
        raise ValueError("the magic number is missing")
    if not header[2].get("little_endian", True):
        raise UserError(f"{path}: written on a big-endian machine. Save it again on a usual one.")
    saved = _Unpickler(stream, path, storage).load()
    keys = [str(key) for key in _Unpickler(stream, path, storage).load()]
    if missing := storages.keys() - keys:
        raise ValueError(f"the storage {min(missing)} is missing")
    for key in keys:
        count = int.from_bytes(stream.read(8), "little")
        if key not in storages:
            raise ValueError(f"the storage {key} is of no tensor")
        content = stream.read(storages[key].nbytes)
        if count != len(storages[key]) or len(content) < storages[key].nbytes:
            raise ValueError(f"the storage {key} has not {len(storages[key])} elements")
        storages[key][:] = np.frombuffer(content, storages[key].dtype)
    return saved


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream, path: str, storage: Callable[[str, np.dtype, int], np.ndarray]):
        super().__init__(stream, encoding="utf-8")
        self.path, self.storage = path, storage

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return name
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        if (module, name) in RECORDS or module.startswith(RECORD_MODULES):
            return Record
        raise UserError(
            f"{self.path}: the file wants to run {module}.{name}, which is no part of a checkpoint that can be read "
            "safely. If you trust whoever made it, load it with PyTorch and save the tensors alone."
        )

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, name, key, _, size, *view = pid
        if kind != "storage" or name not in STORAGES or any(part is not None for part in view):
            raise ValueError(f"an unknown kind of storage: {pid!r:.80}")
        return self.storage(str(key), STORAGES[name], int(size)).view(_Array)


class _Array(np.ndarray):
    """An array that a pickle can't give another content."""

    def __setstate__(self, state: Any) -> None:  # type: ignore[override]
        raise ValueError("a tensor with a state")


class _Sealed:
    """A function that a pickle can call, but not change."""

    __slots__ = ("function",)

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise ValueError("a function with a state")


def _tensor(storage: np.ndarray, offset: int, size: tuple, stride: tuple, *_: Any) -> np.ndarray:
    """A view of a storage; `stride` counts elements."""
    count = math.prod(size)
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if min(offset, *size, *stride, 0) < 0 or max(count, last + 1 if count else 0) > len(storage):
        raise ValueError(f"a tensor of shape {size} reaches outside its storage of {len(storage)} elements")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, subok=True, writeable=False)


def _first(value: Any, *_: Any) -> Any:
    return value


def _nothing(*_: Any) -> None:
    return None


def _mapping(*_: Any) -> dict:
    return {}


KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _Sealed(_tensor),
    ("torch._utils", "_rebuild_tensor_v2"): _Sealed(_tensor),
    ("torch._utils", "_rebuild_parameter"): _Sealed(_first),
    ("torch", "Size"): _Sealed(_first),
    ("torch", "device"): _Sealed(_nothing),
    ("collections", "OrderedDict"): _Sealed(collections.OrderedDict),
    ("collections", "defaultdict"): _Sealed(_mapping),
    ("typing", "Any"): _Sealed(_nothing),
}
KNOWN |= {
    (module, name): _Sealed(_first)
    for module in ("builtins", "__builtin__")  # the second is what protocol 2 says
    for name in ("bool", "dict", "float", "int", "list", "long", "set", "str", "unicode")
}
KNOWN |= {
    ("torch", name): _Sealed(_nothing)  # types by themselves
    for name in ("float16", "float32", "float64", "bfloat16", "int8", "int32", "int64", "uint8", "bool")
}
RECORDS = {("argparse", "Namespace"), ("numpy", "dtype"), ("_codecs", "encode"), ("pathlib", "PosixPath")} | {
    (f"{package}.multiarray", name) for package in ("numpy.core", "numpy._core") for name in ("scalar", "_reconstruct")
}
RECORD_MODULES = ("omegaconf.", "fairseq.meters", "fairseq.logging.meters", "fairseq.dataclass.")
