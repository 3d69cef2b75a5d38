"""The sending end of a weight update on a rank: its exported tensors go by the plan's transport to the receivers.

`Sender` takes digests of some tensors on the way, reads every stream to its end (other ranks gather along) and keeps
a broadcast's group for the next update. Transports are the broadcast (broadcast.py), actors, files and handles.

Files: exporting ranks write shards of an HF checkpoint beside the final directory, and whoever drives them writes the
index and renames. Servers read it (`sync: disk`), or it is the result of a run. Nothing half written stands under the
final name, and no code (`*.py`) is copied with the tokenizer.

Handles of GPU memory (CUDA IPC), for servers of the same host: each rank of a server maps the memory and loads from
it before it answers, so that the bucket may be freed then. Every rank of every server gets handles of its own, since
torch counts who still holds the memory, and they name the GPU by UUID, since its number differs in a process that
sees other GPUs. Host memory is rejected: it kills SGLang's server. Source: sglang/srt/utils/common.py,
MultiprocessingSerializer, and patch_torch.py.

Handles on several hosts (`routes`): a rank on each host hands them out. On the host of the stage's sending rank it is
that rank; elsewhere a rank which takes part in the export, and so has every tensor, or else one to which the sending
rank broadcasts each bucket. So the bytes reach a host once, whatever the layout and however many servers it has.

Where the plan asks for it, matrices travel as fp8 blocks: e4m3 numbers, and beside NAME.weight one fp32
NAME.weight_scale_inv for each 128 x 128 of them, as DeepSeek-V3 has them. Source:
sglang/srt/layers/quantization/fp8.py and fp8_utils.py (0.5.23), block_quant_dequant.

Legend: N rows, K columns of a matrix; n, k rows and columns of blocks.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing import reductions

from megatron_daro import durable
from megatron_daro.config.precision import FP8_BLOCK as BLOCK
from megatron_daro.convert.hf_files import copy_model_files, shard_name, write_index
from megatron_daro.errors import EngineError, RefusedError, SyncError
from megatron_daro.sync.broadcast import BroadcastSender
from megatron_daro.sync.buckets import WeightBucket, bucketize, tensor_bytes
from megatron_daro.sync.plan import ORIGIN_FILE, Calls, Digest, Post, SendFailure, SendPlan, SendReport, is_hashed


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is. exports: it takes part in the export of the stage. sends: it is the first of those."""

    host: str
    exports: bool
    sends: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """Who hands out what. plans: rank -> servers of its host, for ranks that export; relays: the same for those that
    are told each bucket by the sender."""

    sender: int
    plans: Mapping[int, SendPlan]
    relays: Mapping[int, SendPlan] = field(default_factory=dict)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the group that buckets are broadcast in, the sender first; empty where nothing is."""
        return (self.sender, *self.relays) if self.relays else ()


def routes(plan: SendPlan, standings: Mapping[int, Standing]) -> Routes:
    """Deal the servers of a plan out to ranks of their hosts.

    Args:
        plan: to all servers. standings: rank -> where it is, all ranks of the policy.

    Raises:
        SyncError: a server's host has no rank.
    """
    sender = next(rank for rank, standing in standings.items() if standing.sends)
    if plan.transport != "tensor" or len({standing.host for standing in standings.values()}) == 1:
        return Routes(sender, {sender: plan})
    plans, relays = {sender: replace(plan, targets=())}, dict[int, SendPlan]()
    for host in dict.fromkeys(urlsplit(target.url).hostname or "" for target in plan.targets):
        own = replace(plan, targets=tuple(t for t in plan.targets if (urlsplit(t.url).hostname or "") == host))
        here = [rank for rank, standing in standings.items() if standing.host == host]
        exporting = [rank for rank in here if standings[rank].exports]
        if sender in here:
            plans[sender] = own
        elif exporting:
            plans[exporting[0]] = own
        elif here:
            relays[here[0]] = own
        else:
            names = ", ".join(target.name for target in own.targets)
            hosts = ", ".join(sorted({standing.host for standing in standings.values()}))
            raise SyncError(
                f"engine.sglang.sync: got tensor for {names} on {host}, where no rank of the actor is (they are on "
                f"{hosts}): GPU memory is handed over within a host; set engine.sglang.sync=distributed"
            )
    return Routes(sender, plans, relays)


def joined(routes: Routes, reports: Mapping[int, SendReport]) -> SendReport:
    """Return the sender's report with the failures of all: the others sent the same once more."""
    failures = {name: failure for report in reports.values() for name, failure in report.failures.items()}
    return replace(reports[routes.sender], failures=failures, send_s=max(report.send_s for report in reports.values()))


def passed_on(buckets: Iterable[WeightBucket], group: dist.ProcessGroup) -> Iterator[WeightBucket]:
    """Yield each bucket after it was broadcast from this rank, the first of the group, and then tell the end."""
    try:
        for bucket in buckets:
            _announce((bucket.names, bucket.shapes, bucket.dtype, bucket.data.nbytes), group)
            dist.broadcast(bucket.data, dist.get_global_rank(group, 0), group=group)
            yield bucket
    finally:
        _announce(None, group)


def received(group: dist.ProcessGroup, device: torch.device) -> Iterator[WeightBucket]:
    """Yield the buckets that the first rank of the group broadcasts, each in memory of its own, until it tells the
    end. Must be read to its end, or the others wait."""
    while (header := _announce(None, group)) is not None:
        names, shapes, dtype, num_bytes = header
        data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        dist.broadcast(data, dist.get_global_rank(group, 0), group=group)
        yield WeightBucket(names, shapes, dtype, data)


_Header = tuple[tuple[str, ...], tuple[tuple[int, ...], ...], str, int]


def _announce(header: _Header | None, group: dist.ProcessGroup) -> _Header | None:
    """Return what the group's first rank says is next; None: nothing. Only that rank's argument counts."""
    header_of_rank: list[_Header | None] = [header]
    dist.broadcast_object_list(header_of_rank, dist.get_global_rank(group, 0), group=group)
    return header_of_rank[0]


def groups_of(members: Sequence[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make torch's groups of these ranks. Collective over all ranks of the policy, each with the same argument."""
    groups = {tuple(ranks): dist.new_group(list(ranks)) for ranks in members}
    mine = dist.get_rank()
    return {ranks: group for ranks, group in groups.items() if mine in ranks}


_SCALE_SUFFIX = "_scale_inv"
_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max


def pattern_of(templates: Iterable[str]) -> re.Pattern[str]:
    """Return what fits the names of a family's templates, such as `model.layers.{layer}.mlp.down_proj.weight`."""
    numbered = (re.sub(r"\\\{\w+\\\}", r"\\d+", re.escape(template)) for template in templates)
    return re.compile("|".join(numbered))


def cast(matrix_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return (e4m3 [N, K], fp32 [n, k]) with matrix ~ e4m3 * scale; blocks at the edges may be smaller.

    Args:
        matrix_NK: of any float dtype. What is not finite stays visible: its block becomes NaN. A block of zeros has
            the scale 1.
    """
    rows, columns = matrix_NK.shape
    n, k = -(-rows // BLOCK), -(-columns // BLOCK)
    padded_NK = matrix_NK.new_zeros((n * BLOCK, k * BLOCK), dtype=torch.float32)
    padded_NK[:rows, :columns] = matrix_NK
    blocks = padded_NK.view(n, BLOCK, k, BLOCK)
    largest_nk = torch.maximum(blocks.amax(dim=(1, 3)), -blocks.amin(dim=(1, 3)))
    # By a tensor: on a GPU torch turns a quotient by a number into a product with its rounded reciprocal.
    scale_nk = torch.where(largest_nk == 0, 1.0, largest_nk / torch.full_like(largest_nk, _LARGEST))
    # Clamped, since a quotient may be rounded up, and torch makes NaN of what is too large.
    blocks.div_(scale_nk[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    return padded_NK[:rows, :columns].to(_E4M3), scale_nk


def as_blocks(
    stream: Iterable[tuple[str, Tensor]], templates: Iterable[str], bucket_bytes: int, sent: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on with the matrices of these templates as blocks, each followed by its scales.

    What is not fp8 is small but for a few tensors: copies of it are held back, so that buckets, which are of one dtype,
    stay full.

    Args:
        stream: (HF name, tensor). templates: names of the matrices, with `{layer}` and `{expert}` for numbers.
        bucket_bytes: of other tensors at most a quarter of it is held back in each dtype. sent: the names of the
            matrices are put into it.
    """
    pattern, held = pattern_of(templates), _Held(bucket_bytes // 4)
    for name, tensor in stream:
        if not pattern.fullmatch(name):
            yield from held.pass_on(name, tensor)
            continue
        narrow_NK, scale_nk = cast(tensor)
        sent.append(name)
        yield name, narrow_NK
        yield from held.pass_on(name + _SCALE_SUFFIX, scale_nk)
    yield from held.rest()


class _Held:
    """Tensors that are held back, by dtype."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        self._bytes: dict[torch.dtype, int] = {}

    def pass_on(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Hold a tensor back; yields those of its dtype once they are too many, and itself where it is large."""
        if tensor.nbytes > self._most:
            yield name, tensor
            return
        dtype = tensor.dtype
        if self._bytes.get(dtype, 0) + tensor.nbytes > self._most:
            yield from self._take(dtype)
        self._held.setdefault(dtype, []).append((name, tensor.detach().clone()))
        self._bytes[dtype] = self._bytes.get(dtype, 0) + tensor.nbytes

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is left."""
        for dtype in list(self._held):
            yield from self._take(dtype)

    def _take(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self._bytes[dtype] = 0
        yield from self._held.pop(dtype, [])


def partial_directory(directory: Path) -> Path:
    """Where the files of `directory` are written before it appears."""
    return directory.with_name(f".{directory.name}.partial")


def write_shards(plan: SendPlan, label: str, stream: Iterable[tuple[str, Tensor]]) -> SendReport:
    """Write this rank's tensors into the partial directory; read the stream to its end whatever happens.

    Args:
        plan: of files.
        label: distinguishes ranks in file names.
        stream: (HF name, tensor), maybe collective.

    Returns:
        The report, with the files.

    Raises:
        SyncError: the disk refused.
    """
    started = time.perf_counter()
    partial, written, failure = partial_directory(_target(plan)), dict[str, tuple[str, int]](), ""
    in_host_memory = ((name, tensor.cpu()) for name, tensor in stream)  # a whole file of them may not fit the GPU
    for number, bucket in enumerate(bucketize(in_host_memory, plan.bucket_bytes)):
        if failure:
            continue  # other ranks gather along
        try:
            written |= _write_shard(partial, f"{label}-{number:05d}.safetensors", bucket)
        except (OSError, SafetensorError) as error:
            failure = f"{partial}: {error}"
    if failure:
        raise SyncError(f"weights could not be written: {failure}; {plan.remedy}")
    total = sum(nbytes for _, nbytes in written.values())
    return SendReport(total, len(written), time.perf_counter() - started, files=written)


def finish(
    plan: SendPlan,
    files: Mapping[str, tuple[str, int]],
    model_path: Path,
    dtype: str,
    changes: Mapping[str, Any] = {},
) -> None:
    """Write index, configuration and tokenizer, and give the directory its name; an older one goes then.

    Args:
        plan: of files. files: HF name -> (file name, bytes), of all ranks. model_path: has the configuration and the
            tokenizer. dtype: of the tensors, by torch's name. changes: what else config.json shall say.

    Raises:
        SyncError: the disk refused.
    """
    directory = _target(plan)
    partial, replaced = partial_directory(directory), directory.with_name(f".{directory.name}.replaced")
    try:
        write_index(partial, _named_files(partial, files), sum(nbytes for _, nbytes in files.values()))
        copy_model_files(model_path, partial, dtype, always=True, changes=changes)
        if plan.step is not None:
            (partial / ORIGIN_FILE).write_text(json.dumps({"step": plan.step}) + "\n")
        durable.sync_folder(partial)
        shutil.rmtree(replaced, ignore_errors=True)
        if directory.exists():
            directory.rename(replaced)
        partial.rename(directory)
        durable.sync(directory.parent)
    except OSError as error:
        raise SyncError(f"{directory} could not be written: {error}; {plan.remedy}") from error
    shutil.rmtree(replaced, ignore_errors=True)


def prepare(plan: SendPlan) -> None:
    """Make an empty partial directory, also where an earlier try left one. Raises SyncError: the disk refused."""
    partial = partial_directory(_target(plan))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SyncError(f"{partial} cannot be made: {error}; {plan.remedy}") from error


def _target(plan: SendPlan) -> Path:
    assert plan.directory is not None, "a plan of files names their directory"
    return plan.directory


def _named_files(partial: Path, files: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Give the ranks' files the names of a checkpoint, since all are known now; HF name -> file name."""
    written = list(dict.fromkeys(file for file, _ in files.values()))
    names = {file: shard_name(number, len(written)) for number, file in enumerate(written)}
    for file, name in names.items():
        (partial / file).rename(partial / name)
    return {tensor: names[file] for tensor, (file, _) in files.items()}


def _write_shard(partial: Path, file: str, bucket: WeightBucket) -> dict[str, tuple[str, int]]:
    # A clone of each: safetensors refuses tensors that share memory, as views of a bucket do.
    tensors = {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
    save_file(tensors, partial / file, metadata={"format": "pt"})
    return {name: (file, tensor.nbytes) for name, tensor in tensors.items()}


# The device, of the arguments that rebuild a tensor from a handle. Source: torch/multiprocessing/reductions.py.
_DEVICE_ARGUMENT = 6


def push(
    stream: Iterable[tuple[str, Tensor]], plan: SendPlan, calls: Calls, group: dist.ProcessGroup | None = None
) -> SendReport:
    """Hands out the whole stream; reads it to its end whatever happens.

    Args:
        stream: (HF name, tensor on a GPU); each item may be a collective of other ranks.
        plan: to which servers, in buckets of which size.
        calls: to servers. group: of this rank and those of other hosts that hand out the same buckets there.

    Returns:
        The report; failures by server.
    """
    # A storage that was handed out is counted by its receivers: a parameter's could not be freed after one was killed.
    buckets = bucketize(stream, plan.bucket_bytes, copy_all=True)
    return push_buckets(buckets if group is None else passed_on(buckets, group), plan, calls)


def push_buckets(buckets: Iterable[WeightBucket], plan: SendPlan, calls: Calls) -> SendReport:
    """Hands out buckets on a GPU that have memory of their own; reads them to their end whatever happens.

    Args:
        buckets: asking for one may be a collective of other ranks. plan: to which servers. calls: to servers.

    Returns:
        The report; failures by server.
    """
    return asyncio.run(_push_all(buckets, plan, calls))


async def _push_all(buckets: Iterable[WeightBucket], plan: SendPlan, calls: Calls) -> SendReport:
    started, num_bytes, num_buckets = time.perf_counter(), 0, 0
    failures: dict[str, SendFailure] = {}
    async with calls() as post:
        for bucket in buckets:  # nothing else is on this event loop that would wait for the gathering
            if failures:
                continue  # other ranks gather along
            if not bucket.data.is_cuda:
                refusal = SendFailure("group", "engine.sglang.sync tensor needs weights on a GPU")
                failures = dict.fromkeys((target.name for target in plan.targets), refusal)
                continue
            failures = await _push_bucket(bucket, plan, post)
            num_bytes, num_buckets = num_bytes + bucket.data.nbytes, num_buckets + 1
    return SendReport(num_bytes, num_buckets, time.perf_counter() - started, failures=failures)


async def _push_bucket(bucket: WeightBucket, plan: SendPlan, post: Post) -> dict[str, SendFailure]:
    tensors = list(bucket.tensors())

    async def one(url: str, ranks: int) -> SendFailure | None:
        handles = [base64.b64encode(handles_of(tensors)).decode() for _ in range(ranks)]
        body = {"serialized_named_tensors": handles, "flush_cache": False}
        try:
            await post(url, "/update_weights_from_tensor", body, plan.timeout_s)
        except EngineError as error:
            return SendFailure("refused" if isinstance(error, RefusedError) else "unanswered", str(error))
        return None

    failures = await asyncio.gather(*(one(target.url, target.ranks) for target in plan.targets))
    return {target.name: failure for target, failure in zip(plan.targets, failures, strict=True) if failure}


def handles_of(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Return a pickle of (name, handle of the tensor's memory), for one receiver."""
    buffer = io.BytesIO()
    _HandlePickler(buffer).dump(tensors)
    return buffer.getvalue()


class _HandlePickler(ForkingPickler):
    def reducer_override(self, value: object) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        if not isinstance(value, Tensor):
            return NotImplemented
        reduced: tuple[Callable[..., Tensor], tuple[Any, ...]] = reductions.reduce_tensor(value)
        rebuild, arguments = reduced
        if rebuild is not reductions.rebuild_cuda_tensor:
            return reduced
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE_ARGUMENT]).uuid)
        return rebuild, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


Stream = Iterable[tuple[str, Tensor]]
HandOver = Callable[[Stream, SendPlan], SendReport]


class Sender:
    """One rank's end. `close` it, or its threads and sockets stay."""

    def __init__(self, host: str, backend: str, calls: Calls, hand_over: HandOver | None = None) -> None:
        """Connect to nothing.

        Args:
            host: address of this rank as servers reach it. backend: of broadcasts, "gloo" or "nccl".
            calls: to servers. hand_over: gives buckets to actors.
        """
        self._broadcast = BroadcastSender(host, backend, calls)
        self._calls, self._hand_over = calls, hand_over

    def send(self, stream: Stream, plan: SendPlan, *, label: str, group: dist.ProcessGroup | None = None) -> SendReport:
        """Send the whole stream; read it to its end whatever happens.

        Args:
            stream: (HF name, tensor); each item may be a collective of other ranks.
            plan: what is to be sent how. label: of this rank, in the names of files. group: see `push`.

        Returns:
            The report. Raises SyncError where files cannot be written.
        """
        digests: dict[str, Digest] = {}
        if plan.digest_dtype:
            stream = noted(stream, plan.digest_dtype, digests)
        blocks: list[str] = []
        if plan.fp8_blocks:
            stream = as_blocks(stream, plan.fp8_blocks, plan.bucket_bytes, blocks)
        return replace(self._sent(stream, plan, label, group), digests=digests, fp8_blocks=tuple(blocks))

    def close(self) -> None:
        """Leave the group of a broadcast; the next one makes another. May be called twice."""
        self._broadcast.close()

    def _sent(self, stream: Stream, plan: SendPlan, label: str, group: dist.ProcessGroup | None) -> SendReport:
        if plan.transport == "distributed":
            return self._broadcast.send(stream, plan)
        if plan.transport == "tensor":
            return push(stream, plan, self._calls, group)
        if plan.transport == "actor":
            assert self._hand_over is not None, "this process has no actors to hand buckets to"
            return self._hand_over(stream, plan)
        return write_shards(plan, label, stream)


def noted(stream: Stream, received_dtype: str, digests: dict[str, Digest]) -> Iterator[tuple[str, Tensor]]:
    """Pass the stream through and take the digests of some tensors: as servers compute them on a CPU; of tensors on a
    GPU a sum there, which is waited for once, at the end of the stream."""
    dtype = getattr(torch, received_dtype, None)
    sums: dict[str, tuple[str, Tensor, Tensor]] = {}
    for name, tensor in stream:
        if is_hashed(name):
            text = str(tensor.dtype).removeprefix("torch.")
            cast = isinstance(dtype, torch.dtype) and dtype != tensor.dtype
            digest = device_digest if tensor.device.type == "cuda" else _sha
            sent = digest(tensor)
            received = digest(tensor.to(dtype)) if cast else sent
            if isinstance(sent, Tensor) and isinstance(received, Tensor):
                sums[name] = text, sent, received
            else:
                digests[name] = Digest(text, str(sent), str(received))
        yield name, tensor
    if sums:
        numbers = torch.stack([pair for _, *pairs in sums.values() for pair in pairs]).tolist()
        for (name, (text, *_)), sent_sum, received_sum in zip(sums.items(), numbers[::2], numbers[1::2], strict=True):
            digests[name] = Digest(text, f"{sent_sum % 2**64:016x}", f"{received_sum % 2**64:016x}", on_device=True)


_DIGEST_PART = 2**22


def device_digest(tensor: Tensor) -> Tensor:
    """Return a sum of the tensor's bits in which every place has an odd weight of its own, modulo 2**64: int64, [], on
    the tensor's device. A change of one number always changes it."""
    words = tensor_bytes(tensor).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _DIGEST_PART):
        part = words[start : start + _DIGEST_PART].to(torch.int64)
        place = torch.arange(start, start + len(part), device=tensor.device)
        weight = place.mul_(-7046029254386353131).bitwise_xor_(place >> 29).bitwise_or_(1)
        total += part.mul_(weight).sum()
    return total


def _sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor).cpu().numpy().data).hexdigest()[:16]
