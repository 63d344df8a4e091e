"""Private APIs of other libraries that anyaccel uses: one module per library, one function per API.

Each function's docstring names the upstream file. `tests/upstream` runs every function against the
installed library and fails if the library has changed. Patches to torch are in
`emulator/torch_patch_registry.py`, and filters for other libraries' log messages are in
`library_logging.py`.
"""
