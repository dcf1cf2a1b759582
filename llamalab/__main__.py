"""`python -m llamalab` is `llamalab`."""

from llamalab.cli import run

if __name__ == "__main__":
    run()
