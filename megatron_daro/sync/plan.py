"""What a weight sync has between its two ends: what is to be sent to whom, or written; what was sent, and who failed.

An engine makes a SendPlan, or WeightFiles where it reads files; WeightSync hands it to the policy, whose ranks send or
write; their SendReport goes back to the engine. Holds records only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

Post = Callable[[str, str, Mapping[str, Any], float], Awaitable[Any]]
"""(url, path, JSON body, deadline in seconds) -> JSON answer. Raises EngineError."""
Connect = Callable[[], AbstractAsyncContextManager[Post]]
"""Opens connections to servers, in one event loop: they are used again until it is left."""

ORIGIN_FILE = "megatron_daro.json"
"""In a directory of files that are the result of a run: {"step": optimizer steps}."""

NORM = "norm.weight"
_HASHED = (NORM, "o_proj.weight")
"""Ends of the names of tensors that a server keeps as they are and that are cheap to hash: they are compared."""
NOT_COMPARED = ("qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts")
"""Parts of the names that a server is not asked for, none of them in a name that is compared: tensors that it fuses,
or that are large."""


class _Remote(Protocol):
    def remote(self, *arguments: object) -> object: ...


class ReceivingWorker(Protocol):
    """A Ray actor that takes buckets: `receive(bucket)`."""

    @property
    def receive(self) -> _Remote:
        """The method as Ray calls it, with a reference to a bucket."""


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver: its name; address of a server; its first rank in the group, and its number of ranks; worker: for the
    transport `ray`."""

    name: str
    url: str = ""
    rank_offset: int = 1
    ranks: int = 1
    worker: ReceivingWorker | None = None


Exported = Literal["policy", "critic", "adapter"]
"""All weights of the policy or of the critic, or the adapters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """Everything that one export is to send.

    transport: by its name in config/transports.py. bucket_bytes: limit of a bucket. timeout_s: of each call and each
    broadcast. digest_dtype: that of the receivers, such as "bfloat16"; the report then has digests of some tensors.
    fp8_blocks: names of the matrices that go as fp8 blocks, with `{layer}` and `{expert}` for numbers. details: what
    the sender of this transport alone reads: `planned` in engine/sglang/receiving.py has them.
    """

    transport: str
    targets: tuple[Target, ...]
    bucket_bytes: int
    timeout_s: float
    digest_dtype: str = ""
    what: Exported = "policy"
    fp8_blocks: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Ranks of a group: one sender and those of all servers."""
        return 1 + sum(target.ranks for target in self.targets)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """A Hugging Face checkpoint that the ranks are to write.

    directory: has all of it or is not there. file_bytes: limit of a file. remedy: what to do when it cannot be written,
    for the message. step: that the weights are of, where they are the result of a run (see `ORIGIN_FILE`).
    digest_dtype: as in a SendPlan.
    """

    directory: Path
    file_bytes: int
    remedy: str
    what: Exported = "policy"
    step: int | None = None
    digest_dtype: str = ""


@dataclass(frozen=True, slots=True)
class SendFailure:
    """Why a receiver did not get everything.

    kind: "refused": it had the bytes and will not take them: its own fault (in a broadcast only where nobody else had
    trouble); "unanswered": no answer came from it; "group": what carried the bytes to everyone broke, whoever broke it.
    """

    kind: Literal["refused", "unanswered", "group"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Digest:
    """Of a tensor as it was sent, in its dtype, and as it is in the receivers' dtype: first 16 hex digits of sha256, as
    servers on a CPU have them; with `on_device` a sum that was taken on a GPU, which only equals itself."""

    dtype: str
    sent: str
    received: str
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class SendReport:
    """What was sent. digests: of some tensors by HF name. fp8_blocks: HF names of the matrices that went as fp8
    blocks. files: HF name -> (file name, bytes), of what was written. failures: receiver -> what went wrong; if there
    is one, none may be taken to have the new weights, unless they are `apart`: then all others have them."""

    num_bytes: int = 0
    send_s: float = 0.0
    digests: Mapping[str, Digest] = field(default_factory=dict)
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    failures: Mapping[str, SendFailure] = field(default_factory=dict)
    fp8_blocks: tuple[str, ...] = ()
    apart: bool = False

    def joined(self, other: SendReport) -> SendReport:
        """Both together: those of two pipeline stages, which send one after the other."""
        return replace(self.beside(other), send_s=self.send_s + other.send_s)

    def beside(self, other: SendReport) -> SendReport:
        """Both together: those of two ranks that sent at the same time."""
        return SendReport(
            num_bytes=self.num_bytes + other.num_bytes,
            send_s=max(self.send_s, other.send_s),
            digests={**self.digests, **other.digests},
            files={**self.files, **other.files},
            failures={**self.failures, **other.failures},
            fp8_blocks=self.fp8_blocks + other.fp8_blocks,
            apart=self.apart and other.apart,
        )


def is_hashed(name: str) -> bool:
    """Whether the digest of this tensor is part of a report."""
    return name.endswith(_HASHED)
