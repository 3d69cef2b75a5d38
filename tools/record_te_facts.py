"""Record names and shapes of our models' Transformer Engine layers, and that a checkpoint of them loads.

    python tools/record_te_facts.py    # writes tests/contract/facts_of_transformer_engine/megatron_core_VERSION.json

Run by people, in an environment with Transformer Engine (docs/gpu.md; no GPU is needed), once for each Megatron-core:
the oldest that requirements.txt takes, and the pinned one. torch is made to report a GPU while tensors stay on the CPU;
everything else is Transformer Engine's and Megatron's own code. Layers and optimizers are built, saved and loaded;
nothing runs forward. CI compares our tables with what this wrote (tests/contract/test_transformer_engine.py).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
FACTS = ROOT / "tests" / "contract" / "facts_of_transformer_engine"
sys.path.insert(0, str(ROOT))

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {**_COMMON, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    "qwen3": {**_COMMON, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "llama": {**_COMMON, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {
        **_COMMON,
        **_EXPERTS,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
    },
}
"""config.json of each model; the test reads them here too."""


class _Pretended:
    major, minor, multi_processor_count, name, total_memory = 9, 0, 132, "pretended", 80 << 30


def _pretend() -> None:
    """Answer as a machine with one GPU would; tensors stay on the CPU."""
    from megatron_daro.actor import cpu, device

    cpu.install()
    device.prepare = lambda: None
    device.current = lambda: torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_properties = lambda *_, **__: _Pretended
    cuda.get_device_capability = lambda *_, **__: (9, 0)
    cuda.current_device = lambda: "cpu"


def _built(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the shape, Megatron's options and the model, its weights drawn at random."""
    from megatron_daro.actor.model import build_model, transformer_config
    from megatron_daro.actor.parallel import Layout
    from megatron_daro.config.model_shape import read_model_shape

    shape = read_model_shape(config)
    options = transformer_config(shape, Layout(), dtype="bf16", transformer_engine=True)
    (model,) = build_model(shape, options, transformer_engine=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return shape, options, model


def _round_trip(model: Any) -> int:
    """Save, overwrite and load the model through our checkpoint files. Return the number of extra states."""
    from megatron_daro.actor.sharded_state import load_sharded, save_sharded

    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sharded = model.sharded_state_dict()
    with tempfile.TemporaryDirectory() as directory:
        save_sharded({"model": sharded}, Path(directory)).write()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = load_sharded({"model": model.sharded_state_dict()}, Path(directory))
        model.load_state_dict(state["model"], strict=True)
    wrong = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    if wrong:
        raise SystemExit(f"a checkpoint gave back other values of {', '.join(wrong[:5])}")
    return sum(type(x).__name__ == "ShardedObject" and isinstance(x.data, torch.Tensor) for x in sharded.values())


def _optimizer_round_trip(config: dict[str, Any], *, distributed: bool) -> bool:
    """Save a policy that has made no update yet, as a run that stops early does, and load it into another one.

    Returns:
        Whether weights and moments came back; the moments are zeros.
    """
    from megatron_daro.actor import checkpoint
    from megatron_daro.actor.compat import optimizer_parts

    first, second = (_train_state(config, distributed=distributed) for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        pending = checkpoint.start_save(first, Path(directory), Path(directory))
        pending.wait()
        checkpoint.load(second, Path(directory))
    states = [state for part in optimizer_parts(second.optimizer) for state in part.optimizer.state.values()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    pairs = zip(first.chunks[0].module.parameters(), second.chunks[0].module.parameters(), strict=True)
    return bool(moments) and not any(m.any() for m in moments) and all(torch.equal(a, b) for a, b in pairs)


def _train_state(config: dict[str, Any], *, distributed: bool) -> Any:
    from megatron_daro.actor.model import wrap_data_parallel
    from megatron_daro.actor.optimizer import build_optimizer, build_scheduler
    from megatron_daro.actor.step import TrainState
    from megatron_daro.algo.weighting import make_algorithm
    from megatron_daro.config.actor import OptimizerSection
    from megatron_daro.config.algorithm import AlgorithmSection

    _, options, model = _built(config)
    chunks = wrap_data_parallel([model], options, distributed_optimizer=distributed, options={})
    section = OptimizerSection(distributed=distributed)
    optimizer = build_optimizer(chunks, section, dtype="bf16", options={})
    algorithm = make_algorithm(**AlgorithmSection().arguments(rollouts_per_prompt=4, max_response_tokens=8))
    return TrainState(chunks, optimizer, build_scheduler(optimizer, section, total_steps=3), algorithm)


def _experts_in_fp8_saved() -> str:
    """Return why the experts' layers cannot be saved as they are after a step in fp8; "" if they can."""
    from transformer_engine.common.recipe import Float8CurrentScaling

    _, _, model = _built(MODELS["qwen3_moe"])
    for module in model.modules():
        if hasattr(module, "fp8_meta"):
            module.fp8 = True
            module.fp8_meta["recipe"] = Float8CurrentScaling()
    try:
        model.sharded_state_dict()
    except TypeError as error:
        return f"TypeError: {error}"
    return ""


def _fusing(model: Any) -> list[tuple[str, Any]]:
    """Return the layers that can add their weight gradients in the matrix product's kernel."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "fuse_wgrad_accumulation")]


def _facts(config: dict[str, Any]) -> dict[str, Any]:
    _, _, model = _built(config)
    states = model.state_dict()
    extra = {name: value for name, value in states.items() if name.endswith("_extra_state") and value is not None}
    fused = {name: module.fuse_wgrad_accumulation for name, module in _fusing(model)}
    return {
        "weight_gradients_fused": fused | {"output_layer": model.output_layer.gradient_accumulation_fusion},
        "parameters": {name: list(parameter.shape) for name, parameter in model.named_parameters()},
        "extra_states": {n: [str(v.dtype).removeprefix("torch."), list(v.shape)] for n, v in extra.items()},
        "extra_states_saved_and_loaded": _round_trip(model),
        "with_fp8_workspaces": sorted({type(m).__name__ for m in model.modules() if hasattr(m, "_fp8_workspaces")}),
        "loads_what_was_saved_before_an_update": {
            name: _optimizer_round_trip(config, distributed=name == "distributed") for name in ("distributed", "plain")
        },
    }


GPUS = {"A100": (8, 0), "A10": (8, 6), "L40": (8, 9), "H100": (9, 0), "B200": (10, 0), "B300": (10, 3), "X": (12, 0)}
CUDAS = ("12.1", "12.8", "12.9", "13.0")


def _supported() -> dict[str, dict[str, list[str]]]:
    """Return recipe -> CUDA -> the GPUs on which Transformer Engine's own check lets it run."""
    from transformer_engine.pytorch import quantization

    checks = {
        "tensorwise": quantization._compute_fp8_support,
        "blockwise": quantization._compute_fp8_block_scaling_support,
        "mxfp8": quantization._compute_mxfp8_support,
    }
    engine: Any = quantization
    engine.tex.get_cublasLt_version = lambda: 130000
    found: dict[str, dict[str, list[str]]] = {recipe: {cuda: [] for cuda in CUDAS} for recipe in checks}
    for (recipe, check), cuda, (gpu, capability) in itertools.product(checks.items(), CUDAS, GPUS.items()):
        torch.version.cuda = cuda
        engine.get_device_compute_capability = lambda capability=capability: capability
        if check()[0]:
            found[recipe][cuda].append(gpu)
    return found


def _recipes() -> dict[str, dict[str, str]]:
    """Return our recipe -> our format -> what Megatron makes of both: Transformer Engine's recipe and its format."""
    from megatron.core.fp8_utils import get_fp8_recipe

    from megatron_daro.actor.model import transformer_config
    from megatron_daro.actor.parallel import Layout
    from megatron_daro.actor.precision import fp8_options
    from megatron_daro.config.actor import ActorSection
    from megatron_daro.config.model_shape import read_model_shape

    shape, made = read_model_shape(MODELS["llama"]), dict[str, dict[str, str]]()
    for recipe, format_ in itertools.product(("tensorwise", "blockwise", "mxfp8"), ("hybrid", "e4m3")):
        actor = ActorSection.model_validate({"precision": "fp8", "fp8_recipe": recipe, "fp8_format": format_})
        config = transformer_config(shape, Layout(), dtype=actor.dtype, fp8=fp8_options(actor), transformer_engine=True)
        found = get_fp8_recipe(config)
        made.setdefault(recipe, {})[format_] = f"{type(found).__name__} {found.fp8_format.name}"
    return made


def main() -> None:
    """Write the facts."""
    warnings.simplefilter("ignore")
    _pretend()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    import megatron.core.tensor_parallel.random as tp_random
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    tracker: Any = tp_random.CudaRNGStatesTracker
    tracker.fork = lambda *_, **__: contextlib.nullcontext()
    versions = {name: version(name) for name in ("transformer_engine", "megatron-core", "torch")}
    facts = {"versions": versions, "models": {name: _facts(config) for name, config in MODELS.items()}}
    facts |= {"experts_in_fp8_saved": _experts_in_fp8_saved(), "recipes": _recipes(), "supported": _supported()}
    FACTS.mkdir(exist_ok=True)
    path = FACTS / f"megatron_core_{versions['megatron-core']}.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
