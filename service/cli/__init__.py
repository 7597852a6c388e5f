"""The command line: one file for each command. `serve` is in `supervisor`, `keys` in `access`."""
