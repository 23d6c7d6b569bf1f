"""Shared by all tests."""

from __future__ import annotations

import os

# Triton reads it at import: its kernels run in the interpreter on machines without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
