"""Private APIs of other libraries that anyaccel uses: one module per library, one entry per API.

Each entry names the upstream file. `tests/upstream` exercises every entry against the installed library and fails when
the library changes. Patches of torch are in `emulator/torch_patches.py`, dropped log messages in `library_logging.py`.
"""
