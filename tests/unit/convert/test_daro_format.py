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
    ("place", "value"),
    [
        (0, 5),
        (2, None),
        (1, "../rank0.safetensors"),  # outside the checkpoint's own directory
        (3, ["2", 0]),
        (3, [True, 0]),
        (3, [2.5, 0]),
        (3, [-2, 0]),
        (4, [2]),
        (5, [4, 3, 1]),
        (5, 4),
    ],
)
def test_a_row_that_cannot_be_is_refused(tmp_path, place, value):
    write_index(tmp_path, [WHOLE])
    path = tmp_path / INDEX_FILE
    content = json.loads(path.read_text())
    content["shards"][0][place] = value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=str(path)):
        list(read_index(tmp_path))
