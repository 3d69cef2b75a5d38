"""The worlds of the lab. The closed-form ones were fixed when of all arms only GRPO had been looked at.

The numbers of `skewed` follow real dumps: U-shaped pass rates with more hard problems than easy ones, and wrong answers
half as long again as right ones. Each further closed-form world turns dials of `skewed`. The tiny worlds train a small
language model by the real product; a run takes half a minute of a core, so they have fewer arms and learning rates.
`smollm2` trains a real one: a run takes a quarter of an hour of a core, so it runs only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from arms import BASELINE, LADDER
from closed_world import Dials
from smollm2 import PRIMARY, SmolDials
from tiny_run import ModelDials, TinyDials

RATES = (0.02, 0.04, 0.08)
TUNING_SEEDS = (1000, 1001)
FURTHER = TUNING_SEEDS[:1]
"""The search in the further worlds takes one seed for each learning rate."""
CRITIC_ARMS = ("ppo", "ppo_decay", "ppo_decay_pretrained", "vc_ppo", "vapo")
LADDER_WORLD = "chains_ladder"
"""The world in which every rung has one learning rate, as in the paper: GRPO's in `chains`, halved because a batch has
four steps, each of a fourth of its groups."""
TINY_ARMS = (
    *("grpo", "dapo", "dr_grpo", "lite_ppo", "rloo", "maxrl", "f_grpo", "ha_dw"),
    *("daro", "daro_half_life", "daro_shared", "daro_shared_half_life"),
    *("ppo", "daro_ppo", "kimi"),
)
"""The most telling arms: a run by the real product takes about half a minute of a core."""
SMOL_ARMS = (*PRIMARY, "grpo", "daro", "daro_shared", "daro_frozen", "dr_grpo", "lite_ppo", "ha_dw")
"""The arms of `smollm2`, those of the primary contrast first."""


@dataclass(frozen=True, slots=True)
class World:
    """A world and how much is run in it.

    about: one line. goal: whether the lab's goal is stated for it. rates, tuning_seeds: the search for each arm's
    learning rate; with a single rate there is no search. arms: only these; None is all.
    """

    about: str
    dials: Dials | ModelDials
    goal: bool = True
    rates: tuple[float, ...] = RATES
    tuning_seeds: tuple[int, ...] = TUNING_SEEDS
    arms: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        """The kind of its jobs: closed, tiny or smollm2."""
        return "closed" if isinstance(self.dials, Dials) else self.dials.kind


_SKEWED = Dials(spectrum=(0.4, 1.2), wrong_length=1.5)

WORLDS: Mapping[str, World] = {
    "skewed": World("most problems hard, wrong answers half as long again", _SKEWED),
    "u_shape": World("as many easy as hard problems, few between", replace(_SKEWED, spectrum=(0.5, 0.5))),
    "easy": World("most problems easy", replace(_SKEWED, spectrum=(1.2, 0.4)), tuning_seeds=FURTHER),
    "skewed_equal": World(
        "skewed, with right and wrong answers equally long",
        replace(_SKEWED, wrong_length=1.0),
        goal=False,
        tuning_seeds=FURTHER,
    ),
    "skewed_noise": World(
        "skewed, with a verifier that refuses 10 % of right and accepts 5 % of wrong answers",
        replace(_SKEWED, false_wrong=0.1, false_right=0.05),
        tuning_seeds=FURTHER,
    ),
    "skewed_off_policy": World(
        "skewed, with four optimizer steps for each batch",
        replace(_SKEWED, groups=128, updates=4),
        tuning_seeds=FURTHER,
    ),
    "balanced": World(
        "pass rates around one half, equal lengths: nothing for a difficulty weight to do",
        replace(_SKEWED, spectrum=(2.0, 2.0), wrong_length=1.0),
        goal=False,
        tuning_seeds=FURTHER,
    ),
    "skewed_short": World(
        "skewed, with wrong answers a fifth shorter", replace(_SKEWED, wrong_length=0.8), tuning_seeds=FURTHER
    ),
    "skewed_k32": World(
        "skewed, 8 groups of 32 answers instead of 32 of 8",
        replace(_SKEWED, groups=8, rollouts=32),
        tuning_seeds=FURTHER,
    ),
    "skewed_few": World("skewed, with 8 groups a step", replace(_SKEWED, groups=8), tuning_seeds=FURTHER),
    "skewed_exact": World(
        "skewed, with the expectation over all answers in the place of sampled ones",
        replace(_SKEWED, gradients="exact"),
        tuning_seeds=FURTHER,
    ),
    "skewed_long": World(
        "skewed with equal lengths, steps of 8 tokens that one choice decides, and a critic like a reward model",
        replace(_SKEWED, wrong_length=1.0, step_tokens=8, critic_bias=1.0),
        goal=False,
        tuning_seeds=FURTHER,
        arms=(BASELINE, *CRITIC_ARMS),
    ),
    "chains": World(
        "a small language model and chains of additions, by the real product",
        TinyDials(),
        rates=(2e-4, 4e-4),
        tuning_seeds=FURTHER,
        arms=TINY_ARMS,
    ),
    LADDER_WORLD: World(
        "DAPO's ladder in chains: rewards of 1 and -1, four optimizer steps for each batch",
        TinyDials(steps=120, every=20, updates=4, incorrect_reward=-1.0),
        goal=False,
        rates=(2e-4,),
        arms=(BASELINE, *LADDER),
    ),
    "smollm2": World(
        "SmolLM2-135M-Instruct on short problems of thirteen kinds, by the real product",
        SmolDials(),
        goal=False,
        rates=(4e-5, 8e-5, 1.6e-4),
        tuning_seeds=FURTHER,
        arms=SMOL_ARMS,
    ),
}

DEFAULT = tuple(world for world in WORLDS if WORLDS[world].kind != "smollm2")
