"""The config.json of a Megatron checkpoint's model: looked for beside it, or made from Megatron-LM's own arguments.

`convert --megatron` without `--hf-config` -> `find_config` -> the plan. Megatron-LM and slime
save their arguments, a pickled argparse.Namespace, in `common.pt`. It is read without running anything: every class in
it stands for an inert record. Refuses arguments of a model that is in no family here.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_daro.config.model_shape import read_model_shape
from megatron_daro.convert.inert_pickle import Inert, InertUnpickler
from megatron_daro.convert.megatron_weights import checkpoint_directory
from megatron_daro.convert.plan import ModelConfig
from megatron_daro.convert.torch_dist import COMMON_FILE
from megatron_daro.errors import CheckpointError, ModelError
from megatron_daro.families import families
from megatron_daro.workshop.convert.conversion import HF_FOLDER

_VERL_FOLDER = "huggingface"
_GIVE = "Name a folder with its config.json with --hf-config"

# Values that these arguments must have for a model that can be described here. A missing argument is accepted: older
# versions of Megatron-LM do not have all of them.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "apply_layernorm_1p": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "multi_latent_attention": (False,),
    "rotary_seq_len_interpolation_factor": (None,),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "window_size": (None,),
    "softmax_type": ("vanilla",),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "moe_shared_expert_intermediate_size": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
}
# Constants of `RotaryEmbedding._apply_scaling` (megatron/core/models/common/embeddings/rotary_pos_embedding.py, 0.16.1)
# that have no argument.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def find_config(megatron: Path) -> ModelConfig:
    """Return what describes a Megatron checkpoint's model: a folder, or else a config.json of Megatron-LM's arguments.

    Args:
        megatron: as in `checkpoint_directory`.

    Raises:
        CheckpointError: there is no such checkpoint. ModelError: nothing describes its model.
    """
    try:
        return find_config_folder(megatron)
    except ModelError:
        folder = checkpoint_directory(megatron)
        arguments = read_arguments(folder)
        if arguments is None:
            raise
        return config_from_arguments(arguments, folder / COMMON_FILE)


def find_config_folder(megatron: Path) -> Path:
    """Return the folder with the config.json and the tokenizer of a Megatron checkpoint's model.

    It is looked for, in this order: beside the tensors or above them, where `convert` and verl write it; at the
    `model.path` of the run that saved it; in the folder that slime was given as its model.

    Args:
        megatron: as in `checkpoint_directory`.

    Raises:
        CheckpointError: there is no such checkpoint. ModelError: there is no such folder.
    """
    folder = checkpoint_directory(megatron)
    above = folder.parent
    for candidate in (
        megatron / HF_FOLDER,
        folder / HF_FOLDER,
        above / HF_FOLDER,
        above / _VERL_FOLDER,
        folder,
        megatron,
    ):
        if (candidate / "config.json").is_file():
            return candidate
    run_config = folder.absolute().parent.parent / "config.yaml"  # RUN/checkpoints/step_N
    if run_config.is_file():
        from megatron_daro.config import resolve

        path = resolve(run_config).model.path
        if (path / "config.json").is_file():
            return path
    model = (read_arguments(folder) or {}).get("hf_checkpoint")
    if isinstance(model, str) and Path(model, "config.json").is_file():
        return Path(model)
    raise ModelError(
        f"{folder} has no config.json of its model with it, nor the arguments of Megatron-LM in {COMMON_FILE}. {_GIVE}"
    )


def read_arguments(folder: Path) -> dict[str, Any] | None:
    """Return Megatron-LM's arguments from a checkpoint's `common.pt`, instances of classes as inert records.

    Args:
        folder: with the tensors.

    Returns:
        The arguments by name; None where there is no such file, or it holds no arguments of Megatron-LM.

    Raises:
        CheckpointError: the file is torn.
    """
    path = folder / COMMON_FILE
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = archive.read(name)
        state = InertUnpickler(content, path).load()
    except Exception as error:  # a pickle of any bytes can fail in any way; nothing was run
        raise CheckpointError(
            f"{path} cannot be read: {type(error).__name__}: {error}; the checkpoint is torn. {_GIVE}"
        ) from None
    arguments = state.get("args") if isinstance(state, dict) else None
    return arguments.fields if isinstance(arguments, Inert) and arguments.fields else None


def config_from_arguments(arguments: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return the config.json of the model that Megatron-LM's arguments describe, of one of the families here.

    Where they name only the padded vocabulary, the model has its rows, with zeros for tokens that do not exist.

    Args:
        arguments: by name. where: the file that they come from, for messages.

    Raises:
        ModelError: one is missing, or no family has such a model.
    """
    wrong = [
        f"{name} {arguments[name]!r} (allowed: {' or '.join(map(repr, allowed))})"
        for name, allowed in _FIXED.items()
        if name in arguments and arguments[name] not in allowed
    ]
    if wrong:
        raise ModelError(f"{where}: the saved arguments ask for what is not supported: {'; '.join(wrong)}.")
    try:
        config = _config(arguments)
    except KeyError as error:
        raise ModelError(f"{where}: the saved arguments have no {error.args[0]}. {_GIVE}") from None
    read_model_shape(config)
    return config


def _config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    heads, layers = arguments["num_attention_heads"], arguments["num_layers"]
    model_type = _model_type(arguments)
    is_grouped = arguments.get("group_query_attention", True)
    config = {
        "architectures": [families()[model_type].architecture],
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": arguments["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": (arguments.get("num_query_groups") if is_grouped else None) or heads,
        "head_dim": arguments.get("kv_channels") or arguments["hidden_size"] // heads,
        "intermediate_size": arguments["ffn_hidden_size"],
        "vocab_size": arguments.get("vocab_size") or arguments["padded_vocab_size"],
        "max_position_embeddings": arguments["max_position_embeddings"],
        "rms_norm_eps": arguments.get("norm_epsilon") or arguments["layernorm_epsilon"],
        "rope_theta": float(arguments["rotary_base"]),
        "tie_word_embeddings": not arguments["untie_embeddings_and_output_weights"],
        "dtype": "bfloat16" if arguments.get("bf16") else "float16" if arguments.get("fp16") else "float32",
        **(_expert_config(arguments, model_type, layers) if arguments.get("num_experts") else {}),
    }
    if arguments.get("use_rope_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": arguments["rope_scaling_factor"], **_LLAMA3}
    return config


def _model_type(arguments: Mapping[str, Any]) -> str:
    """Return the family with these norms, biases and experts; of several the first by name: llama before mistral, which
    has the same tensors. Raises ModelError where there is none."""
    wanted = [bool(arguments.get(name)) for name in ("qk_layernorm", "add_qkv_bias", "num_experts")]
    excluded = {"mixtral"} if arguments.get("moe_router_pre_softmax") else set()
    for name, family in sorted(families().items()):
        # These have features that `_FIXED` refuses.
        others = family.switches or family.latent or family.linear or family.stacked or family.whole_qk_norm
        if others or name in excluded:
            continue
        if ["query_norm" in family.tensors, "qkv_bias" in family.tensors, family.experts is not None] == wanted:
            return name
    raise ModelError(
        f"no family has models with qk_layernorm {wanted[0]}, add_qkv_bias {wanted[1]}, experts {wanted[2]}. {_GIVE}"
    )


def _expert_config(arguments: Mapping[str, Any], model_type: str, layers: int) -> dict[str, Any]:
    keys = families()[model_type].experts
    assert keys is not None
    every = arguments.get("moe_layer_freq", 1)
    has_experts = every if isinstance(every, list) else [layer % every == 0 for layer in range(layers)]
    config = {
        keys.number[0]: arguments["num_experts"],
        keys.chosen: arguments["moe_router_topk"],
        keys.width: arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"],
    }
    if "gate_up" in families()[model_type].tensors:
        config["mlp_only_layers"] = [layer for layer in range(layers) if not has_experts[layer]]
    if isinstance(keys.normalize, str):
        config[keys.normalize] = not arguments.get("moe_router_pre_softmax", False)
    return config
