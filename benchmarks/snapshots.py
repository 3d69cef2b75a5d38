"""Benchmark: what a snapshot after every step (`trainer.replace_lost_ranks`) costs a step.

Two data-parallel ranks under Ray, in bf16 with Adam's state of a random model of Qwen2.5's shape; each keeps two
snapshots of its own and sends the optimizer's part to the other. In turns: a step without a snapshot; a step, the
begin of a snapshot, `--pause` seconds in which answers would be generated, and the step after it, which begins when
every rank has the snapshot and a copy of the other's. `cost` is what these two steps take beyond twice the one without,
of the same turn; `copied_s` is how long a snapshot takes that is waited for.

    python benchmarks/snapshots.py [--layers 4] [--rounds 7] [--tokens 1024] [--pause 5] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from checkpoint_save import ROLLOUTS, batch_of
from convert import CONFIG, make_checkpoint
from rich.console import Console
from rich.table import Table

from megatron_daro.actor.settings import PolicySettings
from megatron_daro.config.actor import ActorSection
from megatron_daro.config.algorithm import AlgorithmSection
from megatron_daro.runtime.cluster import Placement, cluster
from megatron_daro.runtime.healing import HealingLimits
from megatron_daro.runtime.policy_group import PolicyGroup

# Two ranks with five times their state each, and Ray, stay within 8 GiB.
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
RESULTS = Path(__file__).parent / "results" / "snapshots.json"


async def measure(root: Path, *, layers: int, rounds: int, tokens: int, pause_s: float) -> dict[str, object]:
    """Everything in turns; medians."""
    make_checkpoint(root / "hf", layers, {**CONFIG, **SIZES})
    actor = ActorSection(data_parallel=2, precision="bf16", optimizer={"learning_rate": 1e-6})  # type: ignore[arg-type]
    placement = Placement.of_actor(actor)
    await placement.start()
    group = PolicyGroup(
        PolicySettings(root / "hf", ROLLOUTS, 64, 1.0, total_steps=1000),
        actor,
        AlgorithmSection(name="grpo", old_logprobs="rollout"),
        seed=1,
        updates_per_batch=1,
        placement=placement,
        healing=HealingLimits(memory_gib=1000.0, per_hour=0, hung_s=3600.0),
    )
    await group.start()
    healing = group._healing
    assert healing and healing.keeps == "both", group.remarks
    sizes = (await group._all(lambda worker: worker.snapshot_bytes.remote()))[0][0]
    batch, rows = await group.prepare(batch_of(8, tokens)), []
    for number in range(rounds + 1):
        alone, begun, after = await _turn(group, batch, 3 * number + 1, pause_s)
        start = time.perf_counter()
        await healing.snapshot_now()
        rows.append((alone, begun, after, time.perf_counter() - start))
    await group.close()
    rows = rows[1:]  # the first takes the memory
    alone, begun, after, copied = (statistics.median(row[i] for row in rows) for i in range(4))
    costs = [row[1] + row[2] - 2 * row[0] for row in rows]
    return {
        "snapshot_bytes_of_a_rank": sum(sizes.values()),
        "rounds": rounds,
        "step_s": alone,
        "step_and_begin_s": begun,
        "next_step_s": after,
        "copied_s": copied,
        "cost_s": statistics.median(costs),
        "cost_of_a_step": statistics.median(cost / row[0] for cost, row in zip(costs, rows, strict=True)),
        "all": rows,
    }


async def _turn(group: PolicyGroup, batch: object, step: int, pause_s: float) -> tuple[float, float, float]:
    """Seconds of a step alone, of a step and the begin of a snapshot, and of the step after the pause."""
    start = time.perf_counter()
    await group.repeat(batch, step)  # type: ignore[arg-type]
    alone = time.perf_counter() - start
    await asyncio.sleep(pause_s)
    start = time.perf_counter()
    await group.train(batch, step + 1)  # type: ignore[arg-type]
    begun = time.perf_counter() - start
    await asyncio.sleep(pause_s)
    start = time.perf_counter()
    assert group._healing
    await group._healing.settle()
    await group.repeat(batch, step + 2)  # type: ignore[arg-type]
    return alone, begun, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of the model, 4: 80 million parameters")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=7, help="turns")
    parser.add_argument("--pause", type=float, default=5.0, help="seconds between steps")
    parser.add_argument("--json", action="store_true", help=f"also write {RESULTS.name} into benchmarks/results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, cluster(2):
        found = asyncio.run(
            measure(Path(root), layers=given.layers, rounds=given.rounds, tokens=given.tokens, pause_s=given.pause)
        )
    made = Table("what", "measured")
    for name, value in found.items():
        if name != "all":
            made.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    Console().print(made)
    if given.json:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
