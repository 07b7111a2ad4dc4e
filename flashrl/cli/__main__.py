"""``python -m flashrl.cli`` is ``flashrl``."""

from flashrl.cli import main

if __name__ == "__main__":
    main(prog_name="flashrl")
