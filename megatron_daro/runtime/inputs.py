"""What a run that generates reads from files: tokenizer, stop tokens, problems.

Place in the data flow: configuration -> (this) -> engine, sampler and evaluator. A start and its rehearsal both read
here, before any process; so it imports neither Ray nor torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_daro.config import Config
from megatron_daro.data.tokenizer import load_tokenizer, stop_token_ids
from megatron_daro.evaluate.questions import HeldOut
from megatron_daro.rollout.protocol import Notices, PromptSource
from megatron_daro.runtime.prompts import held_out_sets, training_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Inputs:
    """stop: ids of the tokens that end an answer. tokenizer: of transformers."""

    tokenizer: PreTrainedTokenizerBase
    stop: tuple[int, ...]
    held_out: list[HeldOut]
    prompts: PromptSource


def read_inputs(config: Config, notices: Notices, *, ends: int | None = None) -> Inputs:
    """Tokenizer and problems.

    Args:
        config: checked.
        notices: told what was found and what was left out.
        ends: only so many first and last rows of each training file, for a quick look.

    Raises:
        ModelError: the tokenizer cannot be used. DataError: the problems cannot.
    """
    tokenizer = load_tokenizer(
        config.model.path, config.model.trust_remote_code, chat_template=config.data.prompt_template == "chat"
    )
    stop = stop_token_ids(
        tokenizer, stop=config.rollout.stop, extra_ids=config.rollout.stop_token_ids, model_path=config.model.path
    )
    held_out = held_out_sets(config.data, tokenizer, notices)
    prompts = training_prompts(config, tokenizer, held_out, notices=notices, ends=ends)
    return Inputs(tokenizer, stop, held_out, prompts)
