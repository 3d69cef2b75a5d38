"""What mcore-bridge's loader puts into a rank's parameters; test_mcore_bridge.py runs this in a process of its own, for
mcore-bridge changes Megatron-core when it is imported.

Arguments: checkpoint folders. In each, ranks.json names files with a rank's parameters, and its place: [rank, size] in
`tp`, `etp` and `ep`. The tensors of a file get the values that the loader gives parameters of these names and shapes.

mcore-bridge 1.6.5 imports Transformer Engine (`patcher._patch_transformer_engine`) and builds its models of it; its
loader does without. So the imported names are empty classes and mocks here, and bare modules hold the parameters.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch
from megatron.core import mpu
from megatron.core.extensions import transformer_engine as layers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig


def stand_in_for_transformer_engine():
    for name, value in dict(vars(layers)).items():
        if value is None and name[0].isupper():
            setattr(layers, name, type(name, (torch.nn.Module,), {}))
    package = types.ModuleType("transformer_engine")
    package.__spec__, package.pytorch = MagicMock(), MagicMock(Float8BlockwiseQTensor=type("Never", (), {}))
    sys.modules["transformer_engine"] = package
    sys.modules["transformer_engine.pytorch"] = package.pytorch
    sys.modules["transformer_engine.pytorch.attention"] = package.pytorch.attention


def modules(parameters):
    """Bare modules that hold parameters under their names, as far as the loader looks at a model."""
    root = torch.nn.Module()
    for name, values in parameters.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.ModuleList() if part == "layers" else torch.nn.Module())
            module = module._modules[part]
        module.register_buffer(last, values)
    if not hasattr(root, "output_layer"):  # the embedding is it
        root.output_layer = types.SimpleNamespace(weight=None)
    for number, layer in enumerate(root.decoder.layers, 1):
        layer.layer_number = number
    root.language_model, root.vp_stage = root, None
    return root


def load(folder):
    from mcore_bridge import ModelConfig, hf_to_mcore_config

    options = hf_to_mcore_config(AutoConfig.from_pretrained(folder))
    bridge = ModelConfig(**options, params_dtype=torch.float32, language_model_only=True).bridge
    for file, places in json.loads((folder / "ranks.json").read_text()).items():
        for kind, (rank, size) in places.items():
            setattr(bridge, f"{kind}_rank", rank)
            setattr(bridge, f"{kind}_size", size)
        parameters = load_file(folder / file)
        bridge.load_weights([modules(parameters)], str(folder))
        save_file(parameters, folder / file)


def main():
    stand_in_for_transformer_engine()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    for folder in sys.argv[1:]:
        load(Path(folder))


if __name__ == "__main__":
    main()
