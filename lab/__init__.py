"""The laboratory: what measures this repository. It imports the package `tessera`, which never imports it.

Run its commands in the repository's root: `python -m lab --help`.
"""
