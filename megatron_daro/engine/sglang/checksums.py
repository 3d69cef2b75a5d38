"""Whether a server has the tensors that were sent, by its checksums and the sender's digests of some of them.

A server that hashes as the sender does must have the same; of any other, some checksums must have changed since its
last update where what was sent did. Pure: what servers and senders said -> whether it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_daro.engine.sglang.client import ServerFacts
from megatron_daro.errors import EngineError
from megatron_daro.sync.plan import Digest, is_hashed

FUSED = ("qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts")
"""Parts of the names that a server is not asked for: tensors that it fuses, or that are large."""


@dataclass(frozen=True, slots=True)
class LastChecksums:
    """Of a server's last update. digests: of what was sent, by name. checksums: of what it had, by rank and name."""

    digests: Mapping[str, Digest] = field(default_factory=dict)
    checksums: Mapping[tuple[int, str], str] = field(default_factory=dict)


def unfused(ranks: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Keep the checksums, of each rank, of those tensors that the sender takes digests of."""
    return [{name: checksum for name, checksum in rank.items() if is_hashed(name)} for rank in ranks]


def compare(
    ranks: Sequence[Mapping[str, str]], digests: Mapping[str, Digest], facts: ServerFacts, last: LastChecksums
) -> tuple[bool, LastChecksums]:
    """Compare the checksums of a server's ranks with what was sent.

    Args:
        ranks: name -> checksum, of each rank. digests: of what was sent. facts: of the server. last: of its last
            update.

    Returns:
        Whether anything showed that it has the new weights, and what the next update compares with.

    Raises:
        EngineError: it has others.
    """
    if facts.quantization:  # a small change of a matrix may round away
        digests = {name: digest for name, digest in digests.items() if name.endswith("norm.weight")}
    same_bytes: list[str] = []
    if _hashes_as_sender(facts):
        same_bytes = [n for n, d in digests.items() if d.dtype == facts.dtype and n in ranks[0] and not d.on_device]
        wrong = [name for name in same_bytes if ranks[0][name] != digests[name].sent]
        if wrong:
            raise EngineError(f"{len(wrong)} tensors are not those that were sent, the first: {wrong[0]}")
    checksums = {(rank, name): checksum for rank, held in enumerate(ranks) for name, checksum in held.items()}
    changed = {n for n, d in digests.items() if n in last.digests and last.digests[n].received != d.received}
    compared = [key for key in checksums if key[1] in changed and key in last.checksums]
    if compared and all(checksums[key] == last.checksums[key] for key in compared):
        raise EngineError(
            f"it kept its weights: of {len(changed)} tensors that changed since the last update, such as "
            f"{min(changed)}, none changed in it"
        )
    return bool(same_bytes or compared), LastChecksums(digests, checksums)


def _hashes_as_sender(facts: ServerFacts) -> bool:
    """Whether checksums are of the bytes as they were sent: on a CPU, unsharded."""
    return facts.device == "cpu" and facts.tensor_parallel == 1
