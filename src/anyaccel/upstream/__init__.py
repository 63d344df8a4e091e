"""Private details of other libraries that anyaccel relies on: one module per library, one entry per detail.

Each entry names the upstream file. `tests/upstream` exercises every entry against the installed library and fails when
it changes. Patches of torch are in `emulator/torch_patches.py`, log messages that are dropped in
`library_logging.py`.
"""
