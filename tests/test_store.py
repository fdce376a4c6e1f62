import numpy as np
import pytest

from transformer_jax.data import store as store_module
from transformer_jax.data.store import build_store, open_store, store_in_memory

PAIRS = [([5, 6, 1], [7, 1]), ([1], [8, 9, 10, 1]), ([70_000, 1], [3, 1])]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "train"


def contents(store):
    return [(store.source(i).tolist(), store.target(i).tolist()) for i in range(len(store))]


def test_a_store_gives_back_the_pairs_in_order(path):
    built = build_store(path, PAIRS, fingerprint="f")
    opened = open_store(path, "f")
    assert contents(built) == contents(opened) == PAIRS
    assert opened.lengths.tolist() == [[3, 2], [1, 4], [2, 2]]
    assert contents(store_in_memory(PAIRS)) == PAIRS


def test_ids_are_memory_mapped_and_cannot_be_written(path):
    build_store(path, PAIRS, fingerprint="f")
    ids = open_store(path, "f").ids
    assert isinstance(ids, np.memmap)
    assert not ids.flags.writeable


def test_the_size_of_each_corpus_is_kept(path):
    build_store(path, PAIRS, [], PAIRS[:1], fingerprint="f")
    store = open_store(path, "f")
    assert store.sizes == (3, 0, 1)
    assert contents(store) == PAIRS + PAIRS[:1]


def test_pairs_are_written_as_they_come(path, monkeypatch):
    """Only a chunk of the corpus is in memory: when pair n is asked for, the chunks before it are in the file."""
    monkeypatch.setattr(store_module, "CHUNK", 2)
    appended = []
    append = store_module._GrowingArray.append
    monkeypatch.setattr(
        store_module._GrowingArray, "append", lambda file, array: (appended.append(len(array)), append(file, array))
    )

    def corpus():
        for number in range(7):
            assert len(appended) == number // 2 * 2
            yield [number, 1], [1]

    assert contents(build_store(path, corpus(), fingerprint="f")) == [([n, 1], [1]) for n in range(7)]


def test_a_store_without_pairs_can_be_opened(path):
    build_store(path, fingerprint="f")
    assert len(open_store(path, "f")) == 0
    assert len(store_in_memory()) == 0


def test_a_store_that_is_absent_or_of_another_corpus_is_stale(path):
    assert open_store(path, "f") is None
    build_store(path, PAIRS, fingerprint="f")
    assert open_store(path, "g") is None


def test_a_stale_store_is_replaced(path):
    build_store(path, PAIRS, fingerprint="f")
    build_store(path, PAIRS[1:], fingerprint="g")
    assert contents(open_store(path, "g")) == PAIRS[1:]
    assert [file.name for file in path.parent.iterdir()] == ["train"]


def test_a_build_that_fails_leaves_the_store_before_it_and_no_litter(path):
    build_store(path, PAIRS, fingerprint="f")

    def corpus():
        yield PAIRS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_store(path, corpus(), fingerprint="g")
    assert contents(open_store(path, "f")) == PAIRS
    assert [file.name for file in path.parent.iterdir()] == ["train"]


def truncate(file):
    file.write_bytes(file.read_bytes()[:-4])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("name", ["ids.npy", "lengths.npy", "store.json"])
@pytest.mark.parametrize("damage", [truncate, flip_a_bit, empty, lambda file: file.unlink()])
def test_a_damaged_store_is_said_to_be_so_and_built_again(path, name, damage, caplog):
    build_store(path, PAIRS, fingerprint="f")
    damage(path / name)
    assert open_store(path, "f") is None
    assert "damaged" in caplog.text
    assert str(path) in caplog.text
    assert contents(build_store(path, PAIRS, fingerprint="f")) == PAIRS
