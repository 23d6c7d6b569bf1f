"""chatsvc: a streaming chat service that people host themselves."""

__version__ = "0.1.0"
