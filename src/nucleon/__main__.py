"""`python -m nucleon` is the command `nucleon`."""

from nucleon.cli import main

if __name__ == "__main__":
    main()
