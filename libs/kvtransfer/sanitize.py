"""Builds the native core with AddressSanitizer and UndefinedBehaviorSanitizer beside the installed one, and runs this package's tests on it.

    python sanitize.py [pytest arguments]

Leaks are looked for too; those of Python, of the test tools and of UCX itself are not ours to mend. Needs gcc with libasan (Debian: comes with gcc).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
TESTS = ("contract", "device", "abuse", "misuse", "faults", "process", "isolation", "devices", "torture")
#: Leaks with such a name among the four innermost frames are not this package's.
NOT_OURS = (
    "libpython",
    "python3",
    "Py",
    "numpy",
    "_multiarray",
    "xxhash",
    "libucs",
    "libucp",
    "libuct",
    "libucm",
    "ld-linux",
    "dlopen",
    "_dl_",
    "hypothesis",
)


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch, "lib")
        build = [sys.executable, "setup.py", "-q", "build", "--build-base", str(Path(scratch, "base")), "--build-lib", str(built)]
        subprocess.run(build, cwd=HERE, env={**os.environ, "BATON_KVTRANSFER_SANITIZE": "address,undefined"}, check=True)
        suppressions = Path(scratch, "lsan.txt")
        suppressions.write_text("".join(f"leak:{name}\n" for name in NOT_OURS), encoding="ascii")
        environment = {
            **os.environ,
            "PYTHONPATH": str(built),
            "LD_PRELOAD": " ".join(_runtime(name) for name in ("libasan.so", "libubsan.so")),
            "PYTHONMALLOC": "malloc",
            "ASAN_OPTIONS": "detect_leaks=1:malloc_context_size=4:abort_on_error=1:handle_segv=1:allocator_may_return_null=1",
            "LSAN_OPTIONS": f"suppressions={suppressions}:print_suppressions=0",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "BATON_TORTURE_ROOMS": "2000",
            "BATON_CYCLES": "200",
            "BATON_SANITIZED": "1",
        }
        tests = [str(HERE / "tests" / f"test_kvtransfer_{name}.py") for name in TESTS]
        where = subprocess.run(
            [sys.executable, "-c", "import baton.kvtransfer._native as n; print(n.__file__)"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not where.startswith(str(built)):
            raise SystemExit(f"the tests would run on {where}, not on the sanitized build")
        print(f"sanitized core: {where}", flush=True)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests, *sys.argv[1:]], env=environment, check=False
        ).returncode


def _runtime(name: str) -> str:
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"gcc has no {name}: install it (Debian: libasan and libubsan come with gcc)")
    return os.path.realpath(path)


if __name__ == "__main__":
    raise SystemExit(main())
