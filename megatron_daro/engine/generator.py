"""Rollouts from transformers' own `generate`: one batch of rows at a time.

Greedy, temperature and nucleus sampling only (decoding.py chooses the tokens). Never loads remote code or pickles, and
never uses the network.

Shape letters: N rows of a batch, Q distinct prompts of a batch, S longest prompt of a batch, B rows of one call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import LogitsProcessorList, StoppingCriteriaList

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.data.stops import until_end
from megatron_daro.engine.decoding import AbortSignal, Decoding, EndOfCall, Row, TokenChooser
from megatron_daro.engine.growing_cache import growing_cache
from megatron_daro.engine.weight_stage import WeightStage
from megatron_daro.errors import EngineError, ModelError
from megatron_daro.types import FinishReason, GroupRequest, Rollout

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class EmbeddedGenerator:
    """A causal language model that answers group requests.

    Args:
        path: a Hugging Face checkpoint directory (config.json and safetensors).
        seed: together with (group id, draw, index) it determines a rollout's random numbers.
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
        batch_size: int,
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
        """Return batches of `batch_size` rows for these requests. Rows are sorted by the number of tokens that each
        continues from, and keep the requested order where it is equal.

        Raises:
            EngineError: a request cannot be generated: empty prompt, unknown token, too long, bad sampling values.
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
            abort: its groups end at the next step with the tokens they have, maybe none, finish reason "abort".
            deliver: called with every rollout as soon as it is complete, while the others go on.

        Returns:
            One rollout per row, whose new tokens carry the present weight version.

        Raises:
            EngineError: torch failed (for example out of memory), or the logits are NaN.
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
            # CPU: "can't allocate memory"; GPU: "out of memory".
            no_room = isinstance(error, MemoryError) or re.search("allocate memory|out of memory", str(error))
            fix = " Lower engine.embedded.batch_size." if no_room else ""
            raise EngineError(f"generating {len(rows)} rows failed: {error}.{fix}") from error
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
        """Run each distinct prompt once, except for its last token; give every row a copy of the keys and values."""
        distinct = {prompt: q for q, prompt in enumerate(dict.fromkeys(prompts))}
        ids_QS, mask_QS = _left_pad(list(distinct))
        cache = growing_cache(self.model.config)
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
        return until_end(rollout, request, self._decode_text or _no_text)

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
    """Return token ids and attention mask, int64 [Q, S], with padding on the left."""
    longest = max(map(len, prompts))
    ids_QS = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask_QS = torch.zeros_like(ids_QS)
    for q, prompt in enumerate(prompts):
        ids_QS[q, longest - len(prompt) :] = torch.tensor(prompt)
        mask_QS[q, longest - len(prompt) :] = 1
    return ids_QS, mask_QS


def _load(path: Path, dtype: torch.dtype) -> Any:
    """Load the model. Raises ModelError if a tensor is missing, which transformers would initialize at random."""
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
            attn_implementation="eager" if read_model_shape(path).sinks else "sdpa",  # sdpa has no attention sinks
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be loaded by transformers: {error}. Copy the checkpoint again.") from error
    wrong = [*loaded["missing_keys"], *(str(item) for item in loaded["mismatched_keys"])]
    if wrong:
        raise ModelError(f"{path}: missing or of the wrong shape: {sorted(wrong)[:4]}. Copy the checkpoint again.")
    # The checkpoint's generation_config may hold top_k or a repetition penalty, which would change the distribution.
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)
