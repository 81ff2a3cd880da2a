"""Data-parallel PyTorch training, one process per GPU. Start reading at `launch.py`, then docs/architecture.md."""

__version__ = "0.1.0"
