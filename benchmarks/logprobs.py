"""Log-probabilities and entropy from hidden states, forward and backward: this package beside the plain way and verl.

Each run is a fresh process, so its peak memory is its own; the variants take turns, so a slow minute of the machine
hits all of them. "Extra" is the peak resident memory above the inputs (hidden states, output layer); it includes the
two gradients, which every variant must return. Differ: the largest relative difference of the four results' norms.

    python benchmarks/logprobs.py --tokens 2048 --threads 2 --repeats 2 --json
    python benchmarks/logprobs.py --verl DIRECTORY      # against verl 0.9.1's own functions: an unpacked wheel
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import harness

MOST_MEMORY, MOST_TIME = 0.25, 1.15
TITLES = {
    "ours": "vocab_parallel_logprobs",
    "plain": "plain log_softmax",
    "verl_logits": "verl logprobs_from_logits + entropy_from_logits",
    "verl_fused": "verl FusedLinearForPPO",
}
DEADLINE_S = 3600


def parse_arguments() -> argparse.Namespace:
    parser = harness.arguments_of(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="plain log_softmax takes 5 times tokens x vocabulary")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--chunk-vocab", type=int, default=None)
    parser.add_argument("--verl", type=Path, default=None, help="directory of an unpacked wheel of verl 0.9.1")
    parser.add_argument("--worker", choices=TITLES, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the process of one run ---


def load_verl(directory: Path | None, module: str, file: str) -> ModuleType:
    """verl's module by its ordinary import, else its file alone: the package's import needs far more than the file."""
    if directory is not None:
        sys.path.insert(0, str(directory))
    try:
        return importlib.import_module(module)
    except ImportError:
        if directory is None or not (directory / file).is_file():
            raise
    spec = importlib.util.spec_from_file_location("verl_single_file", directory / file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def make_variant(arguments: argparse.Namespace) -> Callable:
    """A function (hidden, weight, labels) -> (logprobs, entropy)."""
    import torch

    name = arguments.worker
    if name == "ours":
        from megatron_daro.actor.logprobs import vocab_parallel_logprobs

        options = {"chunk_tokens": arguments.chunk_tokens, "chunk_vocab": arguments.chunk_vocab}
        return lambda hidden, weight, labels: vocab_parallel_logprobs(hidden, weight, labels, **options)
    if name == "plain":

        def plain(hidden, weight, labels):
            logits = hidden @ weight.t()
            logprobs = torch.log_softmax(logits, dim=-1)
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(1, labels.unsqueeze(1)).squeeze(1), entropy

        return plain
    if name == "verl_fused":
        module = load_verl(
            arguments.verl, "verl.utils.experimental.torch_functional", "verl/utils/experimental/torch_functional.py"
        )
        return module.FusedLinearForPPO()
    module = load_verl(arguments.verl, "verl.utils.torch_functional", "verl/utils/torch_functional.py")

    def from_logits(hidden, weight, labels):
        logits = hidden @ weight.t()
        return module.logprobs_from_logits(logits, labels), module.entropy_from_logits(logits)

    return from_logits


def run_worker(arguments: argparse.Namespace) -> None:
    """Measure one forward and backward and print the figures as one line of JSON."""
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    variant = make_variant(arguments)
    # Scale: logits of standard deviation 2, about what a trained model's spread looks like.
    hidden = torch.randn(arguments.tokens, arguments.hidden).requires_grad_()
    weight = torch.randn(arguments.vocab, arguments.hidden).mul_(2 * arguments.hidden**-0.5).requires_grad_()
    labels = torch.randint(0, arguments.vocab, (arguments.tokens,))
    grads = torch.randn(2, arguments.tokens)

    def forward(count: int, weight):
        logprobs, entropy = variant(hidden[:count], weight, labels[:count])
        return logprobs, entropy, (logprobs * grads[0, :count]).sum() + (entropy * grads[1, :count]).sum()

    # Threads, libraries and code paths are set up outside the clock, on a few tokens and a small output layer.
    small = weight.detach()[:4096].requires_grad_()
    saved_labels, labels = labels, labels % 4096
    forward(64, small)[2].backward()
    labels, hidden.grad = saved_labels, None
    del small
    memory = harness.PeakMemory()
    start, cpu_start = time.perf_counter(), time.process_time()
    logprobs, entropy, loss = forward(arguments.tokens, weight)
    middle = time.perf_counter()
    loss.backward()
    end, cpu_end = time.perf_counter(), time.process_time()
    assert hidden.grad is not None and weight.grad is not None
    figures = {
        "forward_s": middle - start,
        "backward_s": end - middle,
        "time_s": end - start,
        "cpu_s": cpu_end - cpu_start,
        "extra_bytes": memory.extra_bytes(),
        "digest": [float(x.detach().double().norm()) for x in (logprobs, entropy, hidden.grad, weight.grad)],
    }
    print(json.dumps(figures))


# --- the process that compares ---


def measure(arguments: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Figures of one run."""
    command = [sys.executable, __file__, "--worker", variant]
    for name in ("tokens", "vocab", "hidden", "threads", "chunk_tokens", "chunk_vocab", "verl"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False, cwd="/"
    )
    if result.returncode:
        raise SystemExit(f"{TITLES[variant]}: {result.stderr.strip() or f'exit code {result.returncode}'}")
    return json.loads(result.stdout.splitlines()[-1])


def summarize(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Medians of each variant, and how `ours` compares: ratios are ours divided by the variant's."""
    digests = {name: of_name[0]["digest"] for name, of_name in runs.items()}
    columns = {
        name: {key: [run[key] for run in of_name] for key in of_name[0] if key != "digest"}
        for name, of_name in runs.items()
    }
    rows = {}
    for name, values in columns.items():
        rows[name] = {key: median(column) for key, column in values.items()}
        for key, ratio in (("time_s", "time_ratio"), ("cpu_s", "cpu_ratio"), ("extra_bytes", "memory_ratio")):
            rows[name][ratio] = harness.median_of_ratios(columns["ours"][key], values[key])
        pairs = zip(digests["ours"], digests[name], strict=True)
        rows[name]["disagreement"] = max(abs(ours / theirs - 1) for ours, theirs in pairs)
    return rows


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        run_worker(arguments)
        return
    names = ["ours", "plain"]
    if arguments.verl is not None:
        arguments.verl = arguments.verl.resolve()
        names += ["verl_logits", "verl_fused"]
    sides = {name: partial(measure, arguments, name) for name in names}
    rows = summarize(harness.in_turns(sides, arguments.repeats, warm_up=0))
    header = tuple(rows["ours"])
    shown = {TITLES[name]: [row[key] for key in header] for name, row in rows.items()}
    harness.table(f"{arguments.tokens} tokens x {arguments.vocab} vocabulary, fp32", header, shown)
    problems = []
    for name in names[1:]:
        problems += harness.at_most(f"memory over that of {TITLES[name]}", rows[name]["memory_ratio"], MOST_MEMORY)
        problems += harness.at_most(f"time over that of {TITLES[name]}", rows[name]["time_ratio"], MOST_TIME)
    setup = harness.setup_of(arguments, "worker", "verl")
    harness.conclude("logprobs", {**setup, "rows": rows}, problems, write=arguments.json)


if __name__ == "__main__":
    main()
