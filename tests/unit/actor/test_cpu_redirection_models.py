"""The CPU redirection leaves transformers alone: a model loaded after it computes what it computed before."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from heavy_cases import mostly_heavy

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from transformers import AutoModelForCausalLM

tokens = torch.arange(20)[None]
torch.empty(50_000_000).fill_(float("nan"))  # memory that is handed out again is no longer zero
before = AutoModelForCausalLM.from_pretrained(sys.argv[1])(tokens).logits if sys.argv[2] == "before" else None
from megatron_daro.actor import cpu

cpu.install()
after = AutoModelForCausalLM.from_pretrained(sys.argv[1])
frequencies = after.model.rotary_emb.inv_freq
expected = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
assert torch.allclose(frequencies, expected), frequencies
if before is not None:
    assert torch.equal(after(tokens).logits, before)
print("equal")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the redirection is for machines without a GPU")
@pytest.mark.parametrize("first_use", mostly_heavy(["before", "after"], "after"))
def test_from_pretrained_gives_the_same_model(tmp_path, first_use):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        vocab_size=50,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), first_use]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip().endswith("equal"), done.stderr
