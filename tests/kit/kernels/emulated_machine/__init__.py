"""A processor with AMX, emulated: runs our kernels on tiles where no processor has them.

    python -m tests.kit.kernels.emulated_machine [--folder FOLDER]

builds the machine, boots it, and prints what its checks found; ends with 0 when all passed. A folder keeps the parts,
of which the emulator takes minutes to compile; without one they lie in a temporary folder. No part of `make test`.

The machine is Bochs, whose model of Sapphire Rapids computes on tiles in software, and Debian's kernel, whose only
process is `init.cpp`: it compares products on tiles with their arithmetic spelled out, and whole layers of `amx.so`
with those of `amx_emulated.so`, and has threads with tiles interrupt each other. What Bochs lacks is in `bochs.patch`,
which says what. A pass says that our instructions do what the manual defines; it says nothing about speed.

All parts come from Debian's archive, by an `apt` of our own that touches nothing of this machine's: so this needs
Debian or what is derived from it, its archive's keyring, a C++ compiler, make and patch.
"""
