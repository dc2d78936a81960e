"""Generates baton.wire.v1 from protos/, or checks that what is committed is what would be generated.

    python libs/wire/generate.py            write
    python libs/wire/generate.py --check    exit 1 and name the files that differ

Needs grpcio-tools and mypy-protobuf at the versions pinned in constraints.txt: another version writes other text.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
TARGET = ROOT / "libs" / "wire" / "src" / "baton" / "wire" / "v1"


def generate(into: Path) -> dict[str, str]:
    """The generated modules by file name. The protos' package is baton.v1; the Python home is baton.wire.v1."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = files("grpc_tools") / "_proto"
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", f"-I{well_known}",
            f"--python_out={into}", f"--grpc_python_out={into}", f"--mypy_out=quiet:{into}", f"--mypy_grpc_out=quiet:{into}",
            *sources,
        ],
        check=True,
    )  # fmt: skip
    modules = {}
    for path in sorted(into.rglob("*.py*")):
        text = re.sub(r"\bbaton\.v1\b(?=\s+import)", "baton.wire.v1", path.read_text())
        text = re.sub(r"^import baton\.v1\.", "import baton.wire.v1.", text, flags=re.M)
        if path.suffix == ".pyi":
            text = re.sub(r"\bbaton\.v1\.", "baton.wire.v1.", text)
        if path.name.endswith("_grpc.py") and "service " not in (PROTOS / "baton/v1" / path.name.replace("_pb2_grpc.py", ".proto")).read_text():
            continue
        modules[path.name] = text
    return modules


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        modules = generate(Path(temporary))
    if "--check" in sys.argv[1:]:
        committed = {p.name: p.read_text() for p in TARGET.glob("*_pb2*")}
        stale = sorted(name for name in modules.keys() | committed.keys() if modules.get(name) != committed.get(name))
        if stale:
            print(f"stale in {TARGET.relative_to(ROOT)}: {', '.join(stale)}; run: python libs/wire/generate.py", file=sys.stderr)
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for stale_file in TARGET.glob("*_pb2*"):
        stale_file.unlink()
    for name, text in modules.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
