"""What the benchmarks of real SGLang servers share: where they run, with which arguments, on which random model.

Place in the data flow: the sglang_*.py and overlap.py beside it import it. The environment is the one that
tools/sglang_cpu_env.sh makes; it refuses to go on without it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_daro.engine.sglang.servers import LaunchOptions, LocalServer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the tiny task and the small servers of the tests serve benchmarks too
RESULTS = Path(__file__).parent / "results"
PYTHON = Path(os.environ.get("MEGATRON_DARO_SGLANG", ROOT / ".venv-sglang")) / "bin" / "python"
CPU_ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "none",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "sleep_on_idle": True,
}


def require(python: Path) -> Path:
    """The interpreter of the servers, or the end with a hint."""
    if not python.exists():
        raise SystemExit(f"{python} does not exist; make it with `bash tools/sglang_cpu_env.sh`, or give --python")
    return python.absolute()


def versions(python: Path) -> dict[str, Any]:
    """What the numbers were measured with."""
    code = "import sglang, torch; print(sglang.__version__, torch.__version__)"
    output = subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=300, check=True).stdout
    sglang, torch = output.split()[-2:]
    return {"sglang": sglang, "torch": torch, "python": platform.python_version(), "cpu_count": os.cpu_count()}


def server(
    python: Path,
    model: Path,
    log: Path,
    *,
    seed: int = 0,
    environment: dict[str, str] | None = None,
    takes_shards: bool = False,
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
        env=environment or {},
        log_path=log,
        takes_shards=takes_shards,
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


def conclude(name: str, result: dict[str, Any], *, write: bool) -> None:
    """The end of a benchmark: writes its results if asked to; exit code 1 if it has `problems`."""
    if write:
        write_results(name, result)
    if result["problems"]:
        raise SystemExit("MISSED:\n  " + "\n  ".join(result["problems"]))


def write_results(name: str, result: dict[str, Any]) -> Path:
    """benchmarks/results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
