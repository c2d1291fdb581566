"""``python -m attnspan_lab``: the command ``attnspan``."""

from attnspan_lab.cli import main

if __name__ == "__main__":
    main()
