"""Packaging of megatron_daro. Ranges are those that were tested together; requirements.txt pins the same."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent


def read_requirements() -> list[str]:
    lines = (line.split("#")[0].strip() for line in (HERE / "requirements.txt").read_text().splitlines())
    return [line for line in lines if line]


setup(
    name="megatron_daro",
    version="0.1.0",
    description="Difficulty-aware reinforcement learning (DARO) on Megatron-core",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_daro", "megatron_daro.*"]),
    package_data={"megatron_daro": ["py.typed", "observe/assets/*"]},
    install_requires=read_requirements(),
    extras_require={
        "gpu": ["transformer_engine[pytorch]>=2.4"],
        "dev": [
            "pytest>=9,<10",
            "pytest-timeout>=2.4,<3",
            "pytest-xdist>=3.8,<4",
            "hypothesis>=6.170,<7",
            "filelock>=3,<5",
            "cosmic-ray>=8.7,<9",
            "ruff>=0.17,<0.18",
            "mypy>=2.4,<3",
            "pre-commit>=4,<5",
        ],
        "wandb": ["wandb>=0.20"],
    },
    entry_points={"console_scripts": ["megatron-daro=megatron_daro.cli:main"]},
)
