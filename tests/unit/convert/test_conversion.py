"""HF -> Megatron -> HF: bit for bit through either format; casts, cards, files, going on after a stop."""

from __future__ import annotations

import errno
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hf_checkpoints import (
    CARD_FILE,
    RefusedError,
    assert_equal,
    config_of,
    convert,
    make_hf,
    replace_tensor,
    small_pieces,
    tensors_of,
    to_hf,
    to_megatron,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatron_daro.config.model_files import read_model
from megatron_daro.convert.hf_files import HFCheckpoint, write_hf_checkpoint
from megatron_daro.errors import ModelError
from megatron_daro.sync import fp8_cast

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss", "olmo3")
FAMILIES += ("qwen3_next", "qwen3_5_text")
FORMATS = ("daro", "torch_dist")


@pytest.fixture(autouse=True)
def pieces():
    with small_pieces():
        yield


models = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILIES),
        "num_hidden_layers": st.integers(1, 3),
        "num_key_value_heads": st.sampled_from([1, 2, 4]),
        "intermediate_size": st.integers(1, 20),
        "vocab_size": st.sampled_from([1, 61, 128, 130]),
        "tie_word_embeddings": st.booleans(),
    }
)


@settings(max_examples=20, deadline=None)
@given(models, st.sampled_from(FORMATS), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_there_and_back_is_the_same_bit_for_bit(tmp_path_factory, model, format_, dtype):
    root = tmp_path_factory.mktemp("round")
    dense = [0] if model["num_hidden_layers"] > 2 else []  # dense layers before those with experts
    mixed = {"mlp_only_layers": dense} if model["family"] == "qwen3_moe" else {}
    mixed |= {"first_k_dense_replace": len(dense)} if model["family"] in ("glm4_moe", "deepseek_v3") else {}
    mixed |= {"num_key_value_heads": 4} if model["family"] == "deepseek_v3" else {}
    given_ = make_hf(root / "hf", config_of(**{**model, **mixed}), dtype=dtype)
    to_megatron(root / "hf", root / "megatron", format_=format_)
    to_hf(root / "megatron", root / "back")
    assert_equal(tensors_of(root / "back"), given_)
    assert json.loads((root / "back/config.json").read_text()) == json.loads((root / "hf/config.json").read_text())
    assert (root / "back/tokenizer.json").read_bytes() == (root / "hf/tokenizer.json").read_bytes()
    shutil.rmtree(root)


@pytest.mark.parametrize("format_", FORMATS)
def test_layers_that_predict_further_tokens_go_along_as_they_are(tmp_path, format_):
    """Nothing here computes them; without them config.json says so."""
    given_ = make_hf(tmp_path / "hf", config_of("glm4_moe", num_nextn_predict_layers=1))
    further = {f"model.layers.2.{name}": torch.randn(16, 3).bfloat16() for name in ("eh_proj.weight", "mlp.x")}
    for name, tensor in further.items():
        replace_tensor(tmp_path / "hf", name, tensor)
    to_megatron(tmp_path / "hf", tmp_path / "one", format_=format_)
    convert(tmp_path / "two", "--megatron", tmp_path / "one", "--format", FORMATS[format_ == FORMATS[0]])
    to_hf(tmp_path / "two", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_ | further)
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
    to_megatron(tmp_path / "back", tmp_path / "again", format_=format_)
    to_hf(tmp_path / "again", tmp_path / "without", config=tmp_path / "hf")
    assert_equal(tensors_of(tmp_path / "without"), given_)
    assert json.loads((tmp_path / "without/config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("experts", [True, False])
def test_the_text_part_of_a_model_that_sees_images_is_read_and_the_rest_kept_as_it_is(tmp_path, format_, experts):
    family = f"qwen3_5{'_moe' * experts}"
    text = config_of("qwen3_next") if experts else config_of("qwen3_5_text")
    text |= {"model_type": f"{family}_text", "torch_dtype": "bfloat16", "mtp_num_hidden_layers": 1}
    given_ = make_hf(tmp_path / "text", text)
    others = {name: torch.randn(3, 4).bfloat16() for name in ("model.visual.patch_embed.weight", "mtp.fc.weight")}
    stored = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in given_.items()}
    for start in {name.partition("experts.")[0] + "experts." for name in stored if ".experts." in name}:
        parts = {
            part: [stored.pop(f"{start}{i}.{part}_proj.weight") for i in range(4)] for part in ("gate", "up", "down")
        }
        both = zip(parts["gate"], parts["up"], strict=True)
        stored[f"{start}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in both])
        stored[f"{start}down_proj"] = torch.stack(parts["down"])
    whole = {"model_type": family, "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    write_hf_checkpoint(tmp_path / "hf", (stored | others).items(), whole, tmp_path / "text")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", format_=format_)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_ | others)
    config = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: config[key] for key in text} == text and "vision_config" not in config
    assert "images" in read_model(tmp_path / "hf").problems[0].got


@pytest.mark.parametrize("format_", FORMATS)
def test_mxfp4_is_read_as_transformers_reads_it_and_written_in_bf16(tmp_path, format_):
    config = config_of("gpt_oss", hidden_size=64, intermediate_size=32, num_hidden_layers=1, torch_dtype="bfloat16")
    stored = dict(expected := make_hf(tmp_path / "bf16", config))
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in expected if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = expected[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(256, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        scales.view(-1)[:255] = torch.arange(255)  # all exponents; the last one is no number
        scales.clamp_(max=254)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    quantized = config | {"quantization_config": {"quant_method": "mxfp4"}}
    write_hf_checkpoint(tmp_path / "hf", stored.items(), quantized, tmp_path / "bf16")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", format_=format_)
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), expected)
    assert json.loads((tmp_path / "back/config.json").read_text()) == config


WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_nextn_predict_layers": 1,
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def in_blocks(directory, model):
    """Change the matrices of a checkpoint that DeepSeek publishes in fp8 into blocks."""
    for name, tensor in model.items():
        if name.endswith("proj.weight"):
            narrow, scales = fp8_cast.cast(tensor)
            replace_tensor(directory, name, narrow)
            replace_tensor(directory, f"{name}_scale_inv", scales)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCKS}))


@pytest.mark.slow
def test_fp8_blocks_are_read_as_transformers_reads_them_and_written_as_bf16(tmp_path):
    hf, further = tmp_path / "hf", {"model.layers.2.eh_proj.weight": torch.randn(256, 512).bfloat16()}
    model = make_hf(hf, config_of("deepseek_v3", **WIDE)) | further
    replace_tensor(hf, *next(iter(further.items())))
    in_blocks(hf, model)
    to_megatron(hf, tmp_path / "megatron", "--verify")
    to_hf(tmp_path / "megatron", tmp_path / "back", "--verify")
    found, config = tensors_of(tmp_path / "back"), json.loads((tmp_path / "back/config.json").read_text())
    assert found.keys() == model.keys() and "quantization_config" not in config
    assert {t.dtype for name, t in found.items() if not name.endswith("bias")} == {torch.bfloat16}
    stored = tensors_of(hf)
    for name, tensor in found.items():
        if scales := {key: stored[key] for key in [f"{name}_scale_inv"] if key in stored}:
            named = {"weight": stored[name], "weight_scale_inv": scales.popitem()[1]}
            assert torch.equal(tensor, Fp8Dequantize(None).convert(named)["weight"].bfloat16()), name
            assert not torch.equal(tensor, model[name]), "nothing was rounded"
        else:
            assert torch.equal(tensor, model[name]), name
    assert "convert --hf" in " ".join(str(problem) for problem in read_model(hf).problems)


@pytest.mark.parametrize("box", [(0, 300, None), (100, 290, (120, 200)), (128, 256, (128, 129)), (299, 300, (0, 1))])
def test_blocks_at_the_edges_are_smaller(tmp_path, box):
    """300 x 200 of 128 x 128, which transformers would take for blocks of 100 x 100."""
    narrow, scales = torch.randn(300, 200).to(torch.float8_e4m3fn), torch.rand(3, 2) + 0.5
    save_file({"a.weight": narrow, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    rows, columns = torch.arange(300)[:, None] // 128, torch.arange(200)[None] // 128
    want = (narrow.float() * scales[rows, columns]).bfloat16()
    start, stop, between = box
    with HFCheckpoint(tmp_path) as tensors:
        assert list(tensors) == ["a.weight"] and torch.equal(tensors["a.weight"], want)
        first, last = between or (0, 200)
        assert torch.equal(tensors.read("a.weight", start, stop, between), want[start:stop, first:last])
        filled = torch.zeros(stop - start, last - first)
        assert torch.equal(tensors.read("a.weight", start, stop, between, out=filled), filled) and filled.any()


@pytest.mark.parametrize("scales", [torch.ones(3, 3), torch.ones(6), torch.ones(3, 2, dtype=torch.uint8)])
def test_scales_of_other_blocks_are_refused(tmp_path, scales):
    narrow = torch.randn(300, 200).to(torch.float8_e4m3fn)
    save_file({"a.weight": narrow, "a.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"a\.weight_scale_inv"):
        HFCheckpoint(tmp_path)


def test_a_cast_leaves_the_bias_of_a_router_as_it_is(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of("glm4_moe", torch_dtype="float32"), dtype=torch.float32)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", dtype="bf16")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    kept = {name for name in given_ if name.endswith("correction_bias")}
    assert kept
    assert_equal(tensors_of(tmp_path / "back"), {n: t if n in kept else t.bfloat16() for n, t in given_.items()})
    assert json.loads((tmp_path / "back/config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_other_format_in_between_and_the_card_of_each(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "one", format_="torch_dist")
    to_hf(tmp_path / "one", tmp_path / "two")
    to_megatron(tmp_path / "two", tmp_path / "three", format_="daro")
    to_hf(tmp_path / "three", tmp_path / "four")
    assert_equal(tensors_of(tmp_path / "four"), given_)
    for folder in ("one", "two", "three", "four"):
        rows = json.loads((tmp_path / folder / CARD_FILE).read_text())["rows"]
        shapes = {tensor["name"]: tuple(tensor["shape"]) for row in rows for tensor in row["hf"]}
        assert shapes == {name: tuple(tensor.shape) for name, tensor in given_.items()}
        qkv = next(row for row in rows if row["megatron"]["name"].endswith("linear_qkv.weight[1]"))
        assert qkv["megatron"]["shape"] == [64, 16] and qkv["change"] == "rows rearranged"


def weights_in(folder: Path) -> Path:
    return folder / "release" if (folder / "release").is_dir() else folder


@pytest.mark.parametrize(("first", "second"), [FORMATS, FORMATS[::-1]])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_one_megatron_format_to_the_other_is_what_hf_gives(tmp_path, first, second, family):
    given_ = make_hf(tmp_path / "hf", config_of(family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {})))
    to_megatron(tmp_path / "hf", tmp_path / "first", format_=first)
    direct = convert(tmp_path / "second", "--megatron", tmp_path / "first", "--format", second)
    assert direct["rows"] == to_megatron(tmp_path / "hf", tmp_path / "through", format_=second)["rows"]
    files = [path for path in weights_in(tmp_path / "through").iterdir() if path.is_file()]
    names = sorted(path.name for path in files if path.name not in ("common.pt", CARD_FILE))
    assert len(names) > 2
    for name in names:
        ours, expected = (weights_in(tmp_path / folder) / name for folder in ("second", "through"))
        assert ours.read_bytes() == expected.read_bytes(), name
    to_hf(tmp_path / "second", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_a_cast_is_torchs_and_its_way_back_too(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of("qwen3", dtype="bfloat16"))
    rows = to_megatron(tmp_path / "hf", tmp_path / "wide", dtype="fp32")["rows"]
    assert {(row["change"], row["megatron"]["dtype"]) for row in rows} == {("cast", "float32")}
    to_hf(tmp_path / "wide", tmp_path / "back", dtype="bf16")
    assert_equal(tensors_of(tmp_path / "back"), given_)
    to_hf(tmp_path / "wide", tmp_path / "kept")
    assert_equal(tensors_of(tmp_path / "kept"), {name: tensor.float() for name, tensor in given_.items()})
    assert json.loads((tmp_path / "kept/config.json").read_text())["dtype"] == "float32"


def test_tensors_of_several_dtypes_become_one_with_a_cast(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    for name, dtype in (("k_proj.weight", torch.float32), ("q_proj.weight", torch.float64)):
        name = f"model.layers.1.self_attn.{name}"
        replace_tensor(tmp_path / "hf", name, given_[name].to(dtype))
    with pytest.raises(RefusedError, match=r"q_proj\.weight float64, .*k_proj\.weight float32.*--dtype"):
        to_megatron(tmp_path / "hf", tmp_path / "refused")
    to_megatron(tmp_path / "hf", tmp_path / "megatron", dtype="bf16")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_equal(tensors_of(tmp_path / "back"), given_)


def test_templates_and_licences_come_along_and_code_does_not(tmp_path):
    make_hf(tmp_path / "hf", config_of())
    own = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "LICENSE", "LICENSE.txt", "NOTICE")
    for name in (*own, "USE_POLICY.md", "modeling.py", "README.md"):
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_text(name)
    to_megatron(tmp_path / "hf", tmp_path / "megatron", format_="torch_dist")
    to_hf(tmp_path / "megatron", tmp_path / "back")
    for folder in (tmp_path / "megatron/hf", tmp_path / "back"):
        assert all((folder / name).read_text() == name for name in (*own, "USE_POLICY.md"))
        assert not (folder / "modeling.py").exists() and not (folder / "README.md").exists()


def test_several_processes_write_what_one_writes(tmp_path):
    """Files of HF come in parts, which several processes write at once."""
    make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    to_megatron(tmp_path / "hf", tmp_path / "one")
    to_megatron(tmp_path / "hf", tmp_path / "two", processes=2)
    for megatron, back, processes in (("one", "back_one", 1), ("two", "back_two", 2)):
        to_hf(tmp_path / megatron, tmp_path / back, "--max-shard-size", "12KB", processes=processes)
    for one, two in (("one", "two"), ("back_one", "back_two")):
        files = sorted(path.name for path in (tmp_path / one).glob("*.safetensors"))
        assert len(files) > 1
        assert all((tmp_path / two / f).read_bytes() == (tmp_path / one / f).read_bytes() for f in files)
    assert_equal(tensors_of(tmp_path / "back_two"), tensors_of(tmp_path / "hf"))


def test_files_of_hf_are_as_large_as_asked(tmp_path):
    given_ = make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    to_hf(tmp_path / "megatron", tmp_path / "large", "--max-shard-size", "1GB")
    assert [path.name for path in (tmp_path / "large").glob("*.safetensors")] == ["model.safetensors"]
    to_hf(tmp_path / "megatron", tmp_path / "small", "--max-shard-size", "5KB")
    assert all(path.stat().st_size < 5000 + 2000 for path in (tmp_path / "small").glob("*.safetensors"))
    assert tensors_of(tmp_path / "small").keys() == given_.keys()


def test_megatron_is_told_that_a_checkpoint_is_a_release(tmp_path):
    """As `save_checkpoint` of megatron/training/checkpointing.py writes it into its tracker file."""
    make_hf(tmp_path / "hf", config_of())
    to_megatron(tmp_path / "hf", tmp_path / "out", format_="torch_dist")
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"


@contextmanager
def disk_of(num_files: int):
    """The disk takes so many files of tensors, then nothing."""
    real, written = os.pwrite, set()

    def pwrite(descriptor, data, at):
        written.add(os.fstat(descriptor).st_ino)
        if len(written) > num_files:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield


@pytest.fixture(params=[*FORMATS, "hf"])
def stopped(request, tmp_path):
    """A conversion into each format whose disk got full in the middle: the directory it was to write, the call that
    goes on, and what HF's tensors are."""
    given_ = make_hf(tmp_path / "hf", config_of(num_hidden_layers=3))
    to, source, options = to_megatron, tmp_path / "hf", {"format_": request.param}
    if request.param == "hf":
        to_megatron(tmp_path / "hf", tmp_path / "megatron")
        to, source, options = to_hf, tmp_path / "megatron", {}
    out = tmp_path / "out"
    with disk_of(2), pytest.raises(RefusedError, match=str(out)):
        to(source, out, **options)
    assert not out.exists()

    def again(**more):
        return to(source, out, **options | more)

    return out, again, given_


def as_hf(out: Path) -> dict[str, torch.Tensor]:
    """What a converted checkpoint holds, as HF's tensors."""
    if not (out / "hf").is_dir():
        return tensors_of(out)
    to_hf(out, out.with_name("back"))
    return tensors_of(out.with_name("back"))


def test_a_second_run_goes_on_and_compares_what_it_finds(stopped):
    out, again, given_ = stopped
    assert {row["check"] for row in again()["rows"]} == {"written", "read back and compared"}
    assert not out.with_name(".out.partial").exists()
    assert_equal(as_hf(out), given_)


def test_a_file_that_changed_after_the_stop_is_found_and_written_again(stopped):
    out, again, given_ = stopped
    files = [*out.with_name(".out.partial").rglob("*.safetensors"), *out.with_name(".out.partial").rglob("*.distcp")]
    first = min(files, key=lambda path: path.name)
    content = bytearray(first.read_bytes())
    for i in range(len(content) // 3, len(content) * 2 // 3):
        content[i] ^= 1
    first.write_bytes(content)
    with pytest.raises(RefusedError):
        again()
    assert not out.exists()
    again()
    assert_equal(as_hf(out), given_)


def test_other_options_begin_again(stopped):
    out, again, given_ = stopped
    assert {row["check"] for row in again(dtype="fp32")["rows"]} == {"written"}
    assert_equal(as_hf(out), {name: tensor.float() for name, tensor in given_.items()})


def test_two_conversions_into_one_directory_are_refused(tmp_path, monkeypatch):
    make_hf(tmp_path / "hf", config_of())
    real, second = os.pwrite, []

    def pwrite(descriptor, data, at):
        if not second:
            second.append(None)
            with pytest.raises(RefusedError, match=str(tmp_path / "out")):
                to_megatron(tmp_path / "hf", tmp_path / "out")
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    to_megatron(tmp_path / "hf", tmp_path / "out")
    assert second and (tmp_path / "out" / CARD_FILE).is_file()


def test_every_file_is_on_the_disk_before_the_target_has_its_name(tmp_path, monkeypatch):
    """And then the name itself, in its directory."""
    make_hf(tmp_path / "hf", config_of())
    out, synced = tmp_path / "out", []

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, out.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    to_megatron(tmp_path / "hf", out)
    before = {inode for inode, named in synced if not named}
    assert {path.stat().st_ino for path in [out, *out.rglob("*")]} <= before
    assert synced[-1] == (tmp_path.stat().st_ino, True)
