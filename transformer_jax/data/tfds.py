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
      UserError: if it has not been prepared.
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


def examples(name: str, split: str) -> Iterator[Mapping[str, bytes]]:
    """The examples of a split or a part of one (`train[:1%]`), in the order of the files.

    Raises:
      UserError: if the dataset cannot be read so.
    """
    source = _data_source(name, split)
    for start in range(0, len(source), TOGETHER):
        yield from source.__getitems__(range(start, min(start + TOGETHER, len(source))))


def _data_source(name: str, split: str) -> Any:
    builder = find(name)
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
