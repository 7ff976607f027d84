"""``python -m fedhdp`` is the command ``fedhdp``."""

from fedhdp.cli import main

main()
