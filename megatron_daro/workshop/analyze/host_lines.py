"""Lines of NeMo-RL's and ROLL's dumps as one mapping for each rollout.

In NeMo-RL's lines each value is a list of one element, and the prompt is only found among the token ids, before the
first trained token. A line of ROLL holds a whole step, with a list for each column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import cast

from megatron_daro.errors import DataError
from megatron_daro.workshop.analyze.lengths import token_count

NEMO_RL = {"group": "prompt_tokens", "length": "trained_tokens", "right": "reward"}
ROLL = {"group": "prompt", "length": "responses", "right": "scores"}
_ROLL_GROUPS = ("messages", "prompt", "id")


def rollouts_of(record: Mapping[str, object], where: str) -> Iterator[Mapping[str, object]]:
    """Yield the rollouts of one object.

    Args:
        record: a line; that of another framework is yielded unchanged.
        where: file and line, for errors.

    Raises:
        DataError: columns of a line have different lengths.
    """
    if {"rewards", "token_ids", "token_loss_mask"} <= record.keys():
        yield _nemo_rl(record)
    elif {"global_step", "responses", "scores"} <= record.keys() and isinstance(record["responses"], list):
        yield from _roll(record, where)
    else:
        yield record


def _nemo_rl(record: Mapping[str, object]) -> Mapping[str, object]:
    """Return the rollout. With dynamic sampling, `rewards` may belong to rollouts that are not trained;
    `filtered_rewards` belongs to the trained ones."""
    tokens, mask = _only(record["token_ids"]), _only(record["token_loss_mask"])
    reward = _only(record.get("filtered_rewards", record["rewards"]))
    if not isinstance(tokens, list) or not isinstance(mask, list):
        return {}
    trained = [bool(value) for value in mask]
    end = trained.index(True) if True in trained else token_count(_only(record.get("input_lengths", len(tokens))))
    if end is None:
        return {}
    prompt = hashlib.blake2b(repr(tokens[: int(end)]).encode(), digest_size=16).hexdigest()
    return {"prompt_tokens": prompt, "trained_tokens": sum(trained), "reward": reward}


def _only(value: object) -> object:
    """Return the element of a list that has only one, as NeMo-RL writes each value; return anything else unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _roll(record: Mapping[str, object], where: str) -> Iterator[Mapping[str, object]]:
    group = next((name for name in _ROLL_GROUPS if isinstance(record.get(name), list)), None)
    names = [name for name in (group, "responses", "scores") if name]
    columns = [cast(list[object], record[name]) for name in names]
    if len({len(column) for column in columns}) > 1:
        sizes = ", ".join(f"{name} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise DataError(f"dump: {where}: columns of different lengths ({sizes}); the file is not as ROLL writes it")
    for values in zip(*columns, strict=True):
        rollout = dict(zip(names, values, strict=True))
        if group:
            rollout["prompt"] = str(rollout[group])
        yield rollout
