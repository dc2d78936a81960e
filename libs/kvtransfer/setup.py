"""Builds the native core. It needs the headers of a libucx wheel (a build requirement) and links to nothing: libucp is opened at run time."""

import os
from importlib.util import find_spec
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

PACKAGE = "src/baton/kvtransfer"
SANITIZE = os.environ.get("BATON_KVTRANSFER_SANITIZE", "")


def ucx_headers() -> str:
    spec = find_spec("libucx")
    headers = Path(spec.submodule_search_locations[0]) / "include" if spec and spec.submodule_search_locations else Path("/usr/include")
    if not (headers / "ucp/api/ucp.h").is_file():
        raise SystemExit(f"UCX's headers were looked for in {headers}: install libucx-cu13 (or libucx-cu12, or libucx-dev) where this is built")
    return str(headers)


sanitizer = [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"] if SANITIZE else []
compile_args = ["-std=c++17", "-O3", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden", *sanitizer]
setup(
    ext_modules=cythonize(
        [
            Extension(
                "baton.kvtransfer._native",
                sources=[f"{PACKAGE}/_native.pyx", *sorted(str(path) for path in Path(PACKAGE, "native").glob("*.cpp"))],
                depends=sorted(str(path) for kind in ("hpp", "pxi", "map") for path in Path(PACKAGE, "native").rglob(f"*.{kind}")),
                include_dirs=[f"{PACKAGE}/native", ucx_headers()],
                extra_compile_args=compile_args,
                extra_link_args=["-ldl", "-pthread", f"-Wl,--version-script={PACKAGE}/native/exports.map", *sanitizer],
                language="c++",
            ),
            Extension(
                "baton.kvtransfer.bench._lock",
                sources=[f"{PACKAGE}/bench/_lock.pyx"],
                extra_compile_args=compile_args,
                extra_link_args=sanitizer,
                language="c++",
            ),
        ],
        build_dir="build/cython",
    )
)
