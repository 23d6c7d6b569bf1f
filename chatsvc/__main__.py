"""``python -m chatsvc``: the ``chatsvc`` command."""

from chatsvc.cli.main import main

if __name__ == "__main__":
    main()
