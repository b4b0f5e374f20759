"""`python -m raypo.cli` is the `raypo` command."""

from raypo.cli import main

main()
