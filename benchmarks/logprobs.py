"""Log-probabilities and entropy from hidden states, forward and backward: this package beside the plain way and verl.

Each run is a fresh process, so its peak memory is its own; the variants take turns, so a slow minute of the machine
hits all of them. "Extra" is the peak resident memory above the inputs (hidden states, output layer); it includes the
two gradients, which every variant must return.

    python benchmarks/logprobs.py --tokens 8192 --threads 2 --repeats 3 --json
    python benchmarks/logprobs.py --verl DIRECTORY      # an unpacked wheel of verl 0.9.1; not needed if it is installed
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

GIB = 2**30
RESULT_FILE = Path(__file__).parent / "results" / "logprobs.json"
# T x V tensors alive at the peak, for the variants that hold whole logits (measured: 5.0 and 7.1 times the logits).
# Plain: log-probs, probabilities, and three gradients on their way.
WHOLE_TENSORS = {"plain": 5.0, "verl_logits": 7.2}
TITLES = {
    "ours": "vocab_parallel_logprobs",
    "plain": "plain log_softmax",
    "verl_logits": "verl logprobs_from_logits + entropy_from_logits",
    "verl_fused": "verl FusedLinearForPPO",
}
DEADLINE_S = 3600


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--chunk-vocab", type=int, default=None)
    parser.add_argument("--verl", type=Path, default=None, help="directory of an unpacked wheel of verl 0.9.1")
    parser.add_argument("--variants", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--json", action="store_true", help=f"also write {RESULT_FILE.name} into benchmarks/results")
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


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: peak memory can only be measured on Linux")


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
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present
    before = status_bytes("VmRSS")
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
        "extra_bytes": status_bytes("VmHWM") - before,
        "digest": [float(x.detach().double().norm()) for x in (logprobs, entropy, hidden.grad, weight.grad)],
    }
    print(json.dumps(figures))


# --- the process that compares ---


def available_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def fitting_tokens(arguments: argparse.Namespace) -> int:
    """Largest halving of the tokens at which every variant fits into free memory beside the inputs and gradients."""
    tensors = max((WHOLE_TENSORS.get(name, 0.0) for name in arguments.variants), default=0.0)
    fixed = 2 * arguments.vocab * arguments.hidden * 4 + GIB
    tokens = arguments.tokens
    while tokens > 1 and tensors * tokens * arguments.vocab * 4 + fixed > available_bytes():
        tokens //= 2
    return tokens


def measure(arguments: argparse.Namespace, variant: str, tokens: int) -> dict | str:
    """Figures of one run, or why there are none."""
    command = [sys.executable, __file__, "--worker", variant, "--tokens", str(tokens)]
    for name in ("vocab", "hidden", "threads", "chunk_tokens", "chunk_vocab", "verl"):
        value = getattr(arguments, name)
        command += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=DEADLINE_S, check=False, cwd="/"
    )
    if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
    if result.returncode < 0:
        return f"killed by signal {-result.returncode} (out of memory?)"
    return (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]


def compare(arguments: argparse.Namespace, tokens: int) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Runs of each variant, taking turns, and the reasons of those that could not run."""
    runs: dict[str, list[dict]] = {name: [] for name in arguments.variants}
    skipped: dict[str, str] = {}
    for repeat in range(arguments.repeats):
        # The order turns round each time, so that no variant always follows the same neighbour.
        names = arguments.variants if repeat % 2 == 0 else arguments.variants[::-1]
        for name in names:
            if name in skipped:
                continue
            figures = measure(arguments, name, tokens)
            if isinstance(figures, str):
                skipped[name] = figures
                runs.pop(name)
            else:
                runs[name].append(figures)
                print(f"  {name}: {figures['time_s']:.2f} s, {figures['extra_bytes'] / GIB:.2f} GiB", file=sys.stderr)
    return runs, skipped


def summarize(runs: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """Medians per variant, and how `ours` compares: ratios are ours divided by the variant's."""
    rows = {
        name: {key: statistics.median(run[key] for run in of_name) for key in of_name[0] if key != "digest"}
        for name, of_name in runs.items()
    }
    if "ours" not in rows:
        return rows
    for name, row in rows.items():
        # Runs of one round lie side by side in time: the median of their ratios cancels the machine's slow minutes.
        pairs = list(zip(runs["ours"], runs[name], strict=True))
        for kind in ("time", "cpu"):
            row[f"{kind}_ratio"] = statistics.median(ours[f"{kind}_s"] / theirs[f"{kind}_s"] for ours, theirs in pairs)
        row["memory_ratio"] = rows["ours"]["extra_bytes"] / row["extra_bytes"]
        digests = zip(runs["ours"][0]["digest"], runs[name][0]["digest"], strict=True)
        row["disagreement"] = max(abs(ours / theirs - 1) for ours, theirs in digests)
    return rows


def print_table(arguments: argparse.Namespace, tokens: int, rows: dict, skipped: dict[str, str]) -> None:
    one = tokens * arguments.vocab * 4 / GIB
    gradients = (arguments.vocab + tokens) * arguments.hidden * 4 / GIB
    print(
        f"{tokens} tokens x {arguments.vocab} vocabulary, hidden {arguments.hidden}, fp32, "
        f"{arguments.threads} threads, medians of {arguments.repeats}"
    )
    print(f"all logits once: {one:.2f} GiB; the two gradients, in every row: {gradients:.2f} GiB")
    columns = {"fwd s": "forward_s", "bwd s": "backward_s", "both s": "time_s", "cpu s": "cpu_s"}
    ratios = {"time": "time_ratio", "cpu": "cpu_ratio", "memory": "memory_ratio"}
    heads = "".join(f"{head:>9}" for head in (*columns, "GiB", *ratios, "differ"))
    print(f"{'variant':<50}{heads}")
    for name, row in rows.items():
        cells = [f"{row[key]:9.2f}" for key in columns.values()] + [f"{row['extra_bytes'] / GIB:9.2f}"]
        cells += [f"{row[key]:9.3f}" for key in ratios.values() if key in row]
        cells += [f"{row['disagreement']:9.0e}"] if "disagreement" in row else []
        print(f"{TITLES[name]:<50}{''.join(cells)}")
    for name, reason in skipped.items():
        print(f"skipped: {TITLES[name]}: {reason}")
    print(
        "GiB: peak above the inputs; time, cpu, memory: ours divided by the row's; "
        "differ: largest relative difference of the four results' norms"
    )


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        run_worker(arguments)
        return
    if arguments.verl is not None:
        arguments.verl = arguments.verl.resolve()
    tokens = fitting_tokens(arguments)
    if tokens < arguments.tokens:
        needed = WHOLE_TENSORS["plain"] * arguments.tokens * arguments.vocab * 4 / GIB
        print(
            f"{arguments.tokens} tokens do not fit {available_bytes() / GIB:.1f} free GiB for every variant (plain "
            f"needs {needed:.1f} GiB beside the gradients): comparing at {tokens} tokens"
        )
    runs, skipped = compare(arguments, tokens)
    rows = summarize(runs)
    print_table(arguments, tokens, rows, skipped)
    alone = None
    if tokens < arguments.tokens and "ours" in rows:
        alone = measure(arguments, "ours", arguments.tokens)
        if isinstance(alone, dict):
            print(
                f"ours alone at {arguments.tokens} tokens: {alone['time_s']:.2f} s, "
                f"{alone['extra_bytes'] / GIB:.2f} GiB extra; the plain way by formula {needed:.1f} GiB"
            )
    if arguments.json:
        RESULT_FILE.parent.mkdir(exist_ok=True)
        setting = {k: v for k, v in vars(arguments).items() if k not in ("worker", "json", "verl")}
        document = setting | {"compared_tokens": tokens, "rows": rows, "skipped": skipped, "alone": alone}
        RESULT_FILE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
