"""The quickstart's tokenizer: one token per character, `####` and the three special tokens; 24 tokens in all.

Place in the data flow: written once beside the base model; the run loads it as it loads any Hugging Face tokenizer.
The run leaves out a character that is not in the alphabet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MARKER = "####"
SPECIAL = ("<pad>", "<bos>", "<eos>")


@dataclass(frozen=True)
class Characters:
    """A tokenizer with a token for each character of `alphabet`, each of `words` and each of `special`.

    special: padding, begin and end of a text come first. template: of a chat, in Jinja.
    """

    alphabet: str
    words: tuple[str, ...] = (MARKER,)
    special: tuple[str, ...] = SPECIAL
    template: str | None = None

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: i for i, token in enumerate((*self.special, *self.alphabet, *self.words))}

    @cached_property
    def pattern(self) -> str:
        """A regular expression for one token, special ones left out: of two words that fit, the longer one."""
        return "|".join([*(re.escape(word) for word in sorted(self.words, key=len, reverse=True)), r"[\s\S]"])

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens: the same as the written tokenizer's, without loading it.

        Raises:
            KeyError: a character outside the alphabet.
        """
        return [self.ids[token] for token in re.findall(self.pattern, text)]

    def write(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json. A prompt gets `<bos>` in front.

        Byte-level BPE without merges, as transformers reads any tokenizer that lies beside a Qwen2 model; words are
        added tokens.
        """
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
        from transformers import PreTrainedTokenizerFast

        pad, begin, end, *others = self.special
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        written = {one: level.pre_tokenize_str(one)[0][0] for one in self.alphabet}
        tokenizer = Tokenizer(models.BPE({written.get(token, token): i for token, i in self.ids.items()}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(word, normalized=False) for word in self.words])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, self.ids[begin])]
        )
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=pad,
            bos_token=begin,
            eos_token=end,
            additional_special_tokens=others,
            chat_template=self.template,
        ).save_pretrained(directory)


SUMS = Characters("0123456789+-*/()=;, ")
"""The tokenizer of the sums."""
