"""What passes between the two ends of a weight sync: what to send to whom, or to write; what was sent, and who failed.

An engine makes a SendPlan, or WeightFiles if it reads files; WeightSync hands it to the policy, whose ranks send or
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
"""Opens connections to servers, in one event loop; they are kept and reused until its block is left."""

ORIGIN_FILE = "megatron_daro.json"
"""File {"step": optimizer steps} in a directory of weights that are the result of a run."""

NORM = "norm.weight"
_COMPARED = (NORM, "o_proj.weight")
"""Name endings of the tensors whose checksums are compared: servers keep these unfused, and they are cheap to hash."""
_FIRST_LAYER = "layers.0."
"""Name part of tensors whose digests are taken as well: one of each kind of matrix, so that a step that trained
anything changed some digest."""
NOT_COMPARED = ("qkv_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head", "experts")
"""Name parts of tensors that a server need not hash, since it fuses them or they are large; no name that is compared
contains one."""


class _Remote(Protocol):
    def remote(self, *arguments: object) -> object: ...


class ReceivingWorker(Protocol):
    """A Ray actor that takes buckets: `receive(bucket)`."""

    @property
    def receive(self) -> _Remote:
        """The method as Ray calls it, with a reference to a bucket."""


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver. url: address of a server. ranks: how many it has. worker: for the transport `ray`."""

    name: str
    url: str = ""
    ranks: int = 1
    worker: ReceivingWorker | None = None


Exported = Literal["policy", "critic", "adapter"]
"""All weights of the policy or of the critic, or the adapters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """Everything that one export is to send.

    transport: by its name in config/transports.py. bucket_bytes: limit of a bucket. timeout_s: of each call and each
    broadcast. digest_dtype: dtype of the receivers, such as "bfloat16", if the report is to have digests of some
    tensors; else "". fp8_blocks: names of the matrices that are sent as fp8 blocks, with `{layer}` and `{expert}` for
    numbers. details: what only the sender of this transport reads; set by `planned` in engine/sglang/receiving.py.
    """

    transport: str
    targets: tuple[Target, ...]
    bucket_bytes: int
    timeout_s: float
    digest_dtype: str = ""
    what: Exported = "policy"
    fp8_blocks: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """A Hugging Face checkpoint that the ranks are to write.

    directory: appears when the checkpoint is complete, not before. file_bytes: limit of a file. remedy: for the error
    message, what to do if it cannot be written. step: of the weights, if they are the result of a run (see
    `ORIGIN_FILE`). digest_dtype: as in a SendPlan.
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

    kind: "refused": it refused the weights, which is its own fault (in a broadcast, a refusal counts as such only if
    nothing else failed); "unanswered": no answer came from it; "group": the connection that carried the bytes broke,
    whoever broke it.
    """

    kind: Literal["refused", "unanswered", "group"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Digest:
    """Digests of a tensor. sent: in the dtype it was sent in, `dtype`; received: cast to the receivers' dtype. Each is
    the first 16 hex digits of sha256, as servers on a CPU compute it; with `on_device` a sum that was taken on a GPU,
    comparable only with other such sums."""

    dtype: str
    sent: str
    received: str
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class SendReport:
    """What was sent. digests: of some tensors by HF name. fp8_blocks: HF names of the matrices that were sent as fp8
    blocks. files: HF name -> (file name, bytes), of what was written. failures: receiver -> what went wrong. apart:
    failures are independent: all receivers without one have the new weights; otherwise a single failure means that no
    receiver can be assumed to have them."""

    num_bytes: int = 0
    send_s: float = 0.0
    digests: Mapping[str, Digest] = field(default_factory=dict)
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    failures: Mapping[str, SendFailure] = field(default_factory=dict)
    fp8_blocks: tuple[str, ...] = ()
    apart: bool = False

    def joined(self, other: SendReport) -> SendReport:
        """Return the sum with another pipeline stage's report: stages send one after the other, so times add up."""
        return replace(self.beside(other), send_s=self.send_s + other.send_s)

    def beside(self, other: SendReport) -> SendReport:
        """Return the sum with the report of another rank that sent at the same time."""
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
    return is_compared(name) or _FIRST_LAYER in name


def is_compared(name: str) -> bool:
    """Whether the digest of this tensor is compared with a server's checksum."""
    return name.endswith(_COMPARED)
