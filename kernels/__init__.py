"""One file per kernel: its golden reference and its implementations side by side."""
