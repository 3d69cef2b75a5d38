"""What the benchmarks of real SGLang servers share: where they run, with which arguments, on which random model.

Place in the data flow: the sglang_*.py, sync_check.py and the soaks import it. The environment is the one that
tools/sglang_cpu_env.sh makes; it refuses to go on without it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import harness
from local_server import LocalServer

from megatron_daro.engine.sglang.servers import LaunchOptions

PYTHON = Path(os.environ.get("MEGATRON_DARO_SGLANG", harness.ROOT / ".venv-sglang")) / "bin" / "python"
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
}


def arguments_of(description: str) -> argparse.ArgumentParser:
    """The parser of a benchmark with servers."""
    parser = harness.arguments_of(description)
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter of the servers")
    return parser


def setup_of(arguments: argparse.Namespace, *left_out: str) -> dict[str, Any]:
    """The options of a run and the servers' versions, for its results."""
    return {**harness.setup_of(arguments, "python", *left_out), **_versions(arguments.python)}


def require(python: Path) -> Path:
    """The interpreter of the servers, or the end with a hint."""
    if not python.exists():
        raise SystemExit(f"{python} does not exist; make it with `bash tools/sglang_cpu_env.sh`, or give --python")
    return python.absolute()


def _versions(python: Path) -> dict[str, str]:
    code = "import sglang, torch; print(sglang.__version__, torch.__version__)"
    output = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout
    sglang, torch = output.split()[-2:]
    return {"sglang": sglang, "torch": torch}


def server(
    python: Path,
    model: Path,
    log: Path,
    *,
    seed: int = 0,
    loader: str = "",
    **arguments: Any,
) -> LocalServer:
    """One server on loopback, not started."""
    given = {**CPU_ARGUMENTS, "skip_tokenizer_init": True, **arguments}
    options = LaunchOptions(
        python=python,
        model_path=model,
        tensor_parallel=1,
        seed=seed,
        arguments=given,
        env={},
        log_path=log,
        loader=loader,
    )
    return LocalServer(options)


def save_model(directory: Path, shape: dict[str, Any], dtype: str = "float32") -> int:
    """A Qwen2 of this shape with random weights, as an HF directory. Returns its number of parameters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**shape)).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())
