"""Prepared datasets of `tensorflow-datasets`, read from their ArrayRecord files without TensorFlow.

A dataset is found by its files in `$TFDS_DATA_DIR` (else `~/tensorflow_datasets`), so that the code which made it need
not be imported. Nothing is downloaded.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from transformer_jax.errors import UserError

TOGETHER = 1024  # examples fetched at a time


def find(name: str) -> Any:
    """The builder of the prepared dataset `name`, as `wmt14_translate/de-en`.

    Raises:
      UserError: if it has not been prepared, or what describes it is damaged.
    """
    # Imported here because it takes a third of a second, which other corpora need not pay.
    from tensorflow_datasets.core import read_only_builder, registered

    directory = os.environ.get("TFDS_DATA_DIR")
    try:
        return read_only_builder.builder_from_files(name, data_dir=directory)
    except (registered.DatasetNotFoundError, ValueError) as error:
        raise UserError(
            f"tfds:{name}: no prepared dataset in {directory or '~/tensorflow_datasets'}. Prepare it with\n"
            f"  tensorflow_datasets.builder({name!r}, file_format='array_record').download_and_prepare()\n"
            "after `import tensorflow_datasets.translate.wmt14` or whichever module defines it, and name its "
            "directory in TFDS_DATA_DIR."
        ) from error
    except Exception as error:  # whatever a damaged file makes of TFDS and protobuf
        raise _damaged(name, f"its description in {directory or '~/tensorflow_datasets'}", error) from error


def examples(name: str, split: str) -> Iterator[Mapping[str, bytes]]:
    """The examples of a split or a part of one (`train[:1%]`), in the order of the files.

    Raises:
      UserError: if the dataset cannot be read so.
    """
    builder = find(name)
    source = _data_source(builder, name, split)
    for start in range(0, len(source), TOGETHER):
        numbers = range(start, min(start + TOGETHER, len(source)))
        try:
            found = source.__getitems__(numbers)
            if any(None in example.values() for example in found):
                raise ValueError("there are fewer examples in it than there should be")
        except Exception as error:  # whatever a damaged file makes of ArrayRecord and TFDS
            raise _damaged(name, " or ".join(_files(builder, split, numbers)), error) from error
        yield from found


def _files(builder: Any, split: str, numbers: range) -> Iterator[str]:
    """The files in which these examples of a split are."""
    begin = 0
    for part in builder.info.splits[split].file_instructions:
        if begin < numbers.stop and numbers.start < begin + part.take:
            yield part.filename
        begin += part.take


def _damaged(name: str, what: str, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
    return UserError(f"tfds:{name}: {what} can't be read ({reason}). Prepare or copy the dataset again.")


def _data_source(builder: Any, name: str, split: str) -> Any:
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise UserError(
            f"tfds:{name} is prepared as {builder.info.file_format.value}; expected array_record. "
            "Prepare it again with file_format='array_record' in another TFDS_DATA_DIR."
        ) from error
    except (KeyError, ValueError) as error:
        raise UserError(
            f"tfds:{name}: the split {split!r} cannot be read ({error}). "
            f"The dataset has {', '.join(builder.info.splits)}; a part of one is written `train[:1%]`."
        ) from error
