"""The report's plots over time: which sections there are, what each shows and how to read it.

A plot is left out, and named, if none of its metrics was recorded. Plots by pass rate are in by_pass_rate.py, those of
a critic in critic.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_daro.observe.phases import phase_keys
from megatron_daro.workshop.report.by_pass_rate import difficulty_section
from megatron_daro.workshop.report.critic import critic_section
from megatron_daro.workshop.report.page import COLOURS, PERCENT, Line, Plot, Section, layout, lines, percent, short
from megatron_daro.workshop.report.run_data import RunData

_Maker = Callable[[RunData], Plot | None]


def build_sections(run: RunData) -> list[Section]:
    """Return every section in page order; a section without any plot still says what was missing."""
    return [
        _section(run, "Accuracy and reward", {"accuracy": _accuracy, "reward": _reward, **_evaluations(run)}),
        difficulty_section(run),
        _section(run, "Length", {"response length": _length, "truncation": _truncation}),
        _section(run, "Loss and optimizer", {"losses": _losses, "gradient norm": _grad_norm, "learning rate": _rate}),
        *critic_section(run),
        _section(
            run,
            "Policy health",
            {
                "clip fractions": _clip,
                "entropy": _entropy,
                "mismatch of rollout and training log-probabilities": _mismatch,
                "KL estimates": _kl,
                "staleness": _staleness,
            },
        ),
        _section(run, "Groups", {"group ledger": _ledger}),
        _section(run, "Time", {"time per phase": _time, "throughput": _throughput}),
    ]


def _section(run: RunData, title: str, makers: dict[str, _Maker]) -> Section:
    plots = {name: make(run) for name, make in makers.items()}
    return Section(title, [p for p in plots.values() if p], [name for name, plot in plots.items() if plot is None])


def _plot(
    run: RunData, title: str, caption: str, wanted: list[Line], look: dict, *, smoothed: bool = True
) -> Plot | None:
    traces = lines(run, wanted, smoothed=smoothed)
    return Plot(title, caption, traces, look) if traces else None


def _evaluation_names(run: RunData) -> list[str]:
    """Return the names of evaluation sets, from keys `eval/{name}/accuracy`."""
    keys = [k.split("/") for k in run.under("eval/")]
    return list(dict.fromkeys(k[1] for k in keys if len(k) >= 3 and k[2] == "accuracy"))


def _accuracy(run: RunData) -> Plot | None:
    wanted = [Line("accuracy/mean", "training rollouts")]
    wanted += [Line(f"eval/{n}/accuracy", f"evaluation: {n}", "dash") for n in _evaluation_names(run)]
    return _plot(
        run,
        "Accuracy",
        "Share of correct answers among the rollouts of each step (faint: every step; bold: moving mean), and on "
        "held-out problems where evaluated. Training prompts change between steps: trust the evaluation for the level.",
        wanted,
        percent("correct answers (%)"),
    )


def _reward(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Reward",
        "Mean reward per rollout. It differs from accuracy where rewards are shaped, such as by the overlong penalty.",
        [Line("reward/mean", "mean reward")],
        layout("reward (per rollout)"),
    )


def _evaluations(run: RunData) -> dict[str, _Maker]:
    """Return a plot for each set, since the levels of all sets would be too many lines for one."""
    names = _evaluation_names(run)
    if not names:
        return {"evaluation": lambda run: None}
    return {f"evaluation of {name} by difficulty": partial(_evaluation, name=name) for name in names}


def _evaluation(run: RunData, name: str) -> Plot | None:
    keys = run.under(f"eval/{name}/accuracy/")
    several = len(_evaluation_names(run)) > 1
    wanted = [Line(key, key.rpartition("/")[2]) for key in keys]
    return _plot(
        run,
        "Evaluation by difficulty" + (f": {name}" if several else ""),
        "Accuracy on held-out problems, one line per difficulty level of the evaluation set. Lines that rise together "
        "show learning across difficulties; one that falls shows a difficulty paying for another.",
        wanted,
        percent("correct answers (%)"),
        smoothed=False,
    )


def _length(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Response length",
        "Mean tokens per response. Wrong answers longer than right ones make L_k positive (see the pass-rate section).",
        [
            Line("response/length_mean", "all"),
            Line("derived/length_right", "right, in trained groups", "dash"),
            Line("derived/length_wrong", "wrong, in trained groups", "dot"),
        ],
        layout("length (tokens)", rangemode="tozero"),
    )


def _truncation(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Truncated responses",
        "Share of responses cut off at the length limit. They are scored as they stand, so a high share hides what the "
        "model could do with more tokens.",
        [Line("response/truncated_fraction", "truncated")],
        percent("truncated responses (%)"),
    )


def _losses(run: RunData) -> Plot | None:
    named = [Line("loss/policy", "policy"), Line("loss/total", "total", "dash")]
    known = {"loss/policy", "loss/total", "loss/grad_norm"}
    named += [Line(k, k.removeprefix("loss/"), "dot") for k in run.under("loss/") if k not in known]
    return _plot(
        run,
        "Losses",
        "The policy loss is the weighted surrogate; the total adds what the configuration adds (KL, entropy, -ln w). "
        "Neither needs to fall in reinforcement learning: watch for jumps and for drift far from its start.",
        named,
        layout("loss"),
    )


def _grad_norm(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Gradient norm",
        "L2 norm of the gradient before clipping. Occasional spikes are ordinary; a rising floor is not.",
        [Line("loss/grad_norm", "gradient norm")],
        layout("gradient norm (L2)", rangemode="tozero"),
    )


def _rate(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Learning rate",
        "What the optimizer used in each step: warm-up, then the configured schedule.",
        [Line("optimizer/learning_rate", "learning rate")],
        layout("learning rate", rangemode="tozero", exponentformat="e"),
        smoothed=False,
    )


def _clip(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Clip fractions",
        "Share of trained tokens whose importance ratio was clipped, by side, or changed by the off-policy "
        "correction. Zero with one optimizer step per batch on fresh rollouts; a few percent with reuse; tens of "
        "percent mean that steps are too large or data too old.",
        [
            Line("ratio/clip_fraction_high", "above 1 + eps_high"),
            Line("ratio/clip_fraction_low", "below 1 - eps_low"),
            Line("ratio/dual_clip_fraction", "dual clip", "dash"),
            Line("mismatch/corrected_fraction", "off-policy correction", "dot"),
        ],
        layout("clipped tokens (%)", tickformat=PERCENT, rangemode="tozero"),
    )


def _entropy(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Entropy",
        "Mean entropy of the policy's next-token distribution. A fast fall to zero means that exploration is over.",
        [Line("policy/entropy", "entropy")],
        layout("entropy (nats per token)", rangemode="tozero"),
    )


def _mismatch(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Mismatch of rollout and training log-probabilities",
        "Absolute difference between the log-probability the engine reported and the one the actor computes, on a "
        "logarithmic scale. Rounding noise in fp32 is near 1e-6; 0.01 and above asks for a correction.",
        [Line("mismatch/logprob_abs_mean", "mean"), Line("mismatch/logprob_abs_max", "maximum", "dash")],
        layout("|difference| (nats)", type="log", exponentformat="e"),
    )


def _kl(run: RunData) -> Plot | None:
    return _plot(
        run,
        "KL estimates",
        "Estimated divergence per token: of the actor from the rollout engine, and from the reference policy (zero "
        "where none is configured). The first should stay near zero; the second shows how far training has moved.",
        [Line("mismatch/kl", "rollout engine"), Line("policy/kl_reference", "reference policy", "dash")],
        layout("KL (nats per token)", exponentformat="e"),
    )


def _staleness(run: RunData) -> Plot | None:
    return _plot(
        run,
        "Staleness",
        "How many batches old the generating policy was, on average over the trained groups: the unit of "
        "rollout.max_staleness. Zero in synchronous training.",
        [Line("rollout/staleness_mean", "mean staleness")],
        layout("age (batches)", rangemode="tozero"),
    )


def _ledger(run: RunData) -> Plot | None:
    parts = ("trained", "filtered", "dropped", "outstanding")
    traces = []
    for index, part in enumerate(parts):
        steps, values = run.series(f"rollout/groups_{part}")
        if steps:
            colour = COLOURS[(2, 0, 7, 8)[index]]
            traces.append(_area(steps, values, part, colour))
    steps, values = run.series("rollout/groups_admitted")
    if steps:
        look = {"line": {"color": "@text", "width": 1.5, "dash": "dot"}, "mode": "lines"}
        traces.append({"type": "scatter", "x": steps, "y": values, "name": "admitted"} | look)
    if not traces:
        return None
    caption = (
        "What became of every group that was admitted, added up since the start. The areas must fill up to the dotted "
        "line: admitted = trained + filtered + dropped + outstanding. Filtered groups (all or none correct) cost "
        "generation and train nothing."
    )
    return Plot("Group ledger", caption, traces, layout("groups (cumulative count)", rangemode="tozero"))


def _area(steps: list[int], values: list[float], name: str, colour: str) -> dict:
    return {
        "type": "scatter",
        "x": steps,
        "y": [short(v) for v in values],
        "name": name,
        "mode": "lines",
        "stackgroup": "all",
        "line": {"width": 0.5, "color": colour},
        "fillcolor": f"{colour}b0",
    }


def _time(run: RunData) -> Plot | None:
    keys = sorted((k for k in phase_keys(run.under("timing/")) if run.total(k)), key=lambda k: -run.total(k))
    traces = []
    for key, colour in zip(keys, COLOURS, strict=False):
        steps, values = run.series(key)
        traces.append(_area(steps, values, key.removeprefix("timing/").removesuffix("_s"), colour))
    steps, values = run.series("timing/step_s")
    if steps:
        look = {"line": {"color": "@text", "width": 1.5, "dash": "dot"}, "mode": "lines"}
        traces.append({"type": "scatter", "x": steps, "y": [short(v) for v in values], "name": "whole step"} | look)
    if not traces:
        return None
    caption = (
        "Wall time of the nine longest phases, stacked, longest at the bottom; dotted: the whole step. Areas above the "
        "dotted line mean that phases overlapped (reward runs within rollout, sync_wait waits for its end); 'other' is "
        "time in which no phase ran."
    )
    return Plot("Time per phase", caption, traces, layout("time (s per step)", rangemode="tozero"))


def _throughput(run: RunData) -> Plot | None:
    names = {k: k.removeprefix("throughput/").removesuffix("_tokens_per_s") for k in run.under("throughput/")}
    return _plot(
        run,
        "Throughput",
        "Tokens per second of each phase while it ran: generated tokens for rollout, trained tokens for train.",
        [Line(k, n) for k, n in names.items() if k.endswith("_tokens_per_s")],
        layout("throughput (tokens/s)", rangemode="tozero"),
    )
