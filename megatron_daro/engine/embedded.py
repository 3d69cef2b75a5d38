"""The embedded engine: rollouts from transformers' own `generate`, in a worker thread, behind the Engine Protocol.

Sampler -> EmbeddedEngine -> rollouts; buckets of weights -> `receive`. One thread does all work on the model, so a
weight update falls between two batches and never into one. Owns no process and imports no Ray.

`EmbeddedGenerator` does greedy search, sampling and nucleus only. It never loads remote code or pickles, and never goes
to the network. Its key/value cache grows in place: transformers' DynamicCache concatenates at every step, which took
four fifths of the time of `generate` with 256 rows on a CPU. Full attention only.

Weights: `WeightStage` collects a second copy before the model is touched: everything arrives and fits, or nothing
changes. `checkpoint_places` says where a checkpoint's tensor stands in transformers' model, which keeps all experts of
a layer in one parameter. Source: transformers 5, `conversion_mapping.py`; names in the checkpoint are those of
families/.

Shape letters: N rows of a batch, Q distinct prompts of a batch, S longest prompt of a batch, B rows of one call.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from megatron_daro.data.stops import until_repeated, until_stop
from megatron_daro.engine.decoding import AbortSignal, Decoding, EndOfCall, Row, TokenChooser
from megatron_daro.errors import EngineError, ModelError
from megatron_daro.families import families
from megatron_daro.families.table import Family
from megatron_daro.sync.buckets import WeightBucket
from megatron_daro.types import FinishReason, GroupRequest, Rollout


def growing_cache(num_layers: int) -> DynamicCache:
    """Return an empty cache for a model of that many full-attention layers."""
    cache = DynamicCache()
    cache.layers = [_GrowingLayer() for _ in range(num_layers)]
    return cache


class _GrowingLayer(DynamicLayer):
    """Keys and values [rows, heads, length, head_dim] as views of larger storage."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._key_storage: Tensor | None = None
        self._value_storage: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append along the length; return everything held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self._key_storage, self.keys = _append(self._key_storage, length, key_states)
        self._value_storage, self.values = _append(self._value_storage, length, value_states)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times."""
        if self.get_seq_length():
            assert self.keys is not None and self.values is not None
            self._key_storage, self.keys = _append(None, 0, self.keys[indices])
            self._value_storage, self.values = _append(None, 0, self.values[indices])


def _append(storage: Tensor | None, length: int, new: Tensor) -> tuple[Tensor, Tensor]:
    """Write `new` behind `length` positions; return the storage (a longer one if need be) and its filled part."""
    rows, heads, added, head_dim = new.shape
    end = length + added
    if storage is None or storage.shape[2] < end:
        larger = new.new_empty(rows, heads, end + end // 2 + 16, head_dim)
        if storage is not None:
            larger[:, :, :length] = storage[:, :, :length]
        storage = larger
    storage[:, :, length:end] = new
    return storage, storage[:, :, :end]


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class EmbeddedGenerator:
    """A causal language model that answers group requests.

    Args:
        path: a Hugging Face checkpoint directory (config.json and safetensors).
        seed: with (group id, attempt, index) it decides every rollout's randomness.
        batch_size: rows decoded together.
        dtype: of weights and computation; log-probs are float32 either way.
        threads: intra-op threads of torch in the calling thread; None leaves them as they are.
        decode: response token ids -> the rollout's text; None leaves the text empty and allows no stop texts.

    Raises:
        ModelError: the checkpoint cannot be loaded whole.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int,
        batch_size: int = 256,
        dtype: Literal["fp32", "bf16"] = "fp32",
        threads: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        if batch_size < 1:
            raise EngineError(f"engine.embedded.batch_size must be at least 1, got {batch_size}.")
        if dtype not in _DTYPES:
            raise EngineError(f"engine dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
        if threads is not None:
            torch.set_num_threads(threads)
        self.seed, self.batch_size, self.weight_version = seed, batch_size, 0
        self._decode_text = decode
        self.model = _load(Path(path), _DTYPES[dtype])
        self.vocab = self.model.config.vocab_size
        self.max_positions = self.model.config.max_position_embeddings

    def plan(self, requests: Sequence[GroupRequest]) -> list[list[Row]]:
        """Return the batches of a list of requests: rows by prompt length, then in the order asked, `batch_size`
        together.

        Raises:
            EngineError: a request that cannot be generated: empty prompt, unknown token, too long, bad sampling values.
        """
        for request in requests:
            self._check(request)
        keys = [(request.group_id, request.attempt, index) for request in requests for index in request.indices]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise EngineError(
                f"rollout (group, attempt, index) {twice} is asked for twice; each must be asked for once."
            )
        rows = [Row(request, index) for request in requests for index in request.indices]
        rows.sort(key=lambda row: len(row.given))
        return [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]

    def generate_rows(
        self,
        rows: Sequence[Row],
        abort: AbortSignal | None = None,
        deliver: Callable[[Row, Rollout], None] | None = None,
    ) -> list[Rollout]:
        """Generate one batch.

        Args:
            rows: decoded together, in this order.
            abort: its groups end at once with what they have, finish reason "abort"; rows may then be empty.
            deliver: called with every rollout as soon as it is complete, while the others go on.

        Returns:
            One rollout per row, with the weight version of the weights that all of its tokens came from.

        Raises:
            EngineError: torch failed (for example out of memory).
        """
        rollouts: dict[int, Rollout] = {}

        def report(n: int) -> None:
            rollouts[n] = self._rollout(rows[n], *decoding.result(n))
            if deliver is not None:
                deliver(rows[n], rollouts[n])

        decoding = Decoding(rows, self.seed, self.vocab, abort or AbortSignal(), report, self._decode_text)
        try:
            with torch.inference_mode():
                self._decode(rows, decoding)
        except (RuntimeError, MemoryError) as error:
            raise EngineError(
                f"generating {len(rows)} rows failed: {error}. Lower engine.embedded.batch_size?"
            ) from error
        return [rollouts[n] for n in range(len(rows))]

    def stage_weights(self) -> WeightStage:
        """Return an empty stage for the next weights; fill it, then hand it to `apply_weights`."""
        return WeightStage(self.model)

    def apply_weights(self, stage: WeightStage, version: int) -> None:
        """Replace the weights; rollouts carry `version` from now on. Raises EngineError if the stage is incomplete."""
        stage.apply()
        self.weight_version = version

    def _decode(self, rows: Sequence[Row], decoding: Decoding) -> None:
        decoding.settle()
        if decoding.done:
            return
        ids_BS, mask_BS, cache = self._prefill([row.given for row in rows])
        processors, criteria = (
            LogitsProcessorList([TokenChooser(decoding)]),
            StoppingCriteriaList([EndOfCall(decoding)]),
        )
        while not decoding.done:
            sequences_BL = self.model.generate(
                input_ids=ids_BS,
                attention_mask=mask_BS,
                past_key_values=cache,
                logits_processor=processors,
                stopping_criteria=criteria,
                generation_config=GenerationConfig(
                    do_sample=False, use_cache=True, pad_token_id=0, max_new_tokens=decoding.steps_left
                ),
            )
            keep_B = decoding.compact()
            added = mask_BS.new_ones(len(keep_B), sequences_BL.shape[1] - mask_BS.shape[1])
            ids_BS, mask_BS = sequences_BL[keep_B], torch.cat([mask_BS[keep_B], added], dim=1)
            cache.batch_select_indices(keep_B)

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor, Any]:
        """Run each distinct prompt once, all but its last token, and give every row a copy of its keys and values."""
        distinct = {prompt: q for q, prompt in enumerate(dict.fromkeys(prompts))}
        ids_QS, mask_QS = _left_pad(list(distinct))
        cache = growing_cache(self.model.config.num_hidden_layers)
        rows_N = torch.tensor([distinct[prompt] for prompt in prompts])
        if ids_QS.shape[1] > 1:
            positions_QS = (mask_QS.cumsum(dim=1) - 1).clamp(min=0)
            self.model.model(
                input_ids=ids_QS[:, :-1],
                attention_mask=mask_QS[:, :-1],
                position_ids=positions_QS[:, :-1],
                past_key_values=cache,
                use_cache=True,
            )
            cache.batch_select_indices(rows_N)
        return ids_QS[rows_N], mask_QS[rows_N], cache

    def _rollout(self, row: Row, tokens_R: np.ndarray, logprobs_R: np.ndarray, finish: FinishReason) -> Rollout:
        request, given = row.request, row.given
        earlier = request.partial.get(row.index)
        text = ""
        if self._decode_text:
            text = self._decode_text([*given[len(request.prompt.tokens) :], *tokens_R.tolist()])
        rollout = Rollout(
            prompt_id=request.prompt.id,
            group_id=request.group_id,
            attempt=request.attempt,
            index=row.index,
            tokens=np.concatenate([np.array(given, dtype=np.int32), tokens_R]),
            prompt_length=len(given),
            loss_mask=np.ones(len(tokens_R), dtype=np.uint8),
            logprobs=logprobs_R,
            finish_reason=finish,
            weight_version=self.weight_version,
            text=text,
        )
        rollout = earlier.extended(rollout, text) if earlier else rollout
        if self._decode_text:
            rollout = until_stop(rollout, request.sampling.stop, self._decode_text)
        return until_repeated(rollout, request.sampling.repetition, self._decode_text or _no_text)

    def _check(self, request: GroupRequest) -> None:
        tokens, sampling = request.prompt.tokens, request.sampling
        where = f"request for prompt {request.prompt.id!r} (group {request.group_id})"
        if not request.indices:
            raise EngineError(f"{where}: no rollout indices; at least one is needed.")
        if not tokens:
            raise EngineError(f"{where}: the prompt has no tokens; apply the prompt template first.")
        unknown = [t for t in (*tokens, *sampling.stop_token_ids) if not 0 <= t < self.vocab]
        if unknown:
            raise EngineError(f"{where}: token {unknown[0]} is outside the model's vocabulary of {self.vocab}.")
        if sampling.stop and self._decode_text is None:
            raise EngineError(f"{where}: stop texts {list(sampling.stop)}, but this engine was made without `decode`.")
        if sampling.max_new_tokens < 1 or len(tokens) + sampling.max_new_tokens > self.max_positions:
            raise EngineError(
                f"{where}: {len(tokens)} prompt tokens and max_new_tokens {sampling.max_new_tokens}; allowed: at "
                f"least 1 and {self.max_positions} together. Lower rollout.max_response_tokens."
            )
        if not (0 <= sampling.temperature < float("inf") and 0 < sampling.top_p <= 1):
            raise EngineError(
                f"{where}: temperature {sampling.temperature}, top_p {sampling.top_p}; "
                "allowed: temperature >= 0 (0 is greedy), 0 < top_p <= 1."
            )


def _no_text(tokens: Sequence[int]) -> str:
    return ""


def _left_pad(prompts: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 [Q, S], prompts at the right."""
    longest = max(map(len, prompts))
    ids_QS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_QS = torch.zeros_like(ids_QS)
    for q, prompt in enumerate(prompts):
        ids_QS[q, longest - len(prompt) :] = torch.tensor(prompt)
        mask_QS[q, longest - len(prompt) :] = 1
    return ids_QS, mask_QS


def _load(path: Path, dtype: torch.dtype) -> Any:
    """Return the model with every tensor from the checkpoint: transformers would fill in missing ones at random."""
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory. model.path must be a local checkpoint directory.")
    try:
        loaded: dict[str, Any]
        model: Any
        model, loaded = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded by transformers: {error}. Copy the checkpoint again.") from error
    wrong = [*loaded["missing_keys"], *(str(item) for item in loaded["mismatched_keys"])]
    if wrong:
        raise ModelError(f"{path}: missing or of the wrong shape: {sorted(wrong)[:4]}. Copy the checkpoint again.")
    # The checkpoint's generation_config may hold top_k or a repetition penalty, which would bend the distribution.
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True)
class Place:
    """A parameter by name, and which part of it; () is the whole."""

    parameter: str
    part: tuple[int | slice, ...] = ()


def checkpoint_places(model: nn.Module) -> dict[str, Place]:
    """Return the place of every tensor of the model's checkpoint; of tied parameters the first name counts."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    places = {name: Place(name) for name in shapes}
    family = families().get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or family.experts is None:
        return places
    for name, shape in shapes.items():
        start, _, ending = name.partition(".mlp.experts.")
        if ending in ("gate_up_proj", "down_proj"):
            del places[name]
            places |= _expert_places(family, int(start.rpartition(".")[2]), name, shape)
            router = f"{start}.mlp.gate.weight"
            places[_named(family, "router", start.rpartition(".")[2])] = places.pop(router, Place(router))
    return places


def _expert_places(family: Family, layer: int, name: str, shape: tuple[int, ...]) -> dict[str, Place]:
    """Return where the tensors of the experts stand in one parameter [experts, rows, columns]."""
    role = "expert_gate_up" if name.endswith("gate_up_proj") else "expert_down"
    rows = shape[1] // len(family.tensors[role])
    return {
        template.format(layer=layer, expert=expert): Place(name, (expert, slice(i * rows, (i + 1) * rows)))
        for expert in range(shape[0])
        for i, template in enumerate(family.tensors[role])
    }


def _named(family: Family, role: str, layer: str) -> str:
    return family.tensors[role][0].format(layer=layer)


_SHOWN = 4


class WeightStage:
    """Collects the new weights of a model beside the old ones.

    Args:
        model: a transformers causal language model. The tensors of its checkpoint, tied ones once, must arrive.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self._places = checkpoint_places(model)
        # named_parameters leaves out the second name of a tied tensor (lm_head.weight); a stream may bring it or not.
        self._aliases = set(dict(model.named_parameters(remove_duplicate=False))) - set(self._parameters)
        self._staged: dict[str, Tensor] = {}
        self._came: set[str] = set()

    def add(self, bucket: WeightBucket) -> None:
        """Copy a bucket's tensors, cast to the model's dtype.

        Raises:
            EngineError: an unknown name, a name that came before, or another shape than the model's.
            SyncError: the bucket is torn.
        """
        for name, tensor in bucket.tensors():
            if name in self._aliases:
                continue
            if name not in self._places:
                raise EngineError(f"weight update: the model has no tensor {name}; it has {self._some()}.")
            if name in self._came:
                raise EngineError(f"weight update: {name} came twice; each tensor is sent once per update.")
            place = self._places[name]
            parameter = self._parameters[place.parameter]
            own_shape = parameter[place.part].shape
            if tensor.shape != own_shape:
                raise EngineError(
                    f"weight update: {name} has shape {tuple(tensor.shape)}, the model's is {tuple(own_shape)}. "
                    "Actor and engine must be built from the same config.json; padding is dropped before sending."
                )
            if place.parameter not in self._staged:
                self._staged[place.parameter] = torch.empty_like(parameter, requires_grad=False)
            self._staged[place.parameter][place.part].copy_(tensor)
            self._came.add(name)

    def check_complete(self) -> None:
        """Raise EngineError, naming what is missing, unless every tensor has arrived."""
        missing = [name for name in self._places if name not in self._came]
        if missing:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            raise EngineError(f"weight update: {len(missing)} of {len(self._places)} tensors never came: {shown}.")

    def apply(self) -> None:
        """Put the new weights in place of the old; not to be called while the model runs."""
        self.check_complete()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.data = self._staged.pop(name)

    def _some(self) -> str:
        names = list(self._places)
        return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


_Result = TypeVar("_Result")
_Item = tuple[Rollout, ...] | Exception | None


class EmbeddedEngine:
    """Rollouts from a model in this process. Arguments as EmbeddedGenerator's; nothing is loaded before `start`."""

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int,
        batch_size: int = 256,
        dtype: Literal["fp32", "bf16"] = "fp32",
        threads: int | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._settings: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "dtype": dtype}
        self._settings |= {"threads": threads, "decode": decode}
        self._path = Path(path)
        self._generator: EmbeddedGenerator | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._live: set[AbortSignal] = set()
        self._stage: WeightStage | None = None

    @property
    def weight_version(self) -> int:
        """The version of the weights now in place; 0 is what was loaded."""
        return self._started().weight_version

    async def start(self) -> None:
        """Load the model. Raises ModelError if the checkpoint cannot be loaded, EngineError if started already."""
        if self._worker is not None:
            raise EngineError("the embedded engine was started already.")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="embedded-engine")
        try:
            self._generator = await self._run(lambda: EmbeddedGenerator(self._path, **self._settings))
        except BaseException:
            self._worker.shutdown(wait=False)
            self._worker = None
            raise

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[tuple[Rollout, ...]]:
        """Yield the rollouts of each request, in the order of its indices, as soon as the last of them is complete.

        Generation goes on while the consumer works on what was yielded. Closing the iterator stops it.

        Raises:
            EngineError: a request that cannot be generated (before anything is), or a failure of the model.
        """
        batches = self._started().plan(requests)
        signal, finished = AbortSignal(), asyncio.Queue[_Item]()
        self._live.add(signal)
        producer = asyncio.create_task(self._produce(batches, requests, signal, finished))
        try:
            while (item := await finished.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            signal.abort()
            self._live.discard(signal)
            await asyncio.gather(producer, return_exceptions=True)

    async def abort(self, group_ids: Collection[int] | None = None) -> None:
        """End the given groups (None: all) of the running `generate` calls; they yield what they have, as "abort"."""
        for signal in list(self._live):
            signal.abort(group_ids)

    def open_update(self) -> None:
        """Begins an update; one that was open is forgotten, with what it got."""
        self._stage = self._started().stage_weights()

    async def receive(self, bucket: WeightBucket) -> None:
        """One bucket of the open update. Raises EngineError: none is open, or a tensor is unknown, came before, or has
        another shape; SyncError: the bucket is torn."""
        await asyncio.to_thread(self._open_stage().add, bucket)

    async def commit_update(self, version: int) -> None:
        """Replace all weights, between two batches; on any error the old ones stay, with their version.

        Args:
            version: what rollouts are stamped with from then on.

        Raises:
            EngineError: no update is open, or tensors are missing (a tied lm_head may be).
        """
        stage, generator = self._open_stage(), self._started()
        self._stage = None
        stage.check_complete()
        await self._run(lambda: generator.apply_weights(stage, version))

    def _open_stage(self) -> WeightStage:
        if self._stage is None:
            raise EngineError("the embedded engine has no weight update open.")
        return self._stage

    async def close(self) -> None:
        """Aborts everything, waits for the step that is running, and lets go of the model. May be called twice."""
        await self.abort()
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.shutdown, wait=True, cancel_futures=True)
        self._generator = None

    async def _produce(
        self,
        batches: Sequence[Sequence[Row]],
        requests: Sequence[GroupRequest],
        signal: AbortSignal,
        finished: asyncio.Queue[_Item],
    ) -> None:
        """Run the batches one after the other; put every complete request into the queue, then None or the error."""
        generator = self._started()
        loop = asyncio.get_running_loop()
        waiting: dict[int, dict[int, Rollout]] = {id(request): {} for request in requests}

        def collect(row: Row, rollout: Rollout) -> None:
            held = waiting[id(row.request)]
            held[row.index] = rollout
            if len(held) == len(row.request.indices):
                complete = tuple(held[index] for index in row.request.indices)
                loop.call_soon_threadsafe(finished.put_nowait, complete)

        try:
            for batch in batches:
                await self._run(functools.partial(generator.generate_rows, batch, signal, collect))
            finished.put_nowait(None)
        except asyncio.CancelledError:
            finished.put_nowait(EngineError("the embedded engine was closed while it generated."))
        except Exception as error:  # whatever it is, the consumer must see it: it waits on this queue
            finished.put_nowait(error)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        if self._worker is None:
            raise EngineError("the embedded engine is not running: it was not started, or it was closed.")
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _started(self) -> EmbeddedGenerator:
        if self._generator is None:
            raise EngineError("the embedded engine is not running: it was not started, or it was closed.")
        return self._generator
