"""The closed-form worlds: one set of dials each. They were fixed before any arm but GRPO was looked at.

What real dumps look like decided the numbers: pass rates in a U with more hard problems than easy ones, and wrong
answers that are half as long again as right ones. Each further world turns one dial of `skewed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from closed_world import Dials

_SKEWED = Dials(spectrum=(0.4, 1.2), wrong_length=1.5)

WORLDS: Mapping[str, tuple[str, Dials]] = {
    "skewed": ("most problems hard, wrong answers half as long again", _SKEWED),
    "u_shape": ("as many easy as hard problems, few between", replace(_SKEWED, spectrum=(0.5, 0.5))),
    "easy": ("most problems easy", replace(_SKEWED, spectrum=(1.2, 0.4))),
    "skewed_equal": ("skewed, with right and wrong answers equally long", replace(_SKEWED, wrong_length=1.0)),
    "skewed_noise": (
        "skewed, with a verifier that refuses 10 % of right and accepts 5 % of wrong answers",
        replace(_SKEWED, false_wrong=0.1, false_right=0.05),
    ),
    "skewed_off_policy": ("skewed, with four optimizer steps for each batch", replace(_SKEWED, groups=128, updates=4)),
    "balanced": (
        "pass rates around one half, equal lengths: nothing for a difficulty weight to do",
        replace(_SKEWED, spectrum=(2.0, 2.0), wrong_length=1.0),
    ),
    "skewed_short": ("skewed, with wrong answers a fifth shorter", replace(_SKEWED, wrong_length=0.8)),
    "skewed_k32": ("skewed, 8 groups of 32 answers instead of 32 of 8", replace(_SKEWED, groups=8, rollouts=32)),
    "skewed_few": ("skewed, with 8 groups a step", replace(_SKEWED, groups=8)),
}
"""World -> what it is, and its dials."""

DEFAULT = ("skewed", "u_shape", "easy", "skewed_equal", "skewed_noise", "skewed_off_policy", "balanced")
GOAL = ("skewed", "u_shape", "easy", "skewed_noise", "skewed_off_policy")
"""Those with a skewed spectrum and lengths that differ by verdict, for which the goal is stated."""
