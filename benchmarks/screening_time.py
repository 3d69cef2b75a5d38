"""CPU time that one text costs the calling thread, by shape and length: it must grow no faster than the text.

Every verifier's first stage, strict and lenient, over texts that repeat one piece, bare and inside a box. Usage: python
benchmarks/screening_time.py. Prints a Markdown table of the slowest verifier per shape; exit status 1 when a text ten
times as long takes more than thirty times as long (and more than a tenth of a second).
"""

from __future__ import annotations

import sys
import time

from megatron_daro.reward.base import VERIFIERS, VerifierSpec
from megatron_daro.reward.factory import verifier_of

SIZES = (10_000, 100_000, 1_000_000)
PIECES = [
    "answer ",
    "Answer: ",
    "answer *",
    "Answer:\n",
    "\\boxed{",
    "\\boxed ",
    "\\boxed",
    "\\fbox{",
    "{",
    "}",
    "{}",
    "\\",
]
PIECES += ["%", "#", "1,", "\n", " ", "9", "a", "(", "[", "^", "!", "1 ", "=", "\\text{", "$", "\u0130", "½", "\\frac"]
TOO_STEEP, NOTICEABLE_S = 30, 0.1


def seconds(text: str, gold: str) -> tuple[float, str]:
    """The slowest verifier on a text, and its CPU time."""
    times = []
    for spec in (
        VerifierSpec(name, strict=strict, refuse_restated=True) for name in VERIFIERS for strict in (True, False)
    ):
        verifier = verifier_of(spec)
        begin = time.thread_time()
        verifier.screen(text, gold, text)
        times.append((time.thread_time() - begin, spec.name))
    return max(times)


def main() -> int:
    print("| repeated | " + " | ".join(f"{size:,} (ms)" for size in SIZES) + " | slowest |\n" + "|---" * 5 + "|")
    steep = []
    for piece in PIECES:
        for shape in ("{}", "\\boxed{{{}}} Answer: {} ####", "gold"):
            costs = []
            for size in SIZES:
                text = piece * (size // len(piece))
                as_gold = shape == "gold"
                costs.append(
                    seconds(
                        "\\boxed{5} Answer: 5 #### 5" if as_gold else shape.format(text, text[:1000]),
                        text if as_gold else "5",
                    )
                )
            name = repr(piece) + {"{}": "", "gold": " as gold"}.get(shape, " in a box")
            print(f"| `{name}` | " + " | ".join(f"{1000 * cost:.2f}" for cost, _ in costs) + f" | {costs[-1][1]} |")
            if costs[2][0] > max(NOTICEABLE_S, TOO_STEEP * costs[1][0]):
                steep.append(name)
    print(f"\nsteeper than linear: {', '.join(steep) or 'none'}")
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
