"""The quickstart's tokenizer: one token per character, `####` and the three special tokens; 24 tokens in all.

Place in the data flow: written once beside the base model; the run loads it as it loads any Hugging Face tokenizer.
A character outside the alphabet becomes the pad token, which no answer contains.
"""

from __future__ import annotations

from pathlib import Path

ALPHABET = "0123456789+-*/()=;, "
MARKER = "####"
SPECIAL = ("<pad>", "<bos>", "<eos>")
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *ALPHABET, MARKER))}


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. A prompt gets `<bos>` in front."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{MARKER}|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCABULARY["<bos>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    ).save_pretrained(directory)


def encode(text: str) -> list[int]:
    """Ids of a text, without special tokens: the same as the written tokenizer's, without loading it."""
    first, *behind = text.split(MARKER)
    ids = [VOCABULARY[c] for c in first]
    for part in behind:
        ids += [VOCABULARY[MARKER], *(VOCABULARY[c] for c in part)]
    return ids
