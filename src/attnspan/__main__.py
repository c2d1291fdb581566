"""``python -m attnspan``: the command line."""

from attnspan.cli import main

if __name__ == "__main__":
    main()
