"""Bindings of llama.cpp's libraries, made from the headers that belong to them.

`c_headers` reads the headers into a description (plain data), `kept_description` keeps it on the
disk, and `library` makes ctypes classes and functions from it, under llama.cpp's own names.
`requirements` lists the names that this package uses, by capability.
"""
