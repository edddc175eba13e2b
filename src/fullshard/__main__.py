"""``python -m fullshard`` is the command ``fullshard``."""

from fullshard.cli import main

if __name__ == "__main__":
    main()
