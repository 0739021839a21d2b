"""``python -m tiermem.cli``: the same as the console script."""

from tiermem.cli import main

if __name__ == "__main__":
    main()
