"""The index of a checkpoint of ours: what is no row of it is refused by name before any tensor is read."""

import json

import pytest

from megatron_daro.convert.daro_format import INDEX_FILE, StoredShard, read_index, write_index
from megatron_daro.errors import CheckpointError

WHOLE = StoredShard("layer.weight", "rank0.safetensors", "0", (2, 0), (2, 3), (4, 3))


def test_what_was_written_is_read(tmp_path):
    write_index(tmp_path, [WHOLE])
    assert list(read_index(tmp_path)) == [WHOLE]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (0, 5, "is no shard's row"),
        (2, None, "is no shard's row"),
        (1, "../rank0.safetensors", "is not a file name in the checkpoint's own directory"),
        (3, ["2", 0], "is no shard's row"),
        (3, [True, 0], "is no shard's row"),
        (3, [2.5, 0], "is no shard's row"),
        (3, [-2, 0], "offset [-2, 0], shape [2, 3] and global shape [4, 3] do not fit"),
        (4, [2], "do not fit"),
        (5, [4, 3, 1], "do not fit"),
        (5, 4, "cannot be read"),
    ],
)
def test_a_row_that_cannot_be_is_refused(tmp_path, place, value, words):
    write_index(tmp_path, [WHOLE])
    path = tmp_path / INDEX_FILE
    content = json.loads(path.read_text())
    content["shards"][0][place] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refusal:
        list(read_index(tmp_path))
    assert words in str(refusal.value) and str(path) in str(refusal.value)
