"""``python -m mla_ref``: the command `mla-ref`, also without an install."""

from mla_ref.cli import main

if __name__ == "__main__":
    main()
