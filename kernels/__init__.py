"""Tensor kernels: tensors in, tensors out. This package knows nothing of chatsvc.

``transformers`` looks for an unrelated PyPI package that is also called ``kernels``. The version below lies
outside every range that it accepts, so a process that starts in the repository root can still import it.
"""

__version__ = "0.0.0"
